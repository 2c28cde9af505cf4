"""lln-fairseq train finds its recipes, and lists them if the requested one does not exist."""

import pytest

from lln_fairseq.errors import UserError
from lln_fairseq.training.recipes import CONFIGS
from lln_fairseq.training.train import with_recipe

RECIPES = "finetune lra pretrain"


@pytest.mark.parametrize("name", ["pretrain", "finetune", "pretrain.yaml"])
def test_config_dir_defaults_to_package_recipes(name):
    arguments = ["--config-name", name, "run=cpu"]
    assert with_recipe(arguments) == ["--config-dir", str(CONFIGS), *arguments]


def test_config_dir_of_user_is_kept(tmp_path):
    (tmp_path / "mine.yaml").touch()
    arguments = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    assert with_recipe(arguments) == arguments


def test_package_recipe_is_not_found_in_config_dir_of_user(tmp_path):
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(UserError, match=rf"no such recipe in {tmp_path}: pretrain \(known: mine\)"):
        with_recipe(["--config-dir", str(tmp_path), "--config-name", "pretrain"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], rf"no recipe given: choose one of {CONFIGS} with --config-name NAME \(known: {RECIPES}\)"),
        (["-cn", "pretrian"], rf"no such recipe in {CONFIGS}: pretrian \(known: {RECIPES}\)"),
    ],
)
def test_wrong_recipe_is_an_error_of_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        with_recipe(arguments)
    assert "\n" not in str(error.value)


def test_hydra_help_needs_no_recipe():
    with_recipe(["--hydra-help"])
