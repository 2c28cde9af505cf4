"""Train vision transformers with different attentions (arXiv 2311.13541, A.8.2 and A.8.4): Table 3, Figures 9 and 10.

    python -m scripts.research.vit --out runs/vit                            # scikit-learn's digits
    python -m scripts.research.vit --out runs/cats --images cats-and-dogs --side 224 --patch 32

The directory of --images has one folder of pictures per class. Of each class, 60 % are for training, 15 % for
validation (dev) and 25 % for testing. The split is the same in every run. With --images the model has the paper's size,
12 layers of width 128. The model for the digits is smaller. If you run a command again, runs with a result.json are not
repeated. Choose another --out for other pictures. An interrupted run starts over.

    OUT/NAME/seedN/result.json    losses, accuracies, α and β by epoch
    OUT/figure_9.png, .csv        α and β of every layer during training, a row for each run of LLN
    OUT/figure_10.png, .csv       accuracy on dev against α, fixed (--fixed) or matched; with --fp16, on a GPU, the
                                  inverse loss scale
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from lln_fairseq.analysis.events import Curve
from lln_fairseq.analysis.layer_scalars import NAMES, observe
from lln_fairseq.attention import Attention, build_attention
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.command import run_main
from lln_fairseq.errors import UserError
from lln_fairseq.files import write_bytes
from lln_fairseq.terminal import at_least_one, program_parser, progress_bar, show_update, text_table
from scripts.figures import ACCURACY, LOSS_SCALE, Settings, figure_9, figure_10

MATCHED_ATTENTION = "lln"  # the attention whose α and β --fixed sets
PAPER_SIZES = {"layers": 12, "width": 128, "heads": 8, "patch": 32}
DIGITS_SIZES = {"layers": 4, "width": 64, "heads": 4, "patch": 2}
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
VALID_SHARE = 0.15
TEST_SHARE = 0.25
SPLIT_SEED = 0  # the split does not depend on the seed of a run
RESULT = "result.json"
WARMUP = 0.1  # share of the updates with a rising learning rate, which then falls to 0 along a cosine
PROBE_PICTURES = 64  # pictures of the valid split on which α and β are measured
EVALUATION_BATCH = 256
ALPHA_BETA = [NAMES.index("alpha"), NAMES.index("beta")]


@dataclass
class Pictures:
    """A data set of labeled pictures, which are square and have the same size."""

    pixels: Tensor  # uint8 (N, channels, side, side)
    labels: Tensor  # int64 (N), indices into `classes`
    classes: list[str]

    def split(self, name: str) -> "Pictures":
        """Return the pictures of "train", "valid" or "test", sorted by class.

        Every class is divided in the same proportions. The division is random, but the same in every call.
        """
        rows = []
        for label in range(len(self.classes)):
            rows_of_class = torch.nonzero(self.labels == label)[:, 0]
            rows.append(_select_split(rows_of_class, name))
        selected = torch.cat(rows)
        return Pictures(self.pixels[selected], self.labels[selected], self.classes)

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pictures as float32 in [0, 1], (B, channels, side, side), and their labels, int64 (B).

        The generator draws the order; None keeps the order of the pictures.
        """
        count = len(self.labels)
        if generator is None:
            order = torch.arange(count)
        else:
            order = torch.randperm(count, generator=generator)
        for rows in order.split(size):
            yield self.pixels[rows].float() / 255, self.labels[rows]


def _select_split(rows: Tensor, name: str) -> Tensor:
    """Return the rows of one class, int64, that belong to the split `name`."""
    shuffled = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SPLIT_SEED))]
    valid_count = round(VALID_SHARE * len(rows))
    test_count = round(TEST_SHARE * len(rows))
    valid, test, train = shuffled.split([valid_count, test_count, len(rows) - valid_count - test_count])
    return {"valid": valid, "test": test, "train": train}[name]


