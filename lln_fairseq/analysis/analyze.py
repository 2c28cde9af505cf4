"""Measures what the attention of a saved model does on a corpus.

python -m lln_fairseq analyze CHECKPOINT DATA --json attention.json --png attention.png

By layer: temperatures, entropy, spectral gap and rank of the attention matrices, how log-normal they are, and how
Gaussian queries and keys are. By depth: how much the tokens still differ, also without skip connections and MLPs.
CHECKPOINT is a pre-trained or fine-tuned model, DATA the binarised data of its task. The sequences are spread evenly
over the split.
"""

import argparse
import json
from pathlib import Path

from lln_fairseq.analysis import report
from lln_fairseq.analysis.probe import spread_batches
from lln_fairseq.errors import InputError, input_errors
from lln_fairseq.inference.loading import load_model


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq analyze", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a model, for example runs/pretrain_lln_diag/checkpoint_best.pt")
    parser.add_argument("data", help="a binarised data directory, for example data-bin/wikitext-103")
    parser.add_argument("--split", default="valid", help="train, valid, test ... (default: valid)")
    parser.add_argument("--batches", type=int, default=4, help="how many batches (default: 4)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a batch (default: 4)")
    parser.add_argument("--json", type=Path, help="write the numbers of every layer and head to this file")
    parser.add_argument("--png", type=Path, help="draw them to this file")
    args = parser.parse_args(argv)
    for path in (args.json, args.png):
        if path and not path.parent.is_dir():
            raise InputError(f"no such directory: {path.parent}")
    with input_errors():
        found = analyse(args.checkpoint, args.data, args.split, args.batches, args.batch_size)
    print(f"{args.checkpoint}, split '{args.split}': {report.as_text(found)}")
    if args.json:
        args.json.write_text(json.dumps(found.as_json(), indent=2) + "\n")
    if args.png:
        report.draw(found, args.png)


def analyse(checkpoint: str, data: str, split: str = "valid", batches: int = 4, batch_size: int = 4) -> report.Report:
    """Raises: InputError for a checkpoint, data or numbers that do not fit."""
    if batches < 1 or batch_size < 1:
        raise InputError("--batches and --batch-size must be at least 1")
    model, task = load_model(checkpoint, data)
    task.load_dataset(split)
    return report.collect(model, spread_batches(task.dataset(split), batches, batch_size, model))
