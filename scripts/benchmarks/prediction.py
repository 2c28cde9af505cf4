"""Time of `predict` of a loaded model, for one sentence and for many, beside transformers' text-classification.

    python -m scripts.benchmarks.prediction --presets tiny small --threads 1

The models have random weights and 2 classes, the sentences random words; nothing is fetched. The pipeline runs the same
softmax model, exported for Hugging Face. Both sides start from text and end with labels and probabilities, which are
compared before anything is timed. All variants are timed in turn, repeat by repeat, so that a noisy machine slows all
of them alike; medians count.
"""

import argparse
import functools
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

import lln_fairseq
from lln_fairseq.command import run_main
from lln_fairseq.data.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lln_fairseq.data.vocabulary import new_vocabulary
from lln_fairseq.models.presets import PRESETS
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.meter import Spread, device_name, interleaved
from scripts.terminal import aligned, at_least_one, program_parser

SOFTMAX = "softmax"  # the attention of the model that both sides run
WORDS, PIECES, LABELS, POSITIONS = 2000, 1000, ("0", "1"), 512
HEAD = "sentence_classification_head"
BATCHES = (1, 32)  # of the pipeline
LONGEST = 40  # words of a sentence
REPEATS = 7
SINGLE = 20  # sentences, one after the other, whose mean is the time of one
SEED, TOLERANCE = 0, 1e-4  # of probabilities
NOISE = 0.1  # on the initial weights, which would give every text the same probability

Predict = Callable[[list[str]], list[float]]


@dataclass
class Row:
    """Medians with the fastest and slowest repeat: ms for one sentence, sentences a second of many."""

    preset: str
    model: str
    single: Spread
    many: Spread


def sentences(count: int, longest: int) -> list[str]:
    """Of 3 to `longest` words, short and frequent ones before long and rare ones."""
    generator = random.Random(SEED)
    words = ["".join(generator.choices("aeiounrtslcdm", k=2 + number % 9)) for number in range(WORDS)]
    weights = [1 / (number + 1) for number in range(WORDS)]
    return [" ".join(generator.choices(words, weights, k=generator.randint(3, longest))) for _ in range(count)]


def write_data(folder: Path) -> None:
    """What `load` takes from a run: a tokenizer and the dictionaries."""
    model = train_sentencepiece(sentences(2000, LONGEST), PIECES)
    vocabulary = new_vocabulary(SentencePieceTokenizer(model))
    (folder / "spm.model").write_bytes(model)
    for name, text in (("input0", vocabulary.dictionary), ("label", "".join(f"{label} 1\n" for label in LABELS))):
        (folder / name).mkdir()
        (folder / name / "dict.txt").write_text(text, encoding="utf-8")


