"""Time `predict` of a loaded model on one sentence and on many, compared with a pipeline of transformers.

    python -m scripts.benchmarks.prediction --presets tiny small --threads 1

The models have random weights and two classes, the sentences are random words, and nothing is downloaded. The
text-classification pipeline runs the same softmax model, exported for Hugging Face. Both map text to labels and
probabilities, which are compared before anything is timed: a difference raises RuntimeError. All variants are timed in
turn, repeat by repeat, so that a noisy machine slows all of them alike, and times are medians.
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

SOFTMAX = "softmax"  # the attention of the model that `predict` and the pipeline both run
NUM_WORDS = 2000  # different words in the sentences
NUM_PIECES = 1000  # vocabulary size of the tokenizer
LABELS = ("0", "1")
MAX_POSITIONS = 512
HEAD = "sentence_classification_head"
BATCHES = (1, 32)  # batch sizes of the pipeline
LONGEST = 40  # words of the longest sentence
REPEATS = 7
NUM_SINGLE = 20  # sentences that are predicted one by one; their mean is the time of one sentence
SEED = 0
TOLERANCE = 1e-4  # largest difference of probabilities
NOISE = 0.1  # scale of noise that is added to the weights, without which all texts would get the same probability

Predict = Callable[[list[str]], list[float]]  # maps texts to their probabilities of the second class


@dataclass
class Row:
    """The results of one model: ms for a single sentence, and sentences per second for many at once."""

    preset: str
    model: str
    single: Spread
    many: Spread


def random_sentences(count: int, longest: int) -> list[str]:
    """Return sentences of 3 to `longest` words, always the same; short words are more frequent than long ones."""
    generator = random.Random(SEED)
    words = ["".join(generator.choices("aeiounrtslcdm", k=2 + number % 9)) for number in range(NUM_WORDS)]
    weights = [1 / (number + 1) for number in range(NUM_WORDS)]
    return [" ".join(generator.choices(words, weights, k=generator.randint(3, longest))) for _ in range(count)]


def write_data(directory: Path) -> None:
    """Write what `lln_fairseq.load` needs from a data directory: a tokenizer and the dictionaries."""
    model = train_sentencepiece(random_sentences(2000, LONGEST), NUM_PIECES)
    vocabulary = new_vocabulary(SentencePieceTokenizer(model))
    (directory / "spm.model").write_bytes(model)
    write_dictionary(directory / "input0", vocabulary.dictionary)
    write_dictionary(directory / "label", "".join(f"{label} 1\n" for label in LABELS))


def write_dictionary(directory: Path, text: str) -> None:
    """Create the directory, which must not exist, and write `text` as its dict.txt. The parent must exist."""
    directory.mkdir()
    (directory / "dict.txt").write_text(text, encoding="utf-8")


def write_checkpoint(path: Path, data: Path, preset: str, attention: str) -> None:
    """Write a checkpoint of a classification model with random parameters."""
    from lln_fairseq.models.lln_roberta import SIZE_FIELDS, LLNRobertaModel
    from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionConfig, LLNSentencePredictionTask

    options: dict[str, Any] = {
        "data": str(data),
        "num_classes": len(LABELS),
        "max_positions": MAX_POSITIONS,
        "init_token": 0,
        "classification_head_name": HEAD,
        "regression_target": False,
    }
    task = LLNSentencePredictionTask.setup_task(LLNSentencePredictionConfig(**options))
    sizes: dict[str, Any] = dict(zip(SIZE_FIELDS, PRESETS[preset], strict=True))
    sizes |= {"attention": attention, "max_positions": MAX_POSITIONS}
    torch.manual_seed(SEED)
    model = LLNRobertaModel.build_model(OmegaConf.create(sizes), task)
    model.register_classification_head(HEAD, num_classes=len(LABELS))
    for parameter in model.parameters():
        parameter.data += NOISE * torch.randn_like(parameter)
    checkpoint = {
        "args": None,
        "cfg": {
            "model": {"_name": "lln_roberta", **sizes},
            "task": {"_name": "lln_sentence_prediction", **options},
        },
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": 0, "optimizer_name": "", "lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }
    torch.save(checkpoint, path)


def checkpoint_predict(checkpoint: Path, data: Path) -> Predict:
    """Load a checkpoint, and return its `predict` as a function from texts to probabilities of the second class."""
    model = lln_fairseq.load(checkpoint, data)
    return lambda texts: [_probability_of_second(one.label, one.probability) for one in model.predict(texts)]


def pipeline_predict(directory: Path, batch_size: int) -> Predict:
    """Load an exported model, and return its pipeline as a function from texts to the same probabilities."""
    import transformers

    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipeline = transformers.pipeline("text-classification", model=str(directory), device=device)

    def predict(texts: list[str]) -> list[float]:
        results = pipeline(texts, batch_size=batch_size)
        return [_probability_of_second(one["label"], one["score"]) for one in results]

    return predict


def _probability_of_second(label: str, probability: float) -> float:
    """Return the probability of the second label from the predicted label and its probability."""
    if label == LABELS[1]:
        return probability
    return 1 - probability


def check_same_predictions(predict: Predict, pipeline: Predict, texts: list[str]) -> None:
    """Raise RuntimeError if two models give different probabilities, or the same probability to all texts."""
    probabilities = torch.tensor(predict(texts))
    difference = (probabilities - torch.tensor(pipeline(texts))).abs().max().item()
    spread = probabilities.std().item()
    if not difference <= TOLERANCE < spread:
        raise RuntimeError(
            f"predict and the pipeline differ by {difference:.1e} in probabilities that spread by {spread:.1e}: "
            f"the difference must be at most {TOLERANCE:.1e}, and the spread larger"
        )


def build_variants(preset: str, directory: Path, data: Path) -> dict[str, Predict]:
    """Write the checkpoints and the exported model to the directory, and return the variants to time, by name."""
    from lln_fairseq.conversion.export import export

    predicts: dict[str, Predict] = {}
    for attention in (SOFTMAX, "lln_diag"):
        checkpoint = directory / f"{preset}_{attention}.pt"
        write_checkpoint(checkpoint, data, preset, attention)
        predicts[f"predict, {attention}"] = checkpoint_predict(checkpoint, data)
    export(directory / f"{preset}_{SOFTMAX}.pt", directory / f"{preset}_hf", data)
    for batch_size in BATCHES:
        predicts[f"pipeline, batches of {batch_size}"] = pipeline_predict(directory / f"{preset}_hf", batch_size)
    return predicts


def measure_preset(preset: str, directory: Path, data: Path, args: argparse.Namespace) -> list[Row]:
    """Time all variants of a preset and return a row for each."""
    texts = random_sentences(args.sentences, LONGEST)
    single_texts = texts[:NUM_SINGLE]
    predicts = build_variants(preset, directory, data)
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, predict in predicts.items():
        if name.startswith("pipeline"):
            check_same_predictions(predicts[f"predict, {SOFTMAX}"], predict, single_texts)
        runs[name, "single"] = functools.partial(predict_one_by_one, predict, single_texts)
        runs[name, "many"] = functools.partial(predict, texts)
    times = interleaved(runs, "cpu", REPEATS)  # even on a GPU: every run ends with numbers on the CPU
    rows = []
    for name in predicts:
        single = Spread.of([passed / len(single_texts) for passed in times[name, "single"]])
        many = Spread.of([1e3 * len(texts) / passed for passed in times[name, "many"]])
        rows.append(Row(preset, name, single, many))
    return rows


def predict_one_by_one(predict: Predict, texts: list[str]) -> None:
    """Call `predict` once for each text."""
    for text in texts:
        predict([text])


def results_table(rows: list[Row], sentences: int) -> str:
    """Return the rows as a table; `sentences` is the number of sentences that were predicted together."""
    cells = [("preset", "model", "one sentence [ms]", f"{sentences} sentences [1/s]")]
    for row in rows:
        cells.append((row.preset, row.model, row.single.text(), row.many.text(0)))
    return aligned(cells)


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.benchmarks.prediction", __doc__)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["tiny", "small"])
    parser.add_argument("--sentences", type=at_least_one, default=1000)
    parser.add_argument("--threads", type=at_least_one, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    """Measure all presets in a temporary directory and print the table."""
    lln_fairseq.register()  # before fairseq is imported: it configures the root logger
    disable_malloc_trim()
    torch.set_num_threads(args.threads)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        data = directory / "data"
        data.mkdir()
        write_data(data)
        for preset in args.presets:
            rows += measure_preset(preset, directory, data, args)
            print(f"{preset} done", file=sys.stderr)
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    table = results_table(rows, args.sentences)
    print(f"{device}, torch {torch.__version__}, sentences of 3 to {LONGEST} words\n{table}")


if __name__ == "__main__":
    sys.exit(main())
