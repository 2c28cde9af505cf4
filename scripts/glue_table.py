"""Show fine-tuning runs in a table like the paper's Table 1: GLUE accuracy on the dev sets, as medians over seeds.

python -m scripts.glue_table runs --latex table1.tex

The program reads every RUN/glue/TASK/seedN/valid.json below the directory. The table has a row for each RUN.
"""

import sys
from functools import partial

from lln_fairseq.command import run_main
from scripts.score_table import ScoreTable, table_parser

TASKS = {"mnli": "MNLI", "qnli": "QNLI", "qqp": "QQP", "sst2": "SST-2"}

# Table 1 of arXiv 2311.13541: accuracies in percent on MNLI, QNLI, QQP and SST-2, and the mean in the paper.
PAPER = {
    "RoBERTa, softmax": (80.3, 87.2, 89.9, 90.6, 87.0),
    "Reformer": (35.4, None, 63.2, 50.9, 49.8),
    "Performer": (58.8, 63.4, 79.1, 81.4, 70.6),
    "ELU": (74.8, 82.5, 86.9, 87.2, 82.8),
    "Longformer": (77.2, None, 85.5, 88.6, 83.7),
    "Transformer-LS": (77.0, 84.8, 86.8, 90.2, 84.7),
    "TNN": (76.72, 85.06, 88.3, 90.6, 85.17),
    "T2": (77.28, 85.39, 88.56, 90.71, 85.48),
    "cosFormer": (76.7, None, 89.2, 91.0, 85.6),
    "T1": (79.06, 87.0, 88.61, 91.17, 86.46),
    "Flash": (79.45, 87.1, 88.83, 90.71, 86.52),
    "Nyströmformer": (80.9, 88.7, 86.3, 91.4, 86.8),
    "LLN": (77.0, 85.1, 88.9, 90.6, 85.4),
    "LLN+Diag": (80.0, 86.5, 89.7, 91.6, 86.9),
}
TABLE = ScoreTable("glue/*/seed*/valid.json", TASKS, PAPER)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = table_parser("scripts.glue_table", __doc__, "runs").parse_args(argv)
    return run_main(partial(TABLE.show, args, "scripts/glue_all.sh"))


if __name__ == "__main__":
    sys.exit(main())