def load_digits_pictures() -> Pictures:
    """Return the 1,797 handwritten digits of UCI: gray pictures of 8 x 8 pixels in ten classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.from_numpy(data.images)[:, None] * (255 / 16)
    return Pictures(pixels.round().to(torch.uint8), torch.from_numpy(data.target), [str(i) for i in range(10)])


def load_folder_pictures(path: Path, side: int | None) -> Pictures:
    """Load the pictures PATH/CLASS/* in color. Files whose suffix is not in SUFFIXES are ignored.

    Pictures are scaled and cropped to `side` pixels. With None they must be square and of one size.
    """
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    if len(classes) < 2:
        raise UserError(f"{path} must have at least two folders, one for each class, and has {len(classes)}")
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = sorted(file for file in (path / name).iterdir() if file.suffix.lower() in SUFFIXES)
        if len(files) < 1 / min(VALID_SHARE, TEST_SHARE):
            raise UserError(f"{path / name} has too few pictures to split: {len(files)} ({', '.join(SUFFIXES)})")
        for file in files:
            picture = _read_picture(file, side)
            height, width, _ = picture.shape
            if height != width or (pixels and picture.shape != pixels[0].shape):
                raise UserError(
                    f"{file} has {width} x {height} pixels: all pictures must be square and of one size, or use --side"
                )
            pixels.append(picture)
            labels.append(label)
    return Pictures(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), torch.tensor(labels), classes)


def _read_picture(file: Path, side: int | None) -> np.ndarray:
    """Return a picture as uint8 (height, width, 3), scaled and cropped to a square unless `side` is None."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{file} is not a readable picture: {error}") from error
    if side is not None:
        image = ImageOps.fit(image, (side, side))
    return np.asarray(image)


@dataclass
class ViTShape:
    """The sizes of a vision transformer. Pictures have `side` x `side` pixels, and patches `patch` x `patch`."""

    classes: int
    channels: int
    side: int
    patch: int
    layers: int = 12
    width: int = 128
    heads: int = 8
    dropout: float = 0.1

    @property
    def tokens(self) -> int:
        """The number of patches of a picture, plus one for the class token."""
        return (self.side // self.patch) ** 2 + 1


class ViTLayer(nn.Module):
    """A pre-norm transformer layer: attention and an MLP, each after a layer norm and with a residual connection."""

    def __init__(self, shape: ViTShape, attention: Attention) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))  # (B, N, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).contiguous()  # (B, H, N, D) each
        attended = self.attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.mlp(x))


class ViT(nn.Module):
    """A vision transformer with any attention of the registry: pre-norm layers, a class token, learned positions.

    Dosovitskiy et al. 2021. The paper's model has 12 layers of width 128 (arXiv 2311.13541, A.8.2). A ValueError says
    which sizes do not fit together, or that the attention or an option is unknown.
    """

    def __init__(self, shape: ViTShape, attention: str, **options: Any) -> None:
        super().__init__()
        if shape.side % shape.patch:
            raise ValueError(f"pictures of {shape.side} pixels cannot be cut into patches of {shape.patch}")
        if shape.width % shape.heads:
            raise ValueError(f"a width of {shape.width} cannot be divided among {shape.heads} heads")
        self.patch = shape.patch
        self.embed = nn.Linear(shape.channels * shape.patch**2, shape.width)
        self.start = nn.Parameter(0.02 * torch.randn(1, 1, shape.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, shape.tokens, shape.width))
        self.layers = nn.Sequential()
        for index in range(shape.layers):
            module = build_attention(
                attention,
                num_heads=shape.heads,
                head_dim=shape.width // shape.heads,
                max_positions=shape.tokens,
                **options,
            )
            module.set_depth(index, shape.layers)
            self.layers.append(ViTLayer(shape, module))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the logits (B, classes) of pictures (B, channels, side, side) with values in [0, 1]."""
        patches = F.unfold(2 * pictures - 1, self.patch, stride=self.patch).mT  # (B, patches, channels * patch²)
        class_token = self.start.expand(len(pictures), -1, -1)
        x = torch.cat([class_token, self.embed(patches)], dim=1) + self.positions
        return self.head(self.norm(self.layers(x)[:, 0]))


@dataclass
class ViTRecipe:
    """The settings on which the result of a run depends, apart from the sizes of the model and the pictures."""

    attention: str  # an attention spec, for example "lln:alpha=2,beta=2"
    seed: int  # of the initial parameters, of dropout and of the order of the pictures
    epochs: int
    batch: int  # pictures per update
    lr: float  # the highest
    weight_decay: float
    fp16: bool


class ViTRun:
    """Trains one model and writes DIRECTORY/result.json at the end."""

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
        """Train the model, or read the result of a finished run.

        In the result, "history" has one entry for the untrained model and one for each epoch (see `_record_epoch`).
        "test" is the accuracy in percent on the test split after the last epoch.
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
        """Train for one epoch and add it to the history. A loss that is not finite raises UserError."""
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
        """Make one update, with gradients clipped to norm 1, and return the cross-entropy before it in nats."""
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
        """Return the learning rate of an update, counted from 0, as a fraction of the highest one."""
        warmup = WARMUP * self.updates
        if update < warmup:
            return (update + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (update - warmup) / (self.updates - warmup)))

    def _record_epoch(self, loss: float) -> None:
        """Add an epoch with this mean training loss in nats to the history, and leave the model in evaluation mode.

        The entry has `loss`, `valid` (the accuracy in percent), `alpha_beta` (a list with a pair for each layer, or an
        empty list for an attention without α and β) and `loss_scale` (None without fp16). For the untrained model,
        `loss` is NaN.
        """
        valid = self.accuracy("valid")
        probe, _ = next(self.splits["valid"].batches(PROBE_PICTURES))
        with torch.no_grad(), observe(self.model) as layers:
            self.model(probe.to(self.device))
        pairs = [calls[0][ALPHA_BETA].tolist() for calls in layers]
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
        """Return the history and the accuracy of a finished run. Other settings raise UserError."""
        result = json.loads(file.read_text())
        for group, present in self.settings.items():
            if result[group] != present:
                raise UserError(
                    f"{self.directory} holds another run, with {group} {result[group]}; choose another --out"
                )
        return {name: result[name] for name in ("history", "test")}


class ViTExperiment:
    """Trains every attention with every seed on one data set, and compares the results."""

    def __init__(self, args: argparse.Namespace, pictures: Pictures) -> None:
        self.args = args
        self.pictures = pictures
        self.out = Path(args.out)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        sizes = dict(PAPER_SIZES if args.images else DIGITS_SIZES)
        for name in sizes:
            if getattr(args, name) is not None:
                sizes[name] = getattr(args, name)
        _, channels, side, _ = pictures.pixels.shape
        self.shape = ViTShape(len(pictures.classes), channels, side, **sizes)

    def run_all(self) -> None:
        """Train every attention with every seed, then print the table and draw the figures."""
        quarter = max(self.shape.tokens // 4, 1)
        attentions = self.args.attentions or ["softmax", MATCHED_ATTENTION, f"linformer:projected_length={quarter}"]
        for value in self.args.fixed:
            attentions = [*attentions, f"{MATCHED_ATTENTION}:alpha={value:g},beta={value:g}"]
        results = {attention: self.train_seeds(attention) for attention in attentions}
        print(f"{self.shape}\n{accuracy_table(results)}")
        for path in draw_vit_figures(results, self.out):
            print(path)

    def train_seeds(self, attention: str) -> list[dict[str, Any]]:
        """Train an attention with every seed and return the results in the order of the seeds."""
        args = self.args
        results = []
        for seed in args.seeds:
            directory = self.out / re.sub(r"[^\w.]+", "-", attention) / f"seed{seed}"
            recipe = ViTRecipe(
                attention,
                seed,
                epochs=args.epochs,
                batch=args.batch,
                lr=args.lr,
                weight_decay=args.weight_decay,
                fp16=args.fp16,
            )
            try:
                run = ViTRun(directory, recipe, self.shape, self.pictures, self.device)
            except ValueError as error:
                raise UserError(str(error)) from error
            results.append(run.finish())
        return results


def accuracy_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a table of the accuracies on dev and test after the last epoch, one row per attention."""
    rows = [("attention", "dev", "test", "seeds")]
    for attention, results_of_attention in results.items():
        dev = [result["history"][-1]["valid"] for result in results_of_attention]
        test = [result["test"] for result in results_of_attention]
        rows.append((attention, format_range(dev), format_range(test), str(len(results_of_attention))))
    return text_table(rows)


def format_range(values: list[float]) -> str:
    """Return "mean (lowest to highest)" of at least one value, each with one decimal."""
    return f"{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def draw_vit_figures(results: dict[str, list[dict[str, Any]]], out: Path) -> list[Path]:
    """Draw OUT/figure_9.png and OUT/figure_10.png with the runs that have α and β, if any, and return their paths."""
    runs = {}
    for attention, results_of_attention in results.items():
        for number, result in enumerate(results_of_attention, start=1):
            if result["history"][0]["alpha_beta"]:
                runs[f"{attention}, run {number}"] = history_curves(result["history"])
    if not runs:
        return []
    paths = [out / "figure_9.png", out / "figure_10.png"]
    for figure, path in zip((figure_9, figure_10), paths, strict=True):
        figure(Settings(runs=runs)).save(path)
    return paths


def history_curves(history: list[dict[str, Any]]) -> dict[str, Curve]:
    """Return the history of a run as curves over epochs, by the tags that fairseq's runs have in TensorBoard."""
    epochs = list(range(len(history)))
    curves = {ACCURACY: Curve(epochs, [epoch["valid"] for epoch in history])}
    if history[0]["loss_scale"]:
        curves[LOSS_SCALE] = Curve(epochs, [1 / epoch["loss_scale"] for epoch in history])
    for layer in range(len(history[0]["alpha_beta"])):
        for place, name in enumerate(("alpha", "beta")):
            values = [epoch["alpha_beta"][layer][place] for epoch in history]
            curves[f"attention/{name}/layer_{layer:02d}"] = Curve(epochs, values)
    return curves


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. Repeated seeds are dropped."""
    parser = program_parser("python -m scripts.research.vit", __doc__)
    parser.add_argument("--out", default="runs/vit", help="directory of all results (default: %(default)s)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="one folder of pictures per class; default: digits")
    parser.add_argument("--side", type=at_least_one, help="scale and crop pictures to this side length in pixels")
    parser.add_argument(
        "--attentions",
        nargs="+",
        metavar="NAME[:OPTION=VALUE,...]",
        help="default: softmax, lln, and linformer with a quarter of the tokens",
    )
    parser.add_argument("--fixed", nargs="*", type=float, default=[], metavar="VALUE", help="fixed values of α = β")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    for name, value in PAPER_SIZES.items():
        help_text = f"default: {value}, {DIGITS_SIZES[name]} for the digits"
        parser.add_argument(f"--{name}", type=at_least_one, help=help_text)
    parser.add_argument("--epochs", type=at_least_one, default=20)
    parser.add_argument("--batch", type=at_least_one, default=64, help="pictures per update")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate of AdamW")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--fp16", action="store_true", help="half precision with a loss scale; needs a GPU")
    args = parser.parse_args(argv)
    if args.fp16 and not torch.cuda.is_available():
        parser.error("--fp16 needs a GPU, and torch finds none")
    if args.side and not args.images:
        parser.error("--side needs --images: the digits have 8 pixels")
    args.seeds = list(dict.fromkeys(args.seeds))
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)

    def program() -> None:
        if args.images:
            pictures = load_folder_pictures(args.images, args.side)
        else:
            pictures = load_digits_pictures()
        ViTExperiment(args, pictures).run_all()

    return run_main(program, "\ninterrupted; run the same command again, which keeps finished runs")


if __name__ == "__main__":
    sys.exit(main())
