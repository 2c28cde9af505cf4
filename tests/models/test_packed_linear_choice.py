"""The choice of the way in which a CPU computes linear layers: by stored times, never by a stopwatch in these tests."""

import json
import math
from collections import Counter

import pytest
import torch
from torch import nn

from lln_fairseq.models.packed_linear import choice
from lln_fairseq.models.packed_linear.choice import plan_linear_layers, time_ways
from lln_fairseq.models.packed_linear.pack import pack_linear_layers
from lln_fairseq.models.packed_linear.precisions import BFloat16Way, OneDNNWay, QLinearWay, TorchWay, Way

SHAPE = (64, 48)
SHAPES = Counter({SHAPE: 3})
FAST = {  # seconds for a short text and for a long one
    "torch": [2e-3, 9e-3],
    "onednn": [1e-3, 8e-3],
    "bfloat16": [0.9e-3, 4e-3],
    "qlinear": [1e-3, 3e-3],
    "int_mm": [0.5e-3, 2e-3],
}


@pytest.fixture
def stub_times(monkeypatch):
    """Return a function that replaces the measured times of all shapes."""

    def stub(**changed):
        times = {**FAST, **changed}
        monkeypatch.setattr(choice, "measured_times", lambda shapes: dict.fromkeys(shapes, times))

    return stub


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Return an empty cache directory."""
    monkeypatch.setenv("LLN_KERNEL_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_fastest_way_of_the_precision_is_used(stub_times):
    stub_times()
    assert plan_linear_layers("float32", SHAPES).ways == {SHAPE: OneDNNWay}
    assert plan_linear_layers("bfloat16", SHAPES).ways == {SHAPE: BFloat16Way}
    stub_times(onednn=[1e-3, 30e-3], int_mm=[math.inf, math.inf])
    assert plan_linear_layers("float32", SHAPES).ways == {SHAPE: TorchWay}
    assert plan_linear_layers("int8", SHAPES).ways == {SHAPE: QLinearWay}


@pytest.mark.parametrize(
    ("int8_times", "warning"),
    [
        ([0.5e-3, 9e-3], "int8 is not faster on this processor: the model computes in float32"),
        ([1.1e-3, 2e-3], "int8 is not faster on this processor: the model computes in float32"),
        ([math.inf, math.inf], "int8 is slow or does not work on this processor: the model computes in float32"),
    ],
    ids=["slower for long texts", "slower for short texts", "does not work"],
)
def test_slow_precision_is_refused_with_one_warning(stub_times, caplog, int8_times, warning):
    stub_times(int_mm=int8_times, qlinear=int8_times)
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48), nn.Linear(48, 64)).eval()
    expected = model(torch.ones(5, 48))
    with caplog.at_level("WARNING"):
        assert pack_linear_layers(model, model, "int8") == "float32"
    assert caplog.messages == [warning]
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(5, 48)), expected)


def test_auto_takes_the_fastest_precision_with_a_small_error(stub_times, caplog):
    stub_times()
    assert plan_linear_layers("auto", SHAPES).precision == "bfloat16"  # int8 is faster, but its error is above 2 %
    stub_times(bfloat16=[0.9e-3, 9e-3])
    assert plan_linear_layers("auto", SHAPES).precision == "float32"
    assert not caplog.messages


def test_environment_variable_pins_the_ways(stub_times, monkeypatch):
    stub_times()
    monkeypatch.setenv("LLN_LINEAR", "torch, qlinear")
    assert plan_linear_layers("float32", SHAPES).ways == {SHAPE: TorchWay}
    assert plan_linear_layers("int8", SHAPES).ways == {SHAPE: QLinearWay}
    with pytest.raises(ValueError, match="LLN_LINEAR=torch,qlinear has no way of computing in bfloat16"):
        plan_linear_layers("bfloat16", SHAPES)
    monkeypatch.setenv("LLN_LINEAR", "mkl")
    with pytest.raises(ValueError, match=r"LLN_LINEAR must be a list of torch, onednn, .*, got 'mkl'"):
        plan_linear_layers("float32", SHAPES)


def test_unknown_precision_is_rejected():
    with pytest.raises(ValueError, match="precision must be one of float32, bfloat16, int8, auto, got 'fp16'"):
        plan_linear_layers("fp16", SHAPES)


def test_times_are_measured_once_and_kept(cache, monkeypatch):
    first = plan_linear_layers("float32", SHAPES)
    (file,) = cache.iterdir()
    stored = json.loads(file.read_text())
    assert list(stored) == ["48 to 64"]
    monkeypatch.setattr(choice, "time_ways", None)  # calling it would raise
    assert plan_linear_layers("float32", SHAPES) == first
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")  # of another kind of processor
    with pytest.raises(TypeError):
        plan_linear_layers("float32", SHAPES)


@pytest.mark.parametrize("content", ["", "[]", '{"48 to 64": {"torch": [1]}}', '{"48 to 64": 3}'])
def test_damaged_file_of_times_is_measured_again(cache, content):
    plan_linear_layers("float32", SHAPES)
    (file,) = cache.iterdir()
    file.write_text(content)
    plan_linear_layers("float32", SHAPES)
    assert "48 to 64" in json.loads(file.read_text())


def test_ways_that_do_not_work_are_not_chosen(monkeypatch):
    class WrongWay(Way):
        precision = "int8"

        def __call__(self, x, gelu=False):
            return x.new_zeros(len(x), len(self.weight))

    class FailingWay(WrongWay):
        def __call__(self, x, gelu=False):
            raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(choice, "WAYS", {"torch": TorchWay, "wrong": WrongWay, "failing": FailingWay})
    times = time_ways(SHAPE)
    assert times["wrong"] == times["failing"] == [math.inf, math.inf]
    assert max(times["torch"]) < math.inf


def test_products_are_timed_with_several_copies_of_the_weight(monkeypatch):
    """A weight that is multiplied again at once is still in the cache, unlike those of a model."""
    weights = []

    class RecordedWay(TorchWay):
        def __call__(self, x, gelu=False):
            weights.append(self.weight.data_ptr())
            return super().__call__(x, gelu)

    monkeypatch.setattr(choice, "WAYS", {"torch": RecordedWay})
    choice.time_ways((8, 4))
    assert len(set(weights[-choice.MOST_COPIES :])) == choice.MOST_COPIES
