"""One training of a vision transformer, which goes on where it was interrupted, and what it leaves behind."""

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
from lln_fairseq.data.files import atomic_path, write_bytes
from scripts.experiments.progress import progress_bar, report_update
from scripts.experiments.vit_model import Shape, ViT
from scripts.experiments.vit_pictures import Pictures

CHECKPOINT, RESULT = "checkpoint.pt", "result.json"
WARMUP = 0.1  # of the updates; then the learning rate falls to 0 along a cosine
PROBE = 64  # pictures of the valid split that α and β are measured on
ALPHA_BETA = [NAMES.index("alpha"), NAMES.index("beta")]
EVALUATED = 256  # pictures at a time


@dataclass
class Recipe:
    """What a run's result depends on, beside the pictures."""

    attention: str  # NAME or NAME:OPTION=VALUE,...
    seed: int
    epochs: int
    batch: int
    lr: float
    weight_decay: float
    fp16: bool


class Run:
    """A training in a folder: checkpoint.pt after every epoch, result.json at the end.

    Raises: UserError where the folder holds a run with another recipe, ValueError for an attention or sizes that do
    not fit.
    """

    def __init__(self, folder: Path, recipe: Recipe, shape: Shape, pictures: Pictures, device: str) -> None:
        self.folder, self.recipe, self.device = folder, recipe, device
        self.settings = {"recipe": asdict(recipe), "shape": asdict(shape), "pictures": pictures.digest}
        self.splits = {name: pictures.split(name) for name in ("train", "valid", "test")}
        torch.manual_seed(recipe.seed)
        name, options = parse_attention_spec(recipe.attention)
        self.model = ViT(shape, name, **options).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
        self.updates = recipe.epochs * math.ceil(len(self.splits["train"].labels) / recipe.batch)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._factor)
        self.scaler = torch.amp.GradScaler(device, enabled=recipe.fp16)
        self.order = torch.Generator().manual_seed(recipe.seed)
        self.history: list[dict[str, Any]] = []

    def finish(self) -> dict[str, Any]:
        """Trains what is left to be trained; the result, of which `test` is the accuracy after the last epoch."""
        result_file = self.folder / RESULT
        checkpoint = self.folder / CHECKPOINT
        if result_file.is_file():
            found = json.loads(result_file.read_text())
            self._check(found)
            return {name: found[name] for name in ("history", "test")}
        if checkpoint.is_file():
            self._resume(torch.load(checkpoint, weights_only=True))
        with progress_bar(str(self.folder), self.updates) as bar:
            if not self.history:
                self._record(math.nan)
            while len(self.history) <= self.recipe.epochs:
                self._epoch(bar)
                self._save()
        result = {**self.settings, "history": self.history, "test": self.accuracy("test")}
        write_bytes(result_file, (json.dumps(result, indent=1) + "\n").encode())
        checkpoint.unlink()
        return result

    def _epoch(self, bar: tqdm) -> None:
        self.model.train()
        train, total = self.splits["train"], 0.0
        for pictures, labels in train.batches(self.recipe.batch, self.order):
            loss = self._step(pictures.to(self.device), labels.to(self.device))
            total += loss * len(labels)
            report_update(bar, self.schedule.last_epoch, f"{loss / math.log(2):.3f}")
        if not math.isfinite(total):
            raise UserError(
                f"{self.folder}: the loss is no number any more, in epoch {len(self.history)}; a lower --lr?"
            )
        self._record(total / len(train.labels))

    def _step(self, pictures: Tensor, labels: Tensor) -> float:
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

    def _factor(self, update: int) -> float:
        warmup = WARMUP * self.updates
        if update < warmup:
            return (update + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (update - warmup) / (self.updates - warmup)))

    @torch.no_grad()
    def accuracy(self, split: str) -> float:
        """In per cent."""
        self.model.eval()
        part = self.splits[split]
        right = sum(
            (self.model(pictures.to(self.device)).argmax(dim=-1).cpu() == labels).sum().item()
            for pictures, labels in part.batches(EVALUATED)
        )
        return 100 * right / len(part.labels)

    def _record(self, loss: float) -> None:
        """Append an epoch to the history: training loss in nats, accuracy on valid, α and β by layer, loss scale."""
        row: dict[str, Any] = {"loss": loss, "valid": self.accuracy("valid")}
        probe, _ = next(self.splits["valid"].batches(PROBE))
        with torch.no_grad(), observe(self.model) as layers:
            self.model(probe.to(self.device))
        pairs = [scalars[ALPHA_BETA].tolist() for scalars in layers]
        row["alpha_beta"] = [pair for pair in pairs if not math.isnan(pair[0])]  # none of an attention without them
        row["loss_scale"] = self.scaler.get_scale() if self.recipe.fp16 else None
        self.history.append(row)

    def _save(self) -> None:
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule", "scaler")}
        random = {"order": self.order.get_state(), "cpu": torch.get_rng_state()}
        if self.device == "cuda":
            random["cuda"] = torch.cuda.get_rng_state()
        with atomic_path(self.folder / CHECKPOINT) as path:
            torch.save({**self.settings, "state": state, "random": random, "history": self.history}, path)

    def _resume(self, found: dict[str, Any]) -> None:
        self._check(found)
        for name, state in found["state"].items():
            getattr(self, name).load_state_dict(state)
        self.order.set_state(found["random"]["order"])
        torch.set_rng_state(found["random"]["cpu"])
        if self.device == "cuda":
            torch.cuda.set_rng_state(found["random"]["cuda"])
        self.history = found["history"]

    def _check(self, found: dict[str, Any]) -> None:
        for group, ours in self.settings.items():
            if found[group] != ours:
                raise UserError(f"{self.folder} holds another run, with {group} {found[group]}; choose another --out")
