"""Time `predict` of a loaded model on one sentence and on many, compared with a pipeline of transformers.

    python -m scripts.benchmarks.prediction --presets tiny small --threads 1
    python -m scripts.benchmarks.prediction --lengths 128 512 2048 8192 --threads 1

The models have random weights and two classes, the sentences are random words, and nothing is downloaded. The
text-classification pipeline runs the same softmax model, exported for Hugging Face. Both map text to labels and
probabilities, which are compared before anything is timed: a difference raises RuntimeError. All variants are timed in
turn, repeat by repeat, so that a noisy machine slows all of them alike, and times are medians.

With --lengths, a model of the sizes of all-MiniLM-L6-v2 is exported instead, and a single sequence of so many tokens is
classified by this package, by onnxruntime in float and with 8-bit weights, and by transformers with torch's softmax
attention. `export` compares the outputs of all of them. Tokenization is not part of these times.
"""

import argparse
import functools
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

import lln_fairseq
from lln_fairseq.command import run_main
from lln_fairseq.data.special_symbols import BOS, EOS, NUM_SPECIAL
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
MINILM = (6, 384, 1536, 12)  # the sizes of all-MiniLM-L6-v2, in the form of a preset
TRANSFORMERS = "transformers, softmax (sdpa)"  # the row whose times are divided by those of the others
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


def write_checkpoint(
    path: Path, data: Path, sizes: Sequence[int], attention: str, max_positions: int = MAX_POSITIONS
) -> None:
    """Write a checkpoint of a classification model with random parameters; `sizes` is a value of PRESETS."""
    from lln_fairseq.models.lln_roberta import SIZE_FIELDS, LLNRobertaModel
    from lln_fairseq.tasks.sentence_prediction import LLNSentencePredictionConfig, LLNSentencePredictionTask

    options: dict[str, Any] = {
        "data": str(data),
        "num_classes": len(LABELS),
        "max_positions": max_positions,
        "init_token": 0,
        "classification_head_name": HEAD,
        "regression_target": False,
    }
    task = LLNSentencePredictionTask.setup_task(LLNSentencePredictionConfig(**options))
    model_options: dict[str, Any] = dict(zip(SIZE_FIELDS, sizes, strict=True))
    model_options |= {"attention": attention, "max_positions": max_positions}
    torch.manual_seed(SEED)
    model = LLNRobertaModel.build_model(OmegaConf.create(model_options), task)
    model.register_classification_head(HEAD, num_classes=len(LABELS))
    for parameter in model.parameters():
        parameter.data += NOISE * torch.randn_like(parameter)
    checkpoint = {
        "args": None,
        "cfg": {
            "model": {"_name": "lln_roberta", **model_options},
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
        write_checkpoint(checkpoint, data, PRESETS[preset], attention)
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


def build_classifiers(
    directory: Path, data: Path, sizes: Sequence[int], longest: int
) -> dict[str, Callable[[Tensor], object]]:
    """Write and export a softmax and a linear model, and return functions of tokens (1, N) that compute logits."""
    from transformers import AutoModelForSequenceClassification

    from lln_fairseq.conversion.export import export
    from lln_fairseq.conversion.onnx_int8 import QUANTIZED_FILE
    from lln_fairseq.conversion.to_onnx import FILE, open_session, run_session
    from lln_fairseq.inference.loading import load_model

    classifiers: dict[str, Callable[[Tensor], object]] = {}
    for attention in (SOFTMAX, "lln_diag"):
        checkpoint = directory / f"{attention}.pt"
        exported = directory / attention
        write_checkpoint(checkpoint, data, sizes, attention, longest)
        export(checkpoint, exported, data, int8=True)
        if attention == SOFTMAX:
            model = AutoModelForSequenceClassification.from_pretrained(exported, attn_implementation="sdpa").eval()
            classifiers[TRANSFORMERS] = model
        else:
            model, _ = load_model(str(checkpoint), str(data))
            options = {"features_only": True, "classification_head_name": HEAD}
            classifiers[f"lln_fairseq, {attention}"] = functools.partial(model.float(), **options)
        for file, dtype in ((FILE, "float32"), (QUANTIZED_FILE, "int8")):
            session = open_session(exported / file)
            classifiers[f"onnxruntime, {attention}, {dtype}"] = functools.partial(run_session, session)
    return classifiers


def measure_lengths(directory: Path, data: Path, sizes: Sequence[int], lengths: Sequence[int]) -> str:
    """Time one sequence of every length, and return the table of ms and of speedups over transformers."""
    classifiers = build_classifiers(directory, data, sizes, max(lengths))
    generator = torch.Generator().manual_seed(SEED)
    runs: dict[tuple[str, int], Callable[[], object]] = {}
    for length in lengths:
        tokens = torch.randint(NUM_SPECIAL, NUM_PIECES // 2, (1, length), generator=generator)
        tokens[:, 0] = BOS
        tokens[:, -1] = EOS
        for name, classify in classifiers.items():
            runs[name, length] = functools.partial(classify, tokens)
    with torch.no_grad():
        times = interleaved(runs, "cpu", REPEATS)
    cells = [("one sequence: ms (speedup)", *(f"{length} tokens" for length in lengths))]
    for name in classifiers:
        row = [name]
        for length in lengths:
            passed = statistics.median(times[name, length])
            speedup = statistics.median(times[TRANSFORMERS, length]) / passed
            row.append(f"{passed:.1f} ({speedup:.2f})")
        cells.append(tuple(row))
    return aligned(cells)


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
    parser.add_argument(
        "--lengths", nargs="+", type=at_least_one, metavar="N", help="time exported models on one sequence of N tokens"
    )
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
        if args.lengths:
            table = measure_lengths(directory, data, MINILM, args.lengths)
            print(f"{device_name('cpu')}, torch {torch.__version__}\n{table}")
            return
        for preset in args.presets:
            rows += measure_preset(preset, directory, data, args)
            print(f"{preset} done", file=sys.stderr)
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    table = results_table(rows, args.sentences)
    print(f"{device}, torch {torch.__version__}, sentences of 3 to {LONGEST} words\n{table}")


if __name__ == "__main__":
    sys.exit(main())
