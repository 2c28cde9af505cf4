"""fairseq-hydra-train with this package as its user directory, wherever it is started.

python -m lln_fairseq.train --config-dir configs --config-name pretrain run=gpu8
"""

from lln_fairseq.command import start

if __name__ == "__main__":
    start(__spec__.name)

import os
import warnings
from pathlib import Path

from lln_fairseq import register

# Hydra's advice to the authors of fairseq's command line
NOT_FOR_USERS = (r"\s*The version_base parameter is not specified", r"\s*'\w+' is validated against ConfigStore schema")


def main() -> None:
    for message in NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message)
    register()
    from fairseq_cli.hydra_train import cli_main

    # fairseq refuses a user directory that is another copy of a package that is imported
    os.environ["LLN_USER_DIR"] = str(Path(__file__).parent)
    cli_main()
