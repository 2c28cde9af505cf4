"""Test that every figure is drawn, and that its numbers show what the paper states."""

import csv
from collections import defaultdict

import pytest
from torch.utils.tensorboard import SummaryWriter

from scripts.figures import paper as paper_figures

pytestmark = pytest.mark.usefixtures("quick_table")  # the separation figures have head dimension 12
RUN_FIGURES = ["1", "8", "9", "10"]
SIMULATED_FIGURES = [name for name in paper_figures.FIGURES if name not in RUN_FIGURES]


def read_csv(path):
    """Return the points (x, y) of every curve of a figure's CSV file, by panel and curve."""
    points = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            points[row["panel"], row["curve"]].append((float(row["x"]), float(row["y"])))
    return points


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Draw the simulated figures once in tiny sizes; return their directory."""
    out = tmp_path_factory.mktemp("figures")
    assert paper_figures.main(["--fast", "--out", str(out), "--only", *SIMULATED_FIGURES]) == 0
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SIMULATED_FIGURES)
def test_simulated_figures_are_drawn(simulated, name):
    assert (simulated / f"figure_{name}.png").read_bytes().startswith(b"\x89PNG")
    curves = read_csv(simulated / f"figure_{name}.csv")
    assert len(curves) >= 6
    for (panel, _), points in curves.items():
        assert len(points) > 1 or panel == "features d"


@pytest.fixture(scope="module")
def figure_2(simulated):
    """The y values of Figure 2 by the title of the panel, without sizes, and the curve."""
    panels = defaultdict(dict)
    for (panel, curve), points in read_csv(simulated / "figure_2.csv").items():
        panels[panel.split(",")[0]][curve] = [y for _, y in points]
    return panels


@pytest.mark.exhaustive
@pytest.mark.parametrize("panel", ["Entropy", "Spectral gap"])
def test_only_matched_lln_follows_softmax_over_temperatures(figure_2, panel):
    def distance(curve):
        return sum(abs(y - softmax) for y, softmax in zip(curves[curve], curves["softmax"], strict=True))

    curves = figure_2[panel]
    for curve in curves:
        if not curve.startswith(("softmax", "LLN, m")):
            assert distance(curve) > 4 * distance("LLN, matched")


def write_run(directory, alpha, accuracy=None, updates=(10, 20, 30)):
    """Write the scalars of a run with two layers, in the directories of fairseq, the attention and the probe."""
    constants = {"attention/alpha/layer_00": alpha, "attention/alpha/layer_01": alpha}
    falling = ["train_inner/loss", "train_inner/inverse_loss_scale", "valid/loss"]
    if accuracy is not None:
        constants["valid/accuracy"] = accuracy
    for name in ("attention/beta", "probe/tau_sm", "probe/entropy", "probe/spectral_gap"):
        falling += [f"{name}/layer_00", f"{name}/layer_01"]
    for folder in ("train_inner", "valid", "attention", "probe"):
        with SummaryWriter(directory / "tensorboard" / folder) as writer:
            for tag in [*constants, *falling]:
                if tag.startswith(f"{folder}/"):
                    for update in updates:
                        writer.add_scalar(tag.removeprefix(f"{folder}/"), constants.get(tag, 1 / update), update)


def test_figures_of_runs(tmp_path, capsys):
    write_run(tmp_path / "fixed", alpha=4.0, accuracy=70.0)
    write_run(tmp_path / "a=b", alpha=2.0, accuracy=80.0)
    runs = [f"α = 4={tmp_path / 'fixed'}", f"matched={tmp_path / 'a=b'}"]
    unnamed = str(tmp_path / "a=b" / "tensorboard")

    assert paper_figures.main(["--only", "8", "10", "--out", str(tmp_path), "--run", *runs]) == 0
    assert paper_figures.main(["--only", "1", "9", "--out", str(tmp_path), "--run", unnamed]) == 0  # a panel per layer

    for name in RUN_FIGURES:
        assert (tmp_path / f"figure_{name}.png").read_bytes().startswith(b"\x89PNG")
    assert read_csv(tmp_path / "figure_10.csv")["(a) accuracy by α", "α = 4"] == [(4.0, 70.0)]
    assert read_csv(tmp_path / "figure_10.csv")["(b) stability in fp16", "matched"][0] == (10.0, 0.1)
    assert read_csv(tmp_path / "figure_9.csv")["tensorboard", "layer 1"][0] == (10.0, 2.0)
    assert read_csv(tmp_path / "figure_1.csv")["tensorboard", "layer 0"][1] == (20.0, 0.05)
    assert "matched: α 2.00 (2.00 to 2.00), accuracy 80.00 %" in capsys.readouterr().out


def test_figures_without_runs_are_skipped(tmp_path, capsys):
    assert paper_figures.main(["--only", "1", "10", "--out", str(tmp_path)]) == 1

    assert capsys.readouterr().out.count("skipped: no runs given (--run LABEL=DIR)") == 2


def test_figures_without_needed_curves_are_skipped(tmp_path, capsys):
    with SummaryWriter(tmp_path / "run" / "valid") as writer:
        writer.add_scalar("loss", 1.0, 1)

    run = ["--run", f"mine={tmp_path / 'run'}"]
    assert paper_figures.main(["--only", "8", "9", "--out", str(tmp_path), *run]) == 0

    assert "figure 9 skipped: none of the runs mine has α and β (LLN attention)" in capsys.readouterr().out


def test_run_without_scalars_is_rejected(tmp_path, capsys):
    with pytest.raises(SystemExit):
        paper_figures.main(["--run", f"none={tmp_path / 'nothing'}"])

    assert f"no TensorBoard scalars below '{tmp_path / 'nothing'}'" in capsys.readouterr().err
