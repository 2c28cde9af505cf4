"""fairseq-hydra-train with this package as its user directory and its recipes, wherever it is started.

    python -m lln_fairseq train --config-name pretrain run=gpu8

--config-dir DIRECTORY takes recipes of your own; all other options and overrides are Hydra's, see --hydra-help.
"""

import os
import sys
import warnings
from pathlib import Path

from hydra._internal.utils import get_args_parser

from lln_fairseq.training.recipes import CONFIGS, PACKAGE, check_recipe

WITHOUT_RECIPE = ("config_path", "experimental_rerun", "hydra_help", "shell_completion")  # Hydra's options

# How warnings begin that only the authors of fairseq can act on: fairseq uses Hydra and torch.cuda.amp as they were.
DEPRECATIONS = (
    r"\s*The version_base parameter is not specified",
    r"\s*'[\w./-]+' is validated against ConfigStore schema",
    r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated",
)


def main(argv: list[str]) -> None:
    """Train with a recipe."""
    sys.argv = ["lln-fairseq train", *with_recipe(argv)]  # where Hydra reads the command line
    for message in DEPRECATIONS:
        warnings.filterwarnings("ignore", message)
    # fairseq refuses a user directory that is another copy of a package that is imported
    os.environ["LLN_USER_DIR"] = str(PACKAGE)
    from fairseq_cli.hydra_train import cli_main  # which warns about Hydra: only once the recipe is known to exist

    cli_main()


def with_recipe(argv: list[str]) -> list[str]:
    """Return the command line with the directory of our recipes, unless it has --config-dir.

    fairseq registers its bare schema under whatever name it is given, so Hydra would accept an unknown recipe.
    Raises: UserError if there is no recipe of the requested name.
    """
    given = get_args_parser().parse_args(argv)
    if given.help and not given.config_name:
        print(__doc__)
        sys.exit()
    if not any(getattr(given, option) for option in WITHOUT_RECIPE):
        check_recipe(Path(given.config_dir or CONFIGS), given.config_name)
    return argv if given.config_dir else ["--config-dir", str(CONFIGS), *argv]
