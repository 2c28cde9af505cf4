"""Find the recipes, the YAML files in configs/.

configs/ is next to the package in a checkout, and inside the package in an installed wheel.
"""

from pathlib import Path

from lln_fairseq.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGE / "configs"
if not CONFIGS.is_dir():
    CONFIGS = PACKAGE.parent / "configs"


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
