"""Test the times and the memory of calls on a CPU."""

import time

import pytest

from lln_fairseq import timing
from lln_fairseq.timing import Spread, can_measure_resident_peak, interleaved, milliseconds, resident_peak


def test_milliseconds_are_those_of_the_call():
    assert 5 <= milliseconds(lambda: time.sleep(0.005), "cpu") < 1000


def test_calls_alternate_and_the_first_round_is_not_timed():
    calls = []

    times = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, "cpu", repeats=2)

    assert calls == ["a", "b"] * 3
    assert [len(of_name) for of_name in times.values()] == [2, 2]


def test_slow_call_is_not_repeated_more_than_the_minimum(monkeypatch):
    monkeypatch.setattr(timing, "MAX_SECONDS", 1e-3)

    times = interleaved({"slow": lambda: time.sleep(1e-3), "fast": lambda: None}, "cpu", repeats=9)

    assert (len(times["slow"]), len(times["fast"])) == (timing.MIN_REPEATS, 9)


def test_spread_has_median_and_range():
    assert Spread.of([3.0, 1.0, 2.5]).text(1) == "2.5 (1.0-3.0)"


@pytest.mark.skipif(not can_measure_resident_peak(), reason="needs Linux")
def test_resident_peak_is_that_of_the_call_without_what_was_prepared():
    size = 64 << 20

    def prepare(count):
        kept = bytes(b"x" * size)
        return lambda: len(count * kept)

    assert 2 * size <= resident_peak(prepare, 2) < 2.5 * size