def write_checkpoint(path: Path, data: Path, preset: str, attention: str) -> None:
    """Write a checkpoint of a classification model with random parameters."""
    from lln_fairseq.models.lln_roberta import SIZE_FIELDS, LLNRobertaModel
    from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionConfig, LLNSentencePredictionTask

    options: dict[str, Any] = {
        "data": str(data),
        "num_classes": len(LABELS),
        "max_positions": POSITIONS,
        "init_token": 0,
        "classification_head_name": HEAD,
        "regression_target": False,
    }
    task = LLNSentencePredictionTask.setup_task(LLNSentencePredictionConfig(**options))
    sizes = {**dict(zip(SIZE_FIELDS, PRESETS[preset], strict=True)), "attention": attention, "max_positions": POSITIONS}
    torch.manual_seed(SEED)
    model = LLNRobertaModel.build_model(OmegaConf.create(sizes), task)
    model.register_classification_head(HEAD, num_classes=len(LABELS))
    for parameter in model.parameters():
        parameter.data += NOISE * torch.randn_like(parameter)
    config = {"model": {"_name": "lln_roberta", **sizes}, "task": {"_name": "lln_sentence_prediction", **options}}
    training = {"optimizer_history": [{"num_updates": 0, "optimizer_name": "", "lr_scheduler_state": {}}],
                "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}}}  # fmt: skip
    torch.save({"args": None, "cfg": config, "model": model.state_dict(), **training}, path)


def ours(checkpoint: Path, data: Path) -> Predict:
    """The probability of the second class."""
    model = lln_fairseq.load(checkpoint, data)
    return lambda texts: [_second(one.label, one.probability) for one in model.predict(texts)]


def theirs(folder: Path, batch: int) -> Predict:
    import transformers

    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline = transformers.pipeline("text-classification", model=str(folder), device=device)
    return lambda texts: [_second(one["label"], one["score"]) for one in pipeline(texts, batch_size=batch)]


def _second(label: str, probability: float) -> float:
    return probability if label == LABELS[1] else 1 - probability


def check(ours: Predict, theirs: Predict, texts: list[str]) -> None:
    """Raises: RuntimeError where the two give other probabilities, or the same to every text."""
    a, b = (torch.tensor(predict(texts)) for predict in (ours, theirs))
    off, spread = (a - b).abs().max().item(), a.std().item()
    if not off <= TOLERANCE < spread:
        raise RuntimeError(f"predict and the pipeline differ by {off:.1e} in probabilities that spread by {spread:.1e}")


def variants(preset: str, folder: Path, data: Path) -> dict[str, Predict]:
    from lln_fairseq.conversion.export import export

    found: dict[str, Predict] = {}
    for attention in (SOFTMAX, "lln_diag"):
        checkpoint = folder / f"{preset}_{attention}.pt"
        write_checkpoint(checkpoint, data, preset, attention)
        found[f"predict, {attention}"] = ours(checkpoint, data)
    export(folder / f"{preset}_{SOFTMAX}.pt", folder / f"{preset}_hf", data)
    for batch in BATCHES:
        found[f"pipeline, batches of {batch}"] = theirs(folder / f"{preset}_hf", batch)
    return found


def measure(preset: str, folder: Path, data: Path, args: argparse.Namespace) -> list[Row]:
    texts, predicts = sentences(args.sentences, LONGEST), variants(preset, folder, data)
    for name, predict in predicts.items():
        if name.startswith("pipeline"):
            check(predicts[f"predict, {SOFTMAX}"], predict, texts[:SINGLE])
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, predict in predicts.items():
        runs[name, "single"] = functools.partial(one_by_one, predict, texts[:SINGLE])
        runs[name, "many"] = functools.partial(predict, texts)
    times = interleaved(runs, "cpu", REPEATS)  # all of them end with numbers on the CPU
    rows = []
    for name in predicts:
        single = Spread.of([passed / len(texts[:SINGLE]) for passed in times[name, "single"]])
        many = Spread.of([1e3 * len(texts) / passed for passed in times[name, "many"]])
        rows.append(Row(preset, name, single, many))
    return rows


def one_by_one(predict: Predict, texts: list[str]) -> None:
    for text in texts:
        predict([text])


def table(rows: list[Row], sentences: int) -> str:
    cells = [("preset", "model", "one sentence [ms]", f"{sentences} sentences [1/s]")]
    cells += [(row.preset, row.model, row.single.text(), row.many.text(0)) for row in rows]
    return aligned(cells)


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.benchmarks.prediction", __doc__)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["tiny", "small"])
    parser.add_argument("--sentences", type=at_least_one, default=1000)
    parser.add_argument("--threads", type=at_least_one, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    lln_fairseq.register()  # before fairseq is imported, which configures the root logger
    disable_malloc_trim()
    torch.set_num_threads(args.threads)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder, data = Path(place), Path(place, "data")
        data.mkdir()
        write_data(data)
        for preset in args.presets:
            rows += measure(preset, folder, data, args)
            print(f"{preset} done", file=sys.stderr)
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{device}, torch {torch.__version__}, sentences of 3 to {LONGEST} words\n{table(rows, args.sentences)}")


if __name__ == "__main__":
    sys.exit(main())
