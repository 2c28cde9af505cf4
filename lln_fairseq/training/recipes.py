"""Find the recipes, the YAML files in configs/.

configs/ is next to the package in a checkout, and inside the package in an installed wheel.
"""

import re
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from lln_fairseq.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "configs"
if not CONFIGS.is_dir():
    CONFIGS = PACKAGE.parent / "configs"


def layout_names() -> list[str]:
    return sorted(path.stem for path in (CONFIGS / "layout").glob("*.yaml"))


def layout_options(name: str) -> dict[str, Any]:
    """Return the options of the model that configs/layout/NAME.yaml sets."""
    return dict(OmegaConf.load(CONFIGS / "layout" / f"{name}.yaml").model)


def attention_of_layout(name: str) -> tuple[str, dict[str, Any], str | None]:
    """Return the attention of a layout, the attention's options, and softmax_layers, for a model with trained weights.

    A layout that also sets other options of the model, such as rotary positions, raises UserError: the weights were
    trained without them.
    """
    model = layout_options(name)
    attention = model.pop("attention")
    softmax_layers = model.pop("softmax_layers", None)
    options = {}
    others = []
    for key, value in model.items():
        option = key.removeprefix(f"{attention}_")
        if option == key:
            others.append(key)
        options[option] = value
    if others:
        raise UserError(
            f"the layout {name} sets {' and '.join(others)}, which trained weights cannot get: choose the attention "
            f"{attention} and its options instead"
        )
    return attention, options, softmax_layers


def format_override(option: str, value: str | Path) -> str:
    """Return the override `option=value`. The value is quoted if it has characters that Hydra would interpret."""
    if re.fullmatch(r"[\w./-]+", str(value)):
        return f"{option}={value}"
    return f"{option}={QuotedString(str(value), Quote.single).with_quotes()}"


def check_recipe(directory: Path, name: str | None) -> None:
    """Raise UserError with a list of the recipes in the directory if `name` is not one of them.

    The name may end in .yaml. It is None or "" if the command line names no recipe.
    """
    recipes = sorted(path.stem for path in directory.glob("*.yaml"))
    known = f"(known: {' '.join(recipes) or 'none'})"
    if not name:
        raise UserError(f"no recipe given: choose one of {directory} with --config-name NAME {known}")
    if not Path(directory, name.removesuffix(".yaml") + ".yaml").is_file():
        raise UserError(f"no such recipe in {directory}: {name} {known}")
