"""Test the image experiment: loading pictures, training, tables, figures and bad input."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lln_fairseq.attention import build_attention
from scripts import vit
from scripts.tables import mean_and_range
from scripts.vit import ViTLayer, ViTSettings, load_digits_pictures, load_folder_pictures

SMALL = ["--layers", "1", "--width", "32", "--heads", "1", "--patch", "4", "--epochs", "2", "--lr", "0.01"]
SETTINGS = ViTSettings(
    "lln",
    seed=1,
    classes=2,
    channels=3,
    side=8,
    patch=4,
    layers=1,
    width=32,
    heads=1,
    epochs=4,
    batch=8,
    lr=0.01,
    weight_decay=0.0,
    fp16=False,
)


def make_folder(path, side=8, count=8):
    """Write a class of dark pictures and a class of light ones."""
    generator = np.random.default_rng(0)
    for label, name in enumerate(("dark", "light")):
        (path / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(100 * label, 100 * label + 100, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path / name / f"{number}.png")
    return path


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def one_run(pictures, out):
    """Return the arguments of one small run of LLN."""
    return ["--images", str(pictures), "--out", str(out), *SMALL, "--attentions", "lln", "--seeds", "1"]


@pytest.mark.parametrize("name", ["softmax", "lln", "linformer"])
def test_layer_adds_attention_and_mlp(name):
    settings = replace(SETTINGS, width=64, heads=2, dropout=0.0)
    layer = ViTLayer(settings, build_attention(name, num_heads=2, head_dim=32, max_positions=5))
    x = torch.randn(3, 5, 64)

    first = layer.attention
    projections = first.qkv(first.norm(x)).chunk(3, dim=-1)
    q, k, v = (projection.unflatten(-1, (2, 32)).transpose(1, 2) for projection in projections)
    attended = (first.attention.attention_matrix(q, k) @ v).transpose(1, 2).flatten(2)
    middle = x + first.out(attended)

    torch.testing.assert_close(layer(x), middle + layer.mlp(middle), rtol=1e-4, atol=1e-5)


def test_training_learns(tmp_path):
    result = vit.train(SETTINGS, load_folder_pictures(make_folder(tmp_path, count=20), None))

    assert result["test"] == 100
    assert result["history"][-1]["loss"] < result["history"][1]["loss"]


def test_program_writes_results_table_and_figures(tmp_path, capsys):
    pictures = make_folder(tmp_path / "pictures")
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--images", str(pictures), "--seeds", "1", "2", "--fixed", "2", *SMALL]

    assert vit.main(arguments) == 0

    table = capsys.readouterr().out
    for attention in ("softmax", "lln", "linformer:projected_length=1", "lln:alpha=2,beta=2"):
        directory = attention.translate(str.maketrans(":=,", "---"))
        results = [json.loads(file.read_text()) for file in out.glob(f"{directory}/*/result.json")]
        assert len(results) == 2
        assert all(result["provenance"]["versions"]["torch"] == torch.__version__ for result in results)
        assert f"{attention}  " in table
        assert mean_and_range([result["test"] for result in results]) in table
    for figure in ("figure_9", "figure_10"):
        assert (out / f"{figure}.png").stat().st_size > 10_000
    accuracies = [row for row in read_csv(out / "figure_10.csv") if row["panel"] == "(a) accuracy by α"]
    assert [row["x"] for row in accuracies if "alpha=2" in row["curve"]] == ["2", "2"]
    alphas = [row for row in read_csv(out / "figure_9.csv") if row["panel"] == "lln, run 1" and row["y_axis"] == "α"]
    assert [row["x"] for row in alphas] == ["0", "1", "2"]


def test_splits_share_no_picture():
    parts = [load_digits_pictures().split(name) for name in ("train", "valid", "test")]

    pictures = [{tuple(picture) for picture in part.pixels.flatten(1).tolist()} for part in parts]

    assert sum(len(part.labels) for part in parts) == 1797
    assert len(set.union(*pictures)) == sum(map(len, pictures))


def test_side_scales_pictures_of_other_sizes(tmp_path):
    make_folder(tmp_path)
    Image.new("L", (20, 10), 255).save(tmp_path / "dark" / "9.jpg")

    pictures = load_folder_pictures(tmp_path, 4)

    assert pictures.pixels.shape == (17, 3, 4, 4)
    assert pictures.classes == ["dark", "light"]
    assert pictures.labels.tolist() == [0] * 9 + [1] * 8


def write_picture_of_another_size(path):
    Image.new("RGB", (8, 9)).save(path / "light" / "99.png")


def write_damaged_picture(path):
    (path / "dark" / "0.png").write_bytes(b"no picture")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (write_picture_of_another_size, [], "99.png has 8 x 9 pixels: all pictures must be square and of one size"),
        (write_damaged_picture, [], "0.png is not a readable picture"),
        (lambda path: None, ["--patch", "3"], "pictures of 8 pixels cannot be cut into patches of 3"),
    ],
)
def test_bad_input_ends_in_one_line(change, arguments, message, tmp_path, capsys):
    path = make_folder(tmp_path / "pictures")
    change(path)

    assert vit.main(["--images", str(path), "--out", str(tmp_path / "out"), *SMALL, *arguments]) == 1

    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out").exists()


def test_diverged_run_writes_no_result(tmp_path, capsys):
    arguments = [*one_run(make_folder(tmp_path / "pictures"), tmp_path / "out"), "--lr", "1e18"]

    assert vit.main(arguments) == 1

    assert "is not finite" in capsys.readouterr().err
    assert not list(tmp_path.rglob("result.json"))
