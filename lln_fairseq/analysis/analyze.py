"""Measure the attention of a saved model on a data set.

lln-fairseq analyze CHECKPOINT DATA --json attention.json --png attention.png

For each layer, the report has the temperatures, entropy, spectral gap and rank of the attention matrices. It says how
close these matrices are to log-normal, and how close queries and keys are to Gaussian. For each depth, the report says
how much the tokens still differ, with and without skip connections and MLPs. CHECKPOINT is a pre-trained or fine-tuned
model, and DATA is the binarized data of its task. The measured sequences are spread evenly over the split.
"""

import argparse
from pathlib import Path

from lln_fairseq.analysis import report
from lln_fairseq.analysis.probe import spread_batches
from lln_fairseq.errors import UserError, user_errors
from lln_fairseq.inference.loading import load_model
from lln_fairseq.inference.outputs import check_output_path, output_path
from lln_fairseq.provenance import describe_provenance, format_result


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq analyze", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a model, for example runs/pretrain_lln_diag/checkpoint_best.pt")
    parser.add_argument("data", help="a directory of binarized data, for example data-bin/wikitext-103")
    parser.add_argument(
        "--split", default="valid", help="the split to measure: train, valid, test ... (default: valid)"
    )
    parser.add_argument("--batches", type=int, default=4, help="number of batches (default: 4)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a batch (default: 4)")
    parser.add_argument("--json", type=Path, help="write the numbers of every layer and head to this file")
    parser.add_argument("--png", type=Path, help="write a figure to this file")
    args = parser.parse_args(argv)
    for path in (args.json, args.png):
        if path is not None:
            check_output_path(path)
    with user_errors():
        result = analyze_checkpoint(args.checkpoint, args.data, args.split, args.batches, args.batch_size)
    subject = f"{args.checkpoint}, split '{args.split}' of {args.data}"
    print(f"{subject}: {report.format_report(result)}")
    if args.json:
        with output_path(args.json) as out:
            out.write_text(format_result(result.as_json(), describe_provenance()))
    if args.png:
        with output_path(args.png) as out:
            report.draw_report(result, out, subject)


def analyze_checkpoint(
    checkpoint: str, data: str, split: str = "valid", batches: int = 4, batch_size: int = 4
) -> report.AttentionReport:
    """Measure a checkpoint on batches · batch_size sequences, evenly spaced over a split.

    If the split has fewer sequences, all of them are measured. ValueError is raised if the model cannot be measured,
    see `report.measure_model`.
    """
    if batches < 1 or batch_size < 1:
        raise UserError(f"--batches and --batch-size must be at least 1, got {batches} and {batch_size}")
    model, task = load_model(checkpoint, data)
    task.load_dataset(split)
    return report.measure_model(model, spread_batches(task.dataset(split), batches, batch_size, model))
