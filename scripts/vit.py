"""Train vision transformers with different attentions (arXiv 2311.13541, A.8.2 and A.8.4): Table 3, Figures 9 and 10.

    python -m scripts.vit --out runs/vit                            # scikit-learn's digits
    python -m scripts.vit --out runs/cats --images cats-and-dogs --side 224 --patch 32

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
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from lln_fairseq.analysis.events import Curve
from lln_fairseq.analysis.layer_scalars import NAMES, observe
from lln_fairseq.attention import Attention, build_attention, reject_layer_mechanism
from lln_fairseq.attention.registry import parse_attention_spec
from lln_fairseq.command import run_main
from lln_fairseq.errors import UserError
from lln_fairseq.provenance import describe_provenance, write_result
from lln_fairseq.terminal import at_least_one, program_parser, progress_bar, show_update, text_table
from scripts.benchmarks.meter import attention_argument, split_specs
from scripts.figures import ACCURACY, LOSS_SCALE, Settings, figure_9, figure_10
from scripts.tables import mean_and_range

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MATCHED_ATTENTION = "lln"  # the attention whose α and β --fixed sets
PAPER_SIZES = {"layers": 12, "width": 128, "heads": 8, "patch": 32}
DIGITS_SIZES = {"layers": 4, "width": 64, "heads": 4, "patch": 2}
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
VALID_SHARE = 0.15
TEST_SHARE = 0.25
SPLIT_SEED = 0  # the split does not depend on the seed of a run
MAX_NORM = 1.0  # of the gradients
WARMUP = 0.1  # share of the updates with a rising learning rate, which then falls to 0 along a cosine
PROBE_PICTURES = 64  # pictures of the valid split on which α and β are measured
EVALUATION_BATCH = 256
ALPHA_BETA = [NAMES.index("alpha"), NAMES.index("beta")]


class Pictures(NamedTuple):
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
class ViTSettings:
    """The settings on which the result of a run depends, apart from the pictures."""

    attention: str  # an attention spec, for example "lln:alpha=2,beta=2"
    seed: int  # of the initial parameters, of dropout and of the order of the pictures
    classes: int
    channels: int
    side: int  # pixels of a picture
    patch: int  # side length of a patch in pixels
    layers: int
    width: int
    heads: int
    epochs: int
    batch: int  # pictures per update
    lr: float  # the highest
    weight_decay: float
    fp16: bool
    dropout: float = 0.1

    @property
    def tokens(self) -> int:
        """The number of patches of a picture, plus one for the class token."""
        return (self.side // self.patch) ** 2 + 1


class AttentionLayer(nn.Module):
    """A layer norm, self-attention with its projections and dropout, and a residual connection."""

    def __init__(self, width: int, attention: Attention, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention = attention
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.attention.num_heads, -1))  # (B, N, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).contiguous()  # (B, H, N, D) each
        return x + self.dropout(self.out(self.attention(q, k, v).transpose(1, 2).flatten(2)))


class ViTLayer(nn.Module):
    """A pre-norm transformer layer: attention and an MLP, each after a layer norm and with a residual connection."""

    def __init__(self, settings: ViTSettings, attention: Attention) -> None:
        super().__init__()
        width = settings.width
        self.attention = AttentionLayer(width, attention, settings.dropout)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.dropout(self.mlp(x))


class ViT(nn.Module):
    """A vision transformer with any attention of the registry: pre-norm layers, a class token, learned positions.

    Dosovitskiy et al. 2021. The paper's model has 12 layers of width 128 (arXiv 2311.13541, A.8.2).
    """

    def __init__(self, settings: ViTSettings) -> None:
        super().__init__()
        if settings.side % settings.patch:
            raise UserError(f"pictures of {settings.side} pixels cannot be cut into patches of {settings.patch}")
        if settings.width % settings.heads:
            raise UserError(f"a width of {settings.width} cannot be divided among {settings.heads} heads")
        self.patch = settings.patch
        self.embed = nn.Linear(settings.channels * settings.patch**2, settings.width)
        self.start = nn.Parameter(0.02 * torch.randn(1, 1, settings.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, settings.tokens, settings.width))
        head_dim = settings.width // settings.heads
        self.layers = nn.Sequential()
        for attention in build_layer_attentions(
            settings.attention, settings.layers, settings.heads, head_dim, settings.tokens
        ):
            self.layers.append(ViTLayer(settings, attention))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, settings.classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits (B, classes) of pictures, uint8 (B, channels, side, side)."""
        patches = F.unfold(2 * (pixels.float() / 255) - 1, self.patch, stride=self.patch).mT
        class_token = self.start.expand(len(pixels), -1, -1)
        x = torch.cat([class_token, self.embed(patches)], dim=1) + self.positions
        return self.head(self.norm(self.layers(x)[:, 0]))


