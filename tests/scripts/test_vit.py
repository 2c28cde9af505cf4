"""The image experiment: pictures of folders and digits, a model that learns, runs that go on, figures, bad input."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from lln_fairseq.attention import build_attention
from scripts.experiments import vit
from scripts.experiments.vit_model import Layer, Shape
from scripts.experiments.vit_pictures import digits, folder
from scripts.experiments.vit_training import Recipe, Run

SMALL = ["--layers", "1", "--width", "32", "--heads", "1", "--patch", "4", "--epochs", "2", "--lr", "0.01"]


def make_folder(path, side=8, count=8):
    """Dark pictures and light ones."""
    generator = np.random.default_rng(0)
    for label, name in enumerate(("dark", "light")):
        (path / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(100 * label, 100 * label + 100, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path / name / f"{number}.png")
    return path


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["softmax", "lln", "linformer"])
def test_a_layer_is_attention_and_a_feed_forward_part(name):
    shape = Shape(classes=2, channels=1, side=8, patch=4, width=64, heads=2, dropout=0.0)
    layer = Layer(shape, build_attention(name, num_heads=2, head_dim=32, max_positions=5))
    x = torch.randn(3, 5, 64)
    q, k, v = (
        part.unflatten(-1, (2, 32)).transpose(1, 2) for part in layer.qkv(layer.attention_norm(x)).chunk(3, dim=-1)
    )
    middle = x + layer.out((layer.attention.attention_matrix(q, k) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), middle + layer.mlp(middle), rtol=1e-4, atol=1e-5)


def test_a_run_learns_and_goes_on_exactly(tmp_path):
    pictures = folder(make_folder(tmp_path / "pictures", count=20), None)
    shape = Shape(classes=2, channels=3, side=8, patch=4, layers=1, width=32, heads=1)
    recipe = Recipe("lln", seed=1, epochs=4, batch=8, lr=0.01, weight_decay=0.0, fp16=False)

    def run(name):
        return Run(tmp_path / name, recipe, shape, pictures, "cpu")

    whole = run("whole").finish()
    assert whole["test"] == 100
    assert whole["history"][-1]["loss"] < whole["history"][1]["loss"]
    begun = run("parts")
    begun._save = _interrupted_after(begun, epochs=2)
    with pytest.raises(KeyboardInterrupt):
        begun.finish()
    assert json.dumps(run("parts").finish()) == json.dumps(whole)
    finished = (tmp_path / "parts" / "result.json").stat().st_mtime_ns
    run("parts").finish()  # what is there is not done again
    assert (tmp_path / "parts" / "result.json").stat().st_mtime_ns == finished
    assert not (tmp_path / "parts" / "checkpoint.pt").exists()
    with pytest.raises(vit.UserError, match="holds another run"):
        Run(tmp_path / "parts", Recipe(**{**vars(recipe), "lr": 0.1}), shape, pictures, "cpu").finish()


def _interrupted_after(run, epochs):
    save = run._save

    def saving():
        save()
        if len(run.history) > epochs:
            raise KeyboardInterrupt

    return saving


def test_the_program_makes_table_and_figures(tmp_path, capsys):
    pictures, out = make_folder(tmp_path / "pictures"), tmp_path / "out"
    arguments = ["--out", str(out), "--images", str(pictures), "--seeds", "1", "2", "--fixed", "1", "2", *SMALL]
    assert vit.main(arguments) == 0
    table = capsys.readouterr().out
    for row in ("softmax", "lln", "linformer:projected_length=1", "lln:alpha=2,beta=2"):
        folder = row.translate(str.maketrans(":=,", "---"))
        results = [json.loads(file.read_text()) for file in out.glob(f"{folder}/*/result.json")]
        assert len(results) == 2
        assert f"{row}  " in table
        assert vit.spread([result["test"] for result in results]) in table
    for figure in ("figure_9", "figure_10"):
        assert (out / f"{figure}.png").stat().st_size > 10_000
    accuracies = [row for row in read(out / "figure_10.csv") if row["panel"] == "(a) accuracy by α"]
    assert [row["x"] for row in accuracies if "alpha=2" in row["curve"]] == ["2", "2"]
    alphas = [row for row in read(out / "figure_9.csv") if row["panel"] == "lln, run 1" and row["y_axis"] == "α"]
    assert [row["x"] for row in alphas] == ["0", "1", "2"]


def test_the_splits_of_the_digits_share_no_picture():
    parts = [digits().split(name) for name in ("train", "valid", "test")]
    pictures = [{tuple(picture) for picture in part.pixels.flatten(1).tolist()} for part in parts]
    assert sum(len(part.labels) for part in parts) == 1797
    assert len(set.union(*pictures)) == sum(map(len, pictures))


def test_pictures_of_other_sizes_are_scaled(tmp_path):
    make_folder(tmp_path)
    Image.new("L", (20, 10), 255).save(tmp_path / "dark" / "9.jpg")
    pictures = folder(tmp_path, 4)
    assert pictures.pixels.shape == (17, 3, 4, 4)
    assert pictures.classes == ["dark", "light"]
    assert pictures.labels.tolist() == [0] * 9 + [1] * 8


def one_run(pictures, out):
    """Arguments: LLN, one seed."""
    return ["--images", str(pictures), "--out", str(out), *SMALL, "--attentions", "lln", "--seeds", "1"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("size", "99.png has 8 x 9 pixels: all must be square and equal, or give --side"),
        ("damaged", "0.png is no picture that can be read"),
        ("patch", "pictures of 8 pixels cannot be cut into patches of 3"),
    ],
)
def test_bad_input_ends_in_one_line(what, message, tmp_path, capsys):
    path = make_folder(tmp_path / "pictures")
    patch = []
    if what == "size":
        Image.new("RGB", (8, 9)).save(path / "light" / "99.png")
    elif what == "damaged":
        (path / "dark" / "0.png").write_bytes(b"no picture")
    else:
        patch = ["--patch", "3"]
    assert vit.main(["--images", str(path), "--out", str(tmp_path / "out"), *SMALL, *patch]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out").exists()


def test_other_pictures_are_another_run(tmp_path, capsys):
    first, second = make_folder(tmp_path / "pictures"), make_folder(tmp_path / "others")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(second / "light" / "0.png")
    assert vit.main([*one_run(first, tmp_path / "out"), "--seeds", "1", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-3].split()[-1] == "1"
    assert vit.main(one_run(second, tmp_path / "out")) == 1
    assert "holds another run, with pictures" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_no_result(tmp_path, capsys):
    assert vit.main([*one_run(make_folder(tmp_path / "pictures"), tmp_path / "out"), "--lr", "1e18"]) == 1
    assert "the loss is no number any more" in capsys.readouterr().err
    assert not list(tmp_path.rglob("result.json"))
