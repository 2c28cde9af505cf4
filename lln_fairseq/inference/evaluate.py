"""Score a fine-tuned checkpoint on every row of a split, and write its predictions in GLUE's submission format.

lln-fairseq evaluate CHECKPOINT DATA --split test --predict SST-2.tsv
lln-fairseq evaluate CHECKPOINT --split valid,test --json 'scores/{split}.json'
"""

import argparse
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fairseq import utils
from torch import Tensor, nn

from lln_fairseq.checkpoints.compatibility import is_finetuned, label_names
from lln_fairseq.checkpoints.reading import load_checkpoint, load_checkpoint_lazily
from lln_fairseq.checkpoints.source_settings import score_activation, stored_settings
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import (
    add_positions_option,
    add_precision_option,
    build_model,
    require_finite,
    set_positions,
    use_precision,
)
from lln_fairseq.inference.outputs import check_output_path, output_path
from lln_fairseq.provenance import describe_provenance, format_result
from lln_fairseq.scores import ClassCounts, pearson, spearman
from lln_fairseq.text.samples import BATCH_TOKENS
from lln_fairseq.text.sentence_datasets import keep_ends_of_cut_samples

METRIC_FORMATS = {  # in the order in which the metrics are printed
    "accuracy": "accuracy {:.2%}",
    "majority": "majority class {:.2%}",
    "f1": "F1 of label {label} {:.2%}",
    "mcc": "Matthews correlation {:.4f}",
    "pearson": "Pearson {:.4f}",
    "spearman": "Spearman {:.4f}",
    "loss": "loss {:.3f}",
}
SPLIT_PLACEHOLDER = "{split}"  # stands for the name of the split in the names of output files


@dataclass
class SplitOutputs:
    """The outputs of a model for a split, in the order of its rows, on the CPU.

    Attributes:
        split: name of the split.
        logits: (rows, classes) float32; (rows, 1) for a model with one output.
        targets: (rows,) class numbers or scores; None if the split has no labels.
    """

    split: str
    logits: Tensor
    targets: Tensor | None


def load_finetuned_model(checkpoint: str, data: str | None = None, positions: int | None = None) -> tuple[Any, Any]:
    """Load a fine-tuned model and its task as `load_model` does. Raise UserError also if it was not fine-tuned.

    `positions` is the number of tokens that a model with rotary positions shall take; None: what it was trained with.
    """
    state = load_checkpoint(checkpoint)
    task_name = state["cfg"].task._name
    if not is_finetuned(task_name):
        raise UserError(f"{checkpoint} was not fine-tuned: it holds a model for the task {task_name}")
    if data is None and state["cfg"].task.data == ".":
        raise UserError(f"{checkpoint} was converted and names no data: give DATA")
    if positions is not None:
        set_positions(state["cfg"], positions, checkpoint)
    return build_model(state, checkpoint, data)


def compute_outputs(model: Any, task: Any, split: str, batch_size: int = 64) -> SplitOutputs:
    """Compute a fine-tuned model's outputs for every row of a split, which is loaded into the task.

    A batch has at most `batch_size` rows and BATCH_TOKENS tokens, padding included, or one longer row.

    The model must be in evaluation mode. UserError is raised if the split cannot be loaded, a row is longer than the
    model takes, or the outputs for a row are not finite.
    """
    task.load_dataset(split)
    dataset = task.dataset(split)
    keep_ends_of_cut_samples(dataset)  # fairseq's own task cuts </s> off, and `predict` does not
    lengths = np.maximum.reduce(dataset.sizes)  # `sizes` is a list of arrays (rows,)
    require_short_rows(lengths, task.max_positions(), split)
    batches = task.get_batch_iterator(
        dataset,
        max_tokens=max(BATCH_TOKENS, int(lengths.max())),
        max_sentences=batch_size,
        max_positions=task.max_positions(),
    )
    outputs = score_batches(model, task, split, batches.next_epoch_itr(shuffle=False))
    if len(outputs.logits) != len(dataset):
        raise RuntimeError(f"scored {len(outputs.logits)} of {len(dataset)} rows of split '{split}'")
    bad_rows = (~outputs.logits.isfinite().all(dim=-1)).nonzero()
    if len(bad_rows) > 0:
        bad_row = int(bad_rows[0])
        require_finite(outputs.logits[bad_row], f"row {bad_row} of split '{split}'")
    return outputs