def build_layer_attentions(
    spec: str, layers: int, heads: int, head_dim: int, max_positions: int
) -> Iterator[Attention]:
    """Yield the attention of each layer of a model, with its depth set. Wrong options raise UserError."""
    name, options = parse_attention_spec(spec)
    for layer in range(layers):
        try:
            attention = build_attention(
                name, num_heads=heads, head_dim=head_dim, max_positions=max_positions, **options
            )
        except ValueError as error:
            raise UserError(str(error)) from error
        attention.set_depth(layer, layers)
        yield attention


def batches(pictures: Pictures, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pixels and labels of `size` pictures at a time, on the device, in the order of these indices."""
    for rows in order.split(size):
        yield pictures.pixels[rows].to(DEVICE), pictures.labels[rows].to(DEVICE)


class Trainer:
    """Trains a model with AdamW. `lr_factor` returns the learning rate of an update, from 0, as a share of the highest.

    With `settings.fp16`, it computes in float16 with a loss scale.
    """

    def __init__(self, model: ViT, settings: ViTSettings, lr_factor: Callable[[int], float]) -> None:
        self.model = model
        self.batch = settings.batch
        self.optimizer = torch.optim.AdamW(model.parameters(), settings.lr, weight_decay=settings.weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_factor)
        self.scaler = torch.amp.GradScaler(DEVICE, enabled=settings.fp16)

    def train_epoch(self, pictures: Pictures, order: Tensor, bar: tqdm) -> float:
        """Train on the pictures in the order of these indices, and return their mean loss in nats."""
        self.model.train()
        total = 0.0
        for pixels, labels in batches(pictures, order, self.batch):
            self.optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16, enabled=self.scaler.is_enabled()):
                loss = F.cross_entropy(self.model(pixels), labels)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            nats = loss.item()
            total += nats * len(labels)
            show_update(bar, bar.n + 1, f"{nats / math.log(2):.3f}")
        return total / len(order)


def train(settings: ViTSettings, pictures: Pictures) -> dict[str, Any]:
    """Train a model, and return "history", with `describe_epoch` of the untrained model and of each epoch, and "test".

    "test" is the accuracy in percent on the test split after the last epoch. A loss that is not finite raises
    UserError.
    """
    valid = pictures.split("valid")
    train_pictures = pictures.split("train")
    torch.manual_seed(settings.seed)
    model = ViT(settings).to(DEVICE)
    updates = settings.epochs * math.ceil(len(train_pictures.labels) / settings.batch)
    warmup = WARMUP * updates

    def lr_factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (update - warmup) / (updates - warmup)))

    trainer = Trainer(model, settings, lr_factor)
    order = torch.Generator().manual_seed(settings.seed)
    history = [describe_epoch(trainer, valid, math.nan)]
    name = f"{settings.attention}, seed {settings.seed}"
    with progress_bar(name, updates, "update", leave=True) as bar:
        for epoch in range(settings.epochs):
            shuffled = torch.randperm(len(train_pictures.labels), generator=order)
            loss = trainer.train_epoch(train_pictures, shuffled, bar)
            if not math.isfinite(loss):
                raise UserError(f"{name}: the loss of epoch {epoch + 1} is not finite; try a lower --lr")
            history.append(describe_epoch(trainer, valid, loss))
    return {"history": history, "test": accuracy(model, pictures.split("test"))}


@torch.no_grad()
def accuracy(model: ViT, pictures: Pictures) -> float:
    """Return the accuracy on pictures in percent, and leave the model in evaluation mode."""
    model.eval()
    correct = 0
    for pixels, labels in batches(pictures, torch.arange(len(pictures.labels)), EVALUATION_BATCH):
        correct += int((model(pixels).argmax(dim=-1) == labels).sum())
    return 100 * correct / len(pictures.labels)


def describe_epoch(trainer: Trainer, valid: Pictures, loss: float) -> dict[str, Any]:
    """Return the state of a training after an epoch with this mean loss in nats, NaN before the first one.

    Returns: `loss`, `valid` (the accuracy in percent), `alpha_beta` (a list with a pair for each layer, or an empty
        list for an attention without α and β) and `loss_scale` (None without fp16).
    """
    valid_accuracy = accuracy(trainer.model, valid)
    with torch.no_grad(), observe(trainer.model) as layers:
        trainer.model(valid.pixels[:PROBE_PICTURES].to(DEVICE))
    pairs = [calls[0][ALPHA_BETA].tolist() for calls in layers]
    return {
        "loss": loss,
        "valid": valid_accuracy,
        "alpha_beta": [pair for pair in pairs if not math.isnan(pair[0])],
        "loss_scale": trainer.scaler.get_scale() if trainer.scaler.is_enabled() else None,
    }


def finish_run(file: Path, settings: ViTSettings, pictures: Pictures) -> dict[str, Any]:
    """Return the result of `train`, with its settings under "settings".

    If the file exists, the result is read from it, otherwise it is written to it. UserError is raised if the file has
    other settings.
    """
    if file.is_file():
        result = json.loads(file.read_text())
        if result.get("settings") != asdict(settings):
            raise UserError(f"{file} was written with other settings, {result.get('settings')}; choose another OUT")
        return result
    provenance = describe_provenance()
    result = {"settings": asdict(settings), **train(settings, pictures)}
    write_result(file, result, provenance)
    return result


def file_name(text: str) -> str:
    """Return the text with "-" instead of characters that a shell or Hydra could interpret."""
    return re.sub(r"[^\w.]+", "-", text)


def run_experiment(args: argparse.Namespace) -> None:
    """Train every attention with every seed, then print the table and draw the figures."""
    pictures = load_folder_pictures(args.images, args.side) if args.images else load_digits_pictures()
    _, channels, side, _ = pictures.pixels.shape
    sizes: dict[str, Any] = dict(PAPER_SIZES if args.images else DIGITS_SIZES)
    for name in sizes:
        sizes[name] = getattr(args, name) or sizes[name]
    quarter = max(((side // sizes["patch"]) ** 2 + 1) // 4, 1)
    attentions = args.attentions or ["softmax", MATCHED_ATTENTION, f"linformer:projected_length={quarter}"]
    fixed = [f"{MATCHED_ATTENTION}:alpha={value:g},beta={value:g}" for value in args.fixed]
    options = {name: getattr(args, name) for name in ("epochs", "batch", "lr", "weight_decay", "fp16")}
    results: dict[str, list[dict[str, Any]]] = {}
    for attention, seed in itertools.product([*attentions, *fixed], dict.fromkeys(args.seeds)):
        settings = ViTSettings(attention, seed, len(pictures.classes), channels, side, **sizes, **options)
        file = args.out / file_name(attention) / f"seed{seed}" / "result.json"
        results.setdefault(attention, []).append(finish_run(file, settings, pictures))
    print(accuracy_table(results))
    for path in draw_vit_figures(results, args.out):
        print(path)


def accuracy_table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a table of the accuracies on dev and test after the last epoch, one row per attention."""
    rows = [("attention", "dev", "test", "seeds")]
    for attention, results_of_attention in results.items():
        dev = [result["history"][-1]["valid"] for result in results_of_attention]
        test = [result["test"] for result in results_of_attention]
        rows.append((attention, mean_and_range(dev), mean_and_range(test), str(len(results_of_attention))))
    return text_table(rows)


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


def attentions_argument(text: str) -> list[str]:
    """Convert an argument to attention specs, as a `type` of argparse. Mechanisms that replace a layer are errors."""
    specs = [attention_argument(spec) for spec in split_specs(text)]
    for spec in specs:
        try:
            reject_layer_mechanism(parse_attention_spec(spec)[0], "this experiment needs queries and keys")
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return specs


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = program_parser("python -m scripts.vit", __doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/vit"), help="directory of all results (default: %(default)s)"
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help="one folder of pictures per class; default: digits")
    parser.add_argument("--side", type=at_least_one, help="scale and crop pictures to this side length in pixels")
    parser.add_argument(
        "--attentions",
        type=attentions_argument,
        metavar="NAME[:OPTION=VALUE,...],...",
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
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return run_main(
        partial(run_experiment, args), "\ninterrupted; run the same command again, which keeps finished runs"
    )


if __name__ == "__main__":
    sys.exit(main())
