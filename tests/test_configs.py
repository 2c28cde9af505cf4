"""The YAML files say what the dataclasses and presets say."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from lln_fairseq.attention import ATTENTION_REGISTRY
from lln_fairseq.models.lln_roberta import PRESETS, RobertaConfig

CONFIGS = Path(__file__).parents[1] / "configs"


def load(group, name):
    return yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())


def names(group):
    return {path.stem for path in (CONFIGS / group).glob("*.yaml")}


def test_every_attention_and_every_preset_has_its_file():
    assert names("attention") == set(ATTENTION_REGISTRY)
    assert names("model") == {*PRESETS, "roberta"}


@pytest.mark.parametrize("attention", sorted(ATTENTION_REGISTRY))
def test_attention_files_hold_the_options_with_their_defaults(attention):
    options = load("attention", attention)
    assert options.pop("attention") == attention
    fields = dataclasses.fields(ATTENTION_REGISTRY[attention].config)
    assert options == {f"{attention}_{field.name}": field.default for field in fields}


def test_the_model_file_holds_the_options_with_their_defaults():
    fields = [f for f in dataclasses.fields(RobertaConfig) if f.name not in ("_name", "attention")]
    assert load("model", "roberta") == {field.name: field.default for field in fields}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_files_name_their_preset(preset):
    assert load("model", preset)["_name"] == f"lln_roberta_{preset}"
