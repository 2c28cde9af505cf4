"""Find the recipes: configs/ beside the package in a checkout, configs/ inside it where a wheel is installed."""

from pathlib import Path

from lln_fairseq.command import UserError

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = (PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent) / "configs"


def check_recipe(directory: Path, name: str | None) -> None:
    """Raise UserError that lists the recipes of a directory, for a name that is none of them."""
    known = f"(known: {' '.join(sorted(path.stem for path in directory.glob('*.yaml'))) or 'none'})"
    if not name:
        raise UserError(f"which recipe of {directory}? --config-name NAME {known}")
    if not Path(directory, name.removesuffix(".yaml") + ".yaml").is_file():
        raise UserError(f"no such recipe in {directory}: {name} {known}")
