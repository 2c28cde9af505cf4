"""python -m lln_fairseq train finds its recipes, and says which there are."""

import pytest

from lln_fairseq.command import UserError
from lln_fairseq.training.recipes import CONFIGS
from lln_fairseq.training.train import with_recipe

RECIPES = "finetune language_model lra pretrain"


@pytest.mark.parametrize("name", ["pretrain", "finetune", "pretrain.yaml"])
def test_our_recipes_are_found(name):
    given = ["--config-name", name, "run=cpu"]
    assert with_recipe(given) == ["--config-dir", str(CONFIGS), *given]


def test_a_directory_of_the_users_own(tmp_path):
    (tmp_path / "mine.yaml").touch()
    given = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    assert with_recipe(given) == given
    with pytest.raises(UserError, match=rf"no such recipe in {tmp_path}: pretrain \(known: mine\)"):
        with_recipe(["--config-dir", str(tmp_path), "--config-name", "pretrain"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], rf"which recipe of {CONFIGS}\? --config-name NAME \(known: {RECIPES}\)"),
        (["-cn", "pretrian"], rf"no such recipe in {CONFIGS}: pretrian \(known: {RECIPES}\)"),
    ],
)
def test_a_missing_or_unknown_recipe_is_said_in_one_line(given, said):
    with pytest.raises(UserError, match=said) as error:
        with_recipe(given)
    assert "\n" not in str(error.value)


def test_what_needs_no_recipe(capsys):
    with_recipe(["--hydra-help"])
    with pytest.raises(SystemExit) as ended:
        with_recipe(["--help"])
    assert not ended.value.code
    assert "python -m lln_fairseq train --config-name pretrain" in capsys.readouterr().out
