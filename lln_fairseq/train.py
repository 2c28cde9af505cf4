"""fairseq-hydra-train with this package as its user directory and its recipes, wherever it is started.

    python -m lln_fairseq.train --config-name pretrain run=gpu8

--config-dir DIRECTORY takes recipes of your own; all other options and overrides are Hydra's, see --hydra-help.
"""

from lln_fairseq.command import start

if __name__ == "__main__":
    start(__spec__.name)

import os
import sys
from pathlib import Path

from lln_fairseq import register
from lln_fairseq.host.advice import hide_advice
from lln_fairseq.recipes import CONFIGS, PACKAGE, check_recipe

WITHOUT_RECIPE = ("config_path", "experimental_rerun", "hydra_help", "shell_completion")  # Hydra's options


def main() -> None:
    hide_advice()
    find_recipe()
    register()
    from fairseq_cli.hydra_train import cli_main

    # fairseq refuses a user directory that is another copy of a package that is imported
    os.environ["LLN_USER_DIR"] = str(PACKAGE)
    cli_main()


def find_recipe() -> None:
    """Gives our recipes to a command line without --config-dir. Raises: UserError where there is no such recipe.

    fairseq registers its bare schema under whatever name it is given, so Hydra would find that.
    """
    from hydra._internal.utils import get_args_parser

    given = get_args_parser().parse_args()
    if not given.config_dir:
        sys.argv[1:1] = ["--config-dir", str(CONFIGS)]
    if given.help and not given.config_name:
        print(__doc__)
        sys.exit()
    if not any(getattr(given, option) for option in WITHOUT_RECIPE):
        check_recipe(Path(given.config_dir or CONFIGS), given.config_name)