def require_short_rows(lengths: np.ndarray, longest: int, split: str) -> None:
    """Raise UserError if a row has more tokens than the model takes. `lengths` has those of all rows, (rows,)."""
    row = int(lengths.argmax())
    if lengths[row] > longest:
        raise UserError(
            f"row {row} of split '{split}' has {lengths[row]} tokens, but the model takes {longest}: "
            "fine-tune with task.shorten_method=truncate to cut long rows"
        )


@torch.no_grad()
def score_batches(model: Any, task: Any, split: str, samples: Iterable[dict[str, Any]]) -> SplitOutputs:
    """Compute a fine-tuned model's outputs for batches of distinct rows of a split, in increasing order of the rows.

    The model must be in evaluation mode. The batches, in fairseq's form, can come in any order: their `id` has the
    numbers of the rows.
    """
    device = next(model.parameters()).device
    head = task.cfg.classification_head_name
    rows: list[Tensor] = []
    logits: list[Tensor] = []
    targets: list[Tensor] = []  # stays empty if the split has no labels
    for sample in samples:
        rows.append(sample["id"])
        if "target" in sample:
            targets.append(sample["target"].view(-1))
        net_input = utils.apply_to_sample(lambda value: value.to(device), sample["net_input"])
        batch_logits, _ = model(**net_input, features_only=True, classification_head_name=head)
        logits.append(batch_logits.float().cpu())
    order = torch.cat(rows).argsort()
    all_targets = None
    if targets:
        all_targets = torch.cat(targets)[order]
    return SplitOutputs(split, torch.cat(logits)[order], all_targets)


def compute_scores(task: Any, outputs: SplitOutputs) -> dict[str, Any]:
    """Compute the loss and the metrics of a split that has labels. The keys are split, rows, loss and the metrics.

    Classification: accuracy, majority (the accuracy of always predicting the most frequent class), mcc and, with two
    classes, f1 of the second one. Regression: pearson and spearman. The loss is the cross-entropy in bits per row, or
    the mean squared error of a regression; all other metrics lie in [0, 1] or [-1, 1].
    """
    assert outputs.targets is not None
    scores: dict[str, Any] = {"split": outputs.split, "rows": len(outputs.logits)}
    logits = outputs.logits.double()  # in float32 the loss of large logits is infinite
    if task.cfg.regression_target:
        predicted = logits.view(-1)
        targets = outputs.targets.double()
        scores["loss"] = F.mse_loss(predicted, targets).item()
        scores["pearson"] = pearson(predicted.numpy(), targets.numpy())
        scores["spearman"] = spearman(predicted.numpy(), targets.numpy())
        return scores
    counts = ClassCounts.from_predictions(logits.argmax(dim=-1), outputs.targets, task.cfg.num_classes)
    scores["accuracy"] = counts.accuracy
    scores["loss"] = F.cross_entropy(logits, outputs.targets).item() / math.log(2)
    scores["majority"] = counts.majority
    scores["mcc"] = counts.mcc
    if task.cfg.num_classes == 2:
        scores["f1"] = counts.f1
    return scores


def format_predictions(task: Any, outputs: SplitOutputs, scale: float | None = None) -> list[str]:
    """Return the prediction for every row as text.

    A class has its name in label/dict.txt. A score has six decimals, as in `predict`. With a `scale`, it is multiplied
    by that and clamped to [0, scale].
    """
    if task.cfg.regression_target:
        values = outputs.logits.view(-1)
        if scale is not None:
            values = (scale * values).clamp(0, scale)
        return [f"{value:.6f}" for value in values.tolist()]
    labels = label_names(task)
    return [labels[number] for number in outputs.logits.argmax(dim=-1).tolist()]


