"""fairseq-hydra-train with this package registered from the start.

    python -m lln_fairseq.train --config-dir configs --config-name pretrain run=gpu8

fairseq-hydra-train does the same. It imports the user directory only after it has started its workers, so that a
mistake in their number ends in a traceback there, and in one line here.
"""

import os
from pathlib import Path

import lln_fairseq  # noqa: F401  registers models, tasks and criterions


def main() -> None:
    from fairseq_cli.hydra_train import cli_main

    # fairseq refuses a user directory that is another copy of a package that is imported
    os.environ["LLN_USER_DIR"] = str(Path(__file__).parent)
    cli_main()


if __name__ == "__main__":
    main()
