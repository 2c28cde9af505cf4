"""Test the table of extended positions, with a tiny BERT and two short articles."""

from lln_fairseq.conversion.convert import convert
from scripts.experiments import positions
from tests.conversion.sources import make_model

TEXT = """
 = One =

 the plot isn new but it holds {words}
 = = A section = =
 eva films
 = Two =

 we saw it {words}
"""


def write_articles(path):
    path.write_text(TEXT.format(words="the films we " * 40), encoding="utf-8")


def test_table_has_every_model_and_length(tmp_path, capsys):
    make_model("bert", tmp_path / "in", headless=True)
    convert(tmp_path / "in", tmp_path / "original", "softmax")
    convert(tmp_path / "in", tmp_path / "repeat", "softmax", positions=60)
    convert(tmp_path / "in", tmp_path / "short", "softmax", positions=50, extend="interpolate")
    write_articles(tmp_path / "text")
    checkpoints = [str(tmp_path / name / "model.pt") for name in ("repeat", "short")]
    arguments = [str(tmp_path / "original" / "model.pt"), str(tmp_path / "text"), *checkpoints]
    capsys.readouterr()

    assert positions.main([*arguments, "--lengths", "20", "60", "--articles", "2"]) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-7:]]
    names = [" ".join(row[: row.index("20" if "20" in row else "60")]) for row in rows[1:]]
    assert names == ["original", *checkpoints, "original, windows of 40", "original, first 40", checkpoints[0]]
    assert rows[2][2] == "1.0000"
    assert float(rows[3][2]) < 0.9999


def test_articles_are_read_without_titles(tmp_path):
    write_articles(tmp_path / "text")
    _, first, second = positions.read_articles(tmp_path / "text")
    assert first.split()[:3] == ["the", "plot", "isn"]
    assert first.endswith("eva films")
    assert second.split()[:3] == ["we", "saw", "it"]


def test_too_few_articles_are_reported(tmp_path, capsys):
    make_model("bert", tmp_path / "in", headless=True)
    convert(tmp_path / "in", tmp_path / "original", "softmax")
    write_articles(tmp_path / "text")
    checkpoint = str(tmp_path / "original" / "model.pt")
    assert positions.main([checkpoint, str(tmp_path / "text"), checkpoint, "--lengths", "20", "--articles", "9"]) == 1
    assert "has only 2 articles of 36 tokens: give fewer --articles" in capsys.readouterr().err
