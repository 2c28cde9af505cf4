"""Every figure is drawn, and its numbers show what the paper says of it."""

import csv
import functools
from collections import defaultdict

import pytest
from torch.utils.tensorboard import SummaryWriter

from lln_fairseq.ops import moment_matching
from scripts import paper_figures

OF_RUNS = ["1", "8", "9", "10"]
SIMULATED = [name for name in paper_figures.FIGURES if name not in OF_RUNS]


@pytest.fixture(autouse=True, scope="module")
def quick_table():
    """The calibrated table of head dimension 12, for the separation figures, from a smaller simulation."""
    with pytest.MonkeyPatch.context() as patch:
        small = functools.partial(moment_matching.simulate_table, tokens=256, heads=2)
        patch.setattr(moment_matching, "simulate_table", small)
        moment_matching.calibration_table.cache_clear()
        yield
    moment_matching.calibration_table.cache_clear()


def curves(path):
    """{(panel, curve): [(x, y), ...]} of a figure's CSV."""
    found = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["panel"], row["curve"]].append((float(row["x"]), float(row["y"])))
    return found


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """What one fast run without --run wrote and said."""
    out = tmp_path_factory.mktemp("figures")
    assert paper_figures.main(["--fast", "--out", str(out), "--only", *SIMULATED]) == 0
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_figures_are_drawn(simulated, name):
    assert (simulated / f"figure_{name}.png").read_bytes().startswith(b"\x89PNG")
    found = curves(simulated / f"figure_{name}.csv")
    assert len(found) >= 6
    assert all(len(points) > 1 for (panel, _), points in found.items() if panel != "by d")


@pytest.mark.exhaustive
def test_only_matched_lln_follows_softmax_over_the_temperatures(simulated):
    found = defaultdict(dict)
    for (panel, curve), points in curves(simulated / "figure_2.csv").items():
        found[panel.split(",")[0]][curve] = [y for _, y in points]
    for by_curve in found.values():
        distance = {
            curve: sum(abs(y - softmax) for y, softmax in zip(ys, by_curve["softmax"], strict=True))
            for curve, ys in by_curve.items()
        }
        matched = distance["LLN, matched"]
        assert all(
            other > 4 * matched for curve, other in distance.items() if not curve.startswith(("softmax", "LLN, m"))
        )
        for curve in ("ReLU", "linear ReLU", "quadratic", "linear quadratic"):
            assert max(by_curve[curve]) - min(by_curve[curve]) < 1e-4 * by_curve[curve][0]  # indifferent to τ
        assert by_curve["softmax"] == sorted(by_curve["softmax"])  # Theorem 3.2
    assert set(found) == {"Entropy", "Spectral gap"}


def write_run(directory, alpha, accuracy=None, updates=(10, 20, 30)):
    """Scalars as a run of two layers has them, in the directories of fairseq, the attention and the probe."""
    tags = {
        "train_inner": ["loss", "inverse_loss_scale"],
        "valid": ["loss", *(["accuracy"] if accuracy else [])],
        "attention": [f"{name}/layer_{layer:02d}" for name in ("alpha", "beta") for layer in (0, 1)],
        "probe": [f"{name}/layer_{layer:02d}" for name in ("tau_sm", "entropy", "spectral_gap") for layer in (0, 1)],
    }
    for name, scalars in tags.items():
        with SummaryWriter(directory / "tensorboard" / name) as writer:
            for update in updates:
                for tag in scalars:
                    value = alpha if tag.startswith("alpha") else accuracy if tag == "accuracy" else 1 / update
                    writer.add_scalar(tag, value, update)


def test_figures_of_runs(tmp_path, capsys):
    write_run(tmp_path / "fixed", alpha=4.0, accuracy=70.0)
    write_run(tmp_path / "a=b", alpha=2.0, accuracy=80.0)
    runs = [f"α = 4={tmp_path / 'fixed'}", str(tmp_path / "a=b" / "tensorboard"), f"matched={tmp_path / 'a=b'}"]
    assert paper_figures.main(["--only", *OF_RUNS, "--out", str(tmp_path), "--run", *runs]) == 0
    for name in OF_RUNS:
        assert (tmp_path / f"figure_{name}.png").read_bytes().startswith(b"\x89PNG")
    assert curves(tmp_path / "figure_10.csv")["(a) accuracy by α", "α = 4"] == [(4.0, 70.0)]
    assert curves(tmp_path / "figure_10.csv")["(b) stability in fp16", "matched"][0] == (10.0, 0.1)
    assert curves(tmp_path / "figure_9.csv")["matched", "layer 1"][0] == (10.0, 2.0)
    assert curves(tmp_path / "figure_1.csv")["tensorboard", "layer 0"][1] == (20.0, 0.05)
    assert "matched: α 2.00 (2.00 to 2.00), accuracy 80.00 %" in capsys.readouterr().out


def test_what_is_missing_is_said_in_a_line(tmp_path, capsys):
    assert paper_figures.main(["--only", "1", "10", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("skipped: no runs given (--run LABEL=DIR)") == 2
    with SummaryWriter(tmp_path / "run" / "valid") as writer:
        writer.add_scalar("loss", 1.0, 1)
    run = ["--run", f"mine={tmp_path / 'run'}"]
    assert paper_figures.main(["--only", "8", "9", "--out", str(tmp_path), *run]) == 0
    assert "figure 9 skipped: none of the runs mine has α and β (LLN attention)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        paper_figures.main(["--run", f"none={tmp_path / 'nothing'}"])
    assert f"no TensorBoard scalars below '{tmp_path / 'nothing'}'" in capsys.readouterr().err
