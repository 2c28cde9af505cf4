"""Scores a fine-tuned checkpoint on every row of a split, and writes its predictions in GLUE's submission format.

python -m lln_fairseq evaluate CHECKPOINT DATA --split test --predict SST-2.tsv
python -m lln_fairseq evaluate CHECKPOINT --split valid,test --json 'scores/{split}.json'
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import utils
from torch import Tensor

from lln_fairseq.checkpoints.compatibility import is_finetuned, label_names
from lln_fairseq.checkpoints.config import stored_options
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from lln_fairseq.criterions.scores import ClassCounts, pearson, spearman
from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model, require_finite

SHOWN = {  # the metrics in the order in which they are printed, and how
    "accuracy": "accuracy {:.2%}",
    "majority": "majority class {:.2%}",
    "f1": "F1 of class 1 {:.2%}",
    "mcc": "Matthews correlation {:.4f}",
    "pearson": "Pearson {:.4f}",
    "spearman": "Spearman {:.4f}",
    "loss": "loss {:.3f}",
}
SPLIT = "{split}"  # in a file's name


@dataclass
class Outputs:
    """What a model says about a split, in the order of its rows. Targets: None where the split has no labels."""

    split: str
    logits: Tensor  # (rows, classes) float32, or (rows, 1) for a regression
    targets: Tensor | None  # (rows,) class numbers or scores


def load(checkpoint: str, data: str | None = None) -> tuple[Any, Any]:
    """The model, in evaluation mode on the GPU if there is one, and its task with `data` as its data directory, or the
    one that it was fine-tuned on.

    Raises: InputError for a checkpoint that is missing, cannot be read or was not fine-tuned, and for data without
    dictionaries, or with another dictionary or other labels than the checkpoint was trained with.
    """
    task_name = stored_options(load_checkpoint_lazily(checkpoint))["task"].get("_name")
    if not is_finetuned(task_name):
        raise InputError(f"{checkpoint} was not fine-tuned: it holds a model for the task {task_name}")
    return load_model(checkpoint, data)


@torch.no_grad()
def run(model: Any, task: Any, split: str, batch_size: int = 64) -> Outputs:
    """Return the model's outputs for every row of a split.

    Raises: InputError for a split that does not exist, and for a row whose outputs are not finite.
    """
    task.load_dataset(split)
    dataset = task.dataset(split)
    batches = task.get_batch_iterator(dataset, max_sentences=batch_size, max_positions=task.max_positions())
    rows: list[Tensor] = []
    logits: list[Tensor] = []
    targets: list[Tensor] = []  # stays empty if the split has no labels
    for sample in batches.next_epoch_itr(shuffle=False):
        if next(model.parameters()).is_cuda:
            sample = utils.move_to_cuda(sample)
        out, _ = model(
            **sample["net_input"], features_only=True, classification_head_name=task.cfg.classification_head_name
        )
        rows.append(sample["id"].cpu())
        logits.append(out.float().cpu())
        if "target" in sample:
            targets.append(sample["target"].view(-1).cpu())
    order = torch.cat(rows).argsort()
    if not torch.equal(torch.cat(rows)[order], torch.arange(len(dataset))):
        raise RuntimeError(f"scored {len(order)} of {len(dataset)} rows of split '{split}'")
    outputs = torch.cat(logits)[order]
    suspect = int(outputs.isfinite().all(dim=-1).int().argmin())  # the first row that is not finite, or row 0
    require_finite(outputs[suspect], f"row {suspect} of split '{split}'")
    return Outputs(split, outputs, torch.cat(targets)[order] if targets else None)


def score(task: Any, outputs: Outputs) -> dict[str, Any]:
    """Compute the loss and the metrics of a split that has labels.

    Classification: accuracy, majority (the fraction of the most frequent class: the accuracy of always predicting it),
    mcc and, with two classes, f1. Regression: pearson and spearman. The loss is the cross-entropy in bits per row, or
    the mean squared error of a regression; all other metrics lie in [0, 1] or [-1, 1].

    Returns: a dictionary with the keys split, rows, loss and the names of the metrics.
    """
    assert outputs.targets is not None
    metrics: dict[str, Any] = {"split": outputs.split, "rows": len(outputs.logits)}
    logits = outputs.logits.double()  # in float32 the loss of large logits is infinite
    if task.cfg.regression_target:
        predicted = logits.view(-1)
        targets = outputs.targets.double()
        metrics["loss"] = F.mse_loss(predicted, targets).item()
        metrics["pearson"] = pearson(predicted.numpy(), targets.numpy())
        metrics["spearman"] = spearman(predicted.numpy(), targets.numpy())
        return metrics
    counts = ClassCounts.from_predictions(logits.argmax(dim=-1), outputs.targets, task.cfg.num_classes)
    metrics["accuracy"] = counts.accuracy
    metrics["loss"] = F.cross_entropy(logits, outputs.targets).item() / math.log(2)
    metrics["majority"] = counts.majority
    metrics["mcc"] = counts.mcc
    if task.cfg.num_classes == 2:
        metrics["f1"] = counts.f1
    return metrics


def predictions(task: Any, outputs: Outputs, scale: float = 5.0) -> list[str]:
    """One label a row by its name in label/dict.txt; of a regression the score times `scale`, within [0, scale]."""
    if task.cfg.regression_target:
        return [f"{value:.3f}" for value in (scale * outputs.logits.view(-1)).clamp(0, scale).tolist()]
    labels = label_names(task)
    return [labels[number] for number in outputs.logits.argmax(dim=-1).tolist()]


def write_predictions(path: Path, values: list[str]) -> None:
    """A tab-separated file with the columns index and prediction, as gluebenchmark.com wants it."""
    lines = ["index\tprediction", *(f"{row}\t{value}" for row, value in enumerate(values))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a fine-tuned checkpoint, for example runs/sst2_lln_diag/checkpoint_best.pt")
    parser.add_argument("data", nargs="?", help="a binarised data directory (default: that of the fine-tuning)")
    parser.add_argument("--split", default="valid", help="valid, test, valid,valid1 ... (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the score to this file; {split} in its name is replaced")
    parser.add_argument("--predict", type=Path, help="write a label for every row to this file, e.g. SST-2.tsv")
    parser.add_argument("--scale", type=float, default=5.0, help="of predicted scores (default: 5, that of STS-B)")
    args = parser.parse_args(argv)
    if not 0 < args.scale < math.inf:
        parser.error(f"--scale is {args.scale}, and must be above 0 and finite")
    args.splits = args.split.split(",")
    if "" in args.splits:
        parser.error("--split names an empty split: give for example valid,test")
    for option in ("json", "predict"):
        file = getattr(args, option)
        if file and len(args.splits) > 1 and SPLIT not in file.name:
            parser.error(f"--{option}: several splits need {SPLIT} in the file's name")
    evaluate(args)


def evaluate(args: argparse.Namespace) -> None:
    """Scores and predicts what the command line asks for. Raises: InputError, OSError."""
    for file in filter(None, (args.json, args.predict)):
        check_folder(file)
    model, task = load(args.checkpoint, args.data)
    for split in args.splits:
        write(args, task, run(model, task, split))


def write(args: argparse.Namespace, task: Any, outputs: Outputs) -> None:
    """Prints and writes what is asked for of one split. Raises: InputError, OSError."""
    split = outputs.split
    if outputs.targets is None and (args.json or not args.predict):
        raise InputError(f"split '{split}' of {task.cfg.data} has no labels to score: use --predict OUT.tsv")
    if args.predict:
        file = of_split(args.predict, split)
        write_predictions(file, predictions(task, outputs, args.scale))
        print(f"{split}: {len(outputs.logits)} predictions in {file}")
    if outputs.targets is not None:
        found = score(task, outputs)
        shown = ", ".join(text.format(found[name]) for name, text in SHOWN.items() if name in found)
        print(f"{split}: {found['rows']} rows, {shown}")
        if args.json:
            of_split(args.json, split).write_text(json.dumps(found, indent=2) + "\n")


def check_folder(file: Path) -> None:
    """Raises InputError for a file that has no directory, before it takes long to find what to write."""
    if not file.parent.is_dir():
        raise InputError(f"cannot write {file}: no such directory: {file.parent}")


def of_split(file: Path, split: str) -> Path:
    return file.with_name(file.name.replace(SPLIT, split))
