"""Run fairseq-hydra-train with this package as the user directory and with its recipes, from any working directory.

    lln-fairseq train --config-name pretrain run=gpu8

Use --config-dir DIRECTORY for recipes of your own. All other options and overrides are Hydra's, see --hydra-help.
"""

import sys
import warnings
from pathlib import Path

from hydra._internal.utils import get_args_parser

from lln_fairseq.training.recipes import CONFIGS, check_recipe

# Options of Hydra that work without a recipe.
WITHOUT_RECIPE = ("config_path", "experimental_rerun", "hydra_help", "shell_completion")

# Patterns of warnings that fairseq causes and users cannot fix.
IGNORED_WARNINGS = (
    r"\s*The version_base parameter is not specified",
    r"\s*'[\w./-]+' is validated against ConfigStore schema",
    r"`torch\.cuda\.amp\.\w+\(args\.\.\.\)` is deprecated",
    r"'pin_memory' argument is set as true but no accelerator is found",
)


def main(argv: list[str]) -> None:
    sys.argv = ["lln-fairseq train", *with_recipe(argv)]  # Hydra reads the command line there
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    # Importing this module triggers Hydra's warnings, so the filters must be set before.
    from fairseq_cli.hydra_train import cli_main

    cli_main()


def with_recipe(argv: list[str]) -> list[str]:
    """Return `argv` with --config-dir. If it is missing, put the directory of this package's recipes in front.

    With --help and no recipe, print the help of this program and exit. A recipe that does not exist raises UserError:
    Hydra would not reject it, because fairseq registers its bare configuration under any requested name.
    """
    args = get_args_parser().parse_args(argv)
    if args.help and not args.config_name:
        print(__doc__)
        sys.exit()
    if not any(getattr(args, option) for option in WITHOUT_RECIPE):
        check_recipe(Path(args.config_dir or CONFIGS), args.config_name)
    if args.config_dir:
        return argv
    return ["--config-dir", str(CONFIGS), *argv]