def write_predictions(path: Path, predictions: list[str]) -> None:
    """Write the tab-separated file with the columns index and prediction that gluebenchmark.com accepts."""
    lines = ["index\tprediction"]
    for row, prediction in enumerate(predictions):
        lines.append(f"{row}\t{prediction}")
    with output_path(path) as out:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def report_split(
    task: Any, outputs: SplitOutputs, json_file: Path | None, tsv_file: Path | None, scale: float | None
) -> None:
    """Print the scores of a split, and write its scores and predictions to files.

    The scores are written to `json_file` and the predictions to `tsv_file`, unless these are None; SPLIT_PLACEHOLDER in
    the file names is replaced. `scale` is explained in `format_predictions`. UserError is raised if the split has no
    labels, but scores are requested or no predictions are.
    """
    split = outputs.split
    if outputs.targets is None and (json_file or not tsv_file):
        raise UserError(f"split '{split}' of {task.cfg.data} has no labels to score: use --predict OUT.tsv")
    if tsv_file:
        file = _file_of_split(tsv_file, split)
        write_predictions(file, format_predictions(task, outputs, scale))
        print(f"{split}: {len(outputs.logits)} predictions in {file}")
    if outputs.targets is None:
        return
    scores = compute_scores(task, outputs)
    label = label_names(task)[1] if "f1" in scores else ""
    metrics = [text.format(scores[name], label=label) for name, text in METRIC_FORMATS.items() if name in scores]
    print(f"{split}: {scores['rows']} rows, {', '.join(metrics)}")
    if json_file:
        with output_path(_file_of_split(json_file, split)) as out:
            out.write_text(format_result(scores, describe_provenance()))


def _file_of_split(file: Path, split: str) -> Path:
    """Return the path with SPLIT_PLACEHOLDER in the file's name replaced by the name of the split."""
    return file.with_name(file.name.replace(SPLIT_PLACEHOLDER, split))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a fine-tuned checkpoint, for example runs/sst2_lln_diag/checkpoint_best.pt")
    parser.add_argument("data", nargs="?", help="a binarized data directory (default: that of the fine-tuning run)")
    parser.add_argument("--split", default="valid", help="one split or several: valid,test (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, help="write the scores to this file; {split} in the file name stands for the split"
    )
    parser.add_argument(
        "--predict", type=Path, help="write one prediction per row to this file ({split} works as in --json)"
    )
    parser.add_argument(
        "--scale",
        type=float,
        help="multiply a regression's predictions by this and clamp them to [0, SCALE]; GLUE's STS-B needs 5",
    )
    add_precision_option(parser)
    add_positions_option(parser)
    args = parser.parse_args(argv)
    if args.scale is not None and not 0 < args.scale < math.inf:
        parser.error(f"--scale must be above 0 and finite, got {args.scale}")
    splits = args.split.split(",")
    if "" in splits:
        parser.error(f"--split must be a list of splits such as valid,test, got {args.split!r}: one split is empty")
    for option in ("json", "predict"):
        file = getattr(args, option)
        if file and len(splits) > 1 and SPLIT_PLACEHOLDER not in file.name:
            parser.error(f"--{option} must have {SPLIT_PLACEHOLDER} in the file's name for several splits, got {file}")
    for file in (args.json, args.predict):
        if file is not None:  # checked first, because the evaluation takes long
            check_output_path(file)
    if args.json is not None and args.json == args.predict:
        parser.error(f"--json and --predict must be different files, got {args.json} for both")
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true")  # fairseq sets it on a CPU, too
    model, task = load_finetuned_model(args.checkpoint, args.data, args.positions)
    use_precision(model, args.precision)
    activation: nn.Module = nn.Identity()
    if task.cfg.regression_target:
        activation = score_activation(stored_settings(load_checkpoint_lazily(args.checkpoint)))
    for split in splits:
        outputs = compute_outputs(model, task, split)
        outputs.logits = activation(outputs.logits)
        report_split(task, outputs, args.json, args.predict, args.scale)
