"""Scores a fine-tuned checkpoint on every row:  python -m lln_fairseq.evaluate CHECKPOINT DATA --split test"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import checkpoint_utils, utils

import lln_fairseq  # noqa: F401  registers the models and tasks
from lln_fairseq.errors import InputError


@dataclass
class Score:
    """What a classifier did on a split; loss in bits per row, accuracy in [0, 1]."""

    split: str
    rows: int
    accuracy: float
    loss: float
    majority: float  # share of the most frequent class: what always guessing it would reach


def load(checkpoint: str, data: str) -> tuple[Any, Any]:
    """The model, in evaluation mode on the GPU if there is one, and its task with `data` as its data directory.

    Raises: InputError for a checkpoint that is missing or cannot be read, or data without dictionaries.
    """
    if not Path(checkpoint).is_file():
        raise InputError(f"no such checkpoint: {checkpoint}")
    overrides = {"data": data, "cpu": not torch.cuda.is_available()}
    try:
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([checkpoint], arg_overrides=overrides)
    except (RuntimeError, EOFError, KeyError) as error:
        raise InputError(f"cannot load {checkpoint}: {str(error).splitlines()[0]}") from error
    if not hasattr(task, "label_dictionary"):
        raise InputError(f"{checkpoint} was not fine-tuned: it holds a model for the task {task.cfg._name}")
    model.eval()
    return (model.cuda() if torch.cuda.is_available() else model), task


@torch.no_grad()
def evaluate(model: Any, task: Any, split: str, batch_size: int = 64) -> Score:
    """Scores every row of a split of a classification task."""
    task.load_dataset(split)
    dataset = task.dataset(split)
    batches = task.get_batch_iterator(dataset, max_sentences=batch_size, max_positions=task.max_positions())
    correct, loss, classes = 0, 0.0, torch.zeros(task.cfg.num_classes, dtype=torch.long)
    for sample in batches.next_epoch_itr(shuffle=False):
        if next(model.parameters()).is_cuda:
            sample = utils.move_to_cuda(sample)
        logits, _ = model(
            **sample["net_input"], features_only=True, classification_head_name=task.cfg.classification_head_name
        )
        target = sample["target"].view(-1)
        correct += (logits.argmax(dim=-1) == target).sum().item()
        loss += F.cross_entropy(logits.float(), target, reduction="sum").item() / math.log(2)
        classes += target.cpu().bincount(minlength=task.cfg.num_classes)
    rows = int(classes.sum())
    if rows != len(dataset):
        raise RuntimeError(f"scored {rows} of {len(dataset)} rows of split '{split}'")
    return Score(split, rows, correct / rows, loss / rows, classes.max().item() / rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lln_fairseq.evaluate", description=__doc__)
    parser.add_argument("checkpoint", help="a fine-tuned checkpoint, for example runs/sst2_lln_diag/checkpoint_best.pt")
    parser.add_argument("data", help="a binarised data directory with input0 and label")
    parser.add_argument("--split", default="valid", help="train, valid, test ... (default: valid)")
    parser.add_argument("--json", type=Path, help="also write the score to this file")
    args = parser.parse_args(argv)
    try:
        score = evaluate(*load(args.checkpoint, args.data), args.split)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{score.split}: accuracy {100 * score.accuracy:.2f} % of {score.rows} rows "
        f"(majority class {100 * score.majority:.2f} %), loss {score.loss:.3f} bits"
    )
    if args.json:
        args.json.write_text(json.dumps(asdict(score), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
