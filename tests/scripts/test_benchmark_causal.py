import re

import pytest

from scripts.benchmarks import causal
from tests.helpers import FLOAT32_FORWARD, random_qkv, relative_rms


def test_a_short_run_times_every_variant(capsys):
    sizes = ["--lengths", "32", "64", "--heads", "1", "--head-dim", "32", "--repeats", "1"]
    assert causal.main(sizes) == 0
    out = capsys.readouterr().out
    for length in (32, 64):
        for name in causal.VARIANTS:
            row = re.search(rf"^{name} +{length} +([\d.]+) .* +([\d.]+) .* +([\d.]+)$", out, re.MULTILINE)
            assert row
            assert name != causal.CAUSAL or float(row[3]) == 1
    assert "time of causal LLN grows like N^" in out


def test_only_the_last_row_of_causal_attention_sees_what_all_rows_of_the_other_see():
    q, k, v = random_qkv(length=70)
    whole = causal.VARIANTS["LLN"](q, k, v)
    found = causal.VARIANTS[causal.CAUSAL](q, k, v)
    assert relative_rms(found[:, :, -1], whole[:, :, -1]) <= FLOAT32_FORWARD
    assert relative_rms(found[:, :, :-1], whole[:, :, :-1]) > 0.1


@pytest.mark.parametrize("arguments", [["--lengths", "0"], ["--repeats", "0"]])
def test_wrong_usage(arguments):
    with pytest.raises(SystemExit) as error:
        causal.main(arguments)
    assert error.value.code == 2
