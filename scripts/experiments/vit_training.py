"""Train one vision transformer on pictures. A finished run is not repeated."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from lln_fairseq.analysis.layer_scalars import NAMES, observe
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.command import UserError
from lln_fairseq.data.files import write_bytes
from lln_fairseq.linearize.progress_bar import progress_bar
from scripts.experiments.progress import show_update
from scripts.experiments.vit_model import ViT, ViTShape
from scripts.experiments.vit_pictures import Pictures

RESULT = "result.json"
WARMUP = 0.1  # share of the updates with a rising learning rate, which then falls to 0 along a cosine
PROBE_PICTURES = 64  # pictures of the valid split on which α and β are measured
EVALUATION_BATCH = 256
ALPHA_BETA = [NAMES.index("alpha"), NAMES.index("beta")]


@dataclass
class ViTRecipe:
    """The settings on which the result of a run depends, apart from the sizes of the model and the pictures.

    Attributes:
        attention: an attention spec, for example `lln:alpha=2,beta=2`.
        seed: seed of the initial parameters, of dropout and of the order of the pictures.
        epochs: number of epochs.
        batch: pictures per update.
        lr: highest learning rate.
        weight_decay: weight decay of AdamW.
        fp16: True trains in float16 with a loss scale.
    """

    attention: str
    seed: int
    epochs: int
    batch: int
    lr: float
    weight_decay: float
    fp16: bool


class ViTRun:
    """Trains one model in a directory of its own.

    At the end, result.json is written. An interrupted run starts over.

    Args:
        directory: directory of the run, which is created when result.json is written.
        recipe: settings of the run.
        shape: sizes of the model.
        pictures: the pictures of all splits.
        device: "cpu" or "cuda".

    Raises:
        ValueError: for an unknown attention, or sizes that do not fit together.
    """

    def __init__(self, directory: Path, recipe: ViTRecipe, shape: ViTShape, pictures: Pictures, device: str) -> None:
        self.directory = directory
        self.recipe = recipe
        self.device = device
        self.settings = {"recipe": asdict(recipe), "shape": asdict(shape)}
        self.splits = {name: pictures.split(name) for name in ("train", "valid", "test")}
        torch.manual_seed(recipe.seed)
        name, options = parse_attention_spec(recipe.attention)
        self.model = ViT(shape, name, **options).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
        self.updates = recipe.epochs * math.ceil(len(self.splits["train"].labels) / recipe.batch)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)
        self.scaler = torch.amp.GradScaler(device, enabled=recipe.fp16)
        self.order = torch.Generator().manual_seed(recipe.seed)
        self.history: list[dict[str, Any]] = []

    def finish(self) -> dict[str, Any]:
        """Train the model and return the result. The result of a finished run is read from its file.

        Returns:
            A dict. Its entry "history" is a list with one entry for the untrained model and one for each epoch (see
            `_record_epoch`). Its entry "test" is the accuracy in percent on the test split after the last epoch.

        Raises:
            UserError: if the directory contains the result of other settings, or if the loss is not finite.
        """
        result_file = self.directory / RESULT
        if result_file.is_file():
            return self._read_result(result_file)
        with progress_bar(str(self.directory), self.updates, "update", leave=True) as bar:
            self._record_epoch(math.nan)
            for _ in range(self.recipe.epochs):
                self._train_epoch(bar)
        result = {**self.settings, "history": self.history, "test": self.accuracy("test")}
        write_bytes(result_file, (json.dumps(result, indent=1) + "\n").encode())
        return result

    @torch.no_grad()
    def accuracy(self, split: str) -> float:
        """Return the accuracy on a split in percent, and leave the model in evaluation mode."""
        self.model.eval()
        part = self.splits[split]
        correct = 0
        for pictures, labels in part.batches(EVALUATION_BATCH):
            predictions = self.model(pictures.to(self.device)).argmax(dim=-1).cpu()
            correct += int((predictions == labels).sum())
        return 100 * correct / len(part.labels)

    def _train_epoch(self, bar: tqdm) -> None:
        """Train for one epoch and add it to the history. Raise UserError if the loss is not finite."""
        self.model.train()
        train = self.splits["train"]
        total = 0.0
        for pictures, labels in train.batches(self.recipe.batch, self.order):
            loss = self._update(pictures.to(self.device), labels.to(self.device))
            total += loss * len(labels)
            show_update(bar, self.schedule.last_epoch, f"{loss / math.log(2):.3f}")
        if not math.isfinite(total):
            raise UserError(f"{self.directory}: the loss of epoch {len(self.history)} is not finite; try a lower --lr")
        self._record_epoch(total / len(train.labels))

    def _update(self, pictures: Tensor, labels: Tensor) -> float:
        """Make one update with a batch, and advance the learning-rate schedule.

        Gradients are clipped to norm 1. With recipe.fp16, the optimizer step is skipped if a gradient is not finite.

        Args:
            pictures: (B, channels, side, side), on the device of the run.
            labels: int64 (B), on the device of the run.

        Returns:
            The cross-entropy of the batch before the update, in nats.
        """
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.float16, enabled=self.recipe.fp16):
            loss = F.cross_entropy(self.model(pictures), labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss.item()

    def _lr_factor(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0, as a fraction of the highest learning rate.

        The fraction rises linearly to 1 in the first WARMUP of all updates. Then it falls to 0 along half a cosine.
        """
        warmup = WARMUP * self.updates
        if update < warmup:
            return (update + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (update - warmup) / (self.updates - warmup)))

    def _record_epoch(self, loss: float) -> None:
        """Add an epoch with this mean training loss in nats to the history.

        The entry has `loss`, `valid` (the accuracy in percent), `alpha_beta` (a list with a pair for each layer, or an
        empty list for an attention without α and β) and `loss_scale` (None without fp16). For the untrained model,
        `loss` is NaN.
        """
        valid = self.accuracy("valid")
        probe, _ = next(self.splits["valid"].batches(PROBE_PICTURES))
        with torch.no_grad(), observe(self.model) as layers:
            self.model(probe.to(self.device))
        pairs = [scalars[ALPHA_BETA].tolist() for scalars in layers]
        loss_scale = self.scaler.get_scale() if self.recipe.fp16 else None
        self.history.append(
            {
                "loss": loss,
                "valid": valid,
                "alpha_beta": [pair for pair in pairs if not math.isnan(pair[0])],
                "loss_scale": loss_scale,
            }
        )

    def _read_result(self, file: Path) -> dict[str, Any]:
        """Return the history and the accuracy of a finished run. Raise UserError if it has other settings."""
        result = json.loads(file.read_text())
        for group, present in self.settings.items():
            if result[group] != present:
                raise UserError(
                    f"{self.directory} holds another run, with {group} {result[group]}; choose another --out"
                )
        return {name: result[name] for name in ("history", "test")}
