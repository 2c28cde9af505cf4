"""python -m lln_fairseq.train finds its recipes, and says which there are."""

import sys

import pytest

from lln_fairseq import train
from lln_fairseq.command import UserError
from lln_fairseq.recipes import CONFIGS

RECIPES = "finetune language_model lra pretrain"


@pytest.fixture
def arguments(monkeypatch):
    """arguments(...) -> what Hydra will see of a command line."""

    def find(*given):
        monkeypatch.setattr(sys, "argv", ["train", *map(str, given)])
        train.find_recipe()
        return sys.argv[1:]

    return find


@pytest.mark.parametrize("name", ["pretrain", "finetune", "pretrain.yaml"])
def test_our_recipes_are_found(name, arguments):
    assert arguments("--config-name", name, "run=cpu") == [
        "--config-dir",
        str(CONFIGS),
        "--config-name",
        name,
        "run=cpu",
    ]


def test_a_directory_of_the_users_own(arguments, tmp_path):
    (tmp_path / "mine.yaml").touch()
    given = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    assert arguments(*given) == given
    with pytest.raises(UserError, match=rf"no such recipe in {tmp_path}: pretrain \(known: mine\)"):
        arguments("--config-dir", tmp_path, "--config-name", "pretrain")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), rf"which recipe of {CONFIGS}\? --config-name NAME \(known: {RECIPES}\)"),
        (("run=cpu",), r"which recipe of"),
        (("-cn", "pretrian"), rf"no such recipe in {CONFIGS}: pretrian \(known: {RECIPES}\)"),
        (("--config-name", "model/bass"), r"no such recipe in .*: model/bass"),
    ],
)
def test_a_missing_or_unknown_recipe_is_said_in_one_line(given, said, arguments):
    with pytest.raises(UserError, match=said) as error:
        arguments(*given)
    assert "\n" not in str(error.value)


def test_what_needs_no_recipe(arguments, capsys):
    arguments("--hydra-help")
    with pytest.raises(SystemExit) as ended:
        arguments("--help")
    assert not ended.value.code
    assert "python -m lln_fairseq.train --config-name pretrain" in capsys.readouterr().out
