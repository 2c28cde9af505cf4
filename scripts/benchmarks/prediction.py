"""Time loaded models in inference, compared with transformers and onnxruntime.

    python -m scripts.benchmarks.prediction --presets tiny small --threads 1
    python -m scripts.benchmarks.prediction --presets minilm --lengths 16 64 128 512 2048 --threads 1

Without --lengths, `predict` gets one sentence and many, as does a pipeline of transformers. With --lengths, the models
get token ids, first a single sequence of each length, and then many sequences of mixed lengths, which are padded in
batches. There, transformers uses torch's fused softmax attention (sdpa), and onnxruntime, if it is installed, runs the
exported models.

The models have random weights and two classes, the sentences are random words, and nothing is downloaded. The
text-classification pipeline runs the same softmax model, exported for Hugging Face. Both map text to labels and
probabilities, which are compared before anything is timed: a difference raises RuntimeError. All variants are timed in
turn, repeat by repeat, so that a noisy machine slows all of them alike, and times are medians.
"""

import argparse
import functools
import importlib.util
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

import lln_fairseq
from lln_fairseq.command import run_main
from lln_fairseq.data.special_symbols import BOS, EOS, NUM_SPECIAL, PAD
from lln_fairseq.data.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lln_fairseq.data.vocabulary import new_vocabulary
from lln_fairseq.models.presets import PRESETS
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.meter import Spread, device_name, interleaved
from scripts.terminal import aligned, at_least_one, program_parser

SIZES = {**PRESETS, "minilm": (6, 384, 1536, 12)}  # minilm: the sizes of all-MiniLM-L6-v2
SOFTMAX = "softmax"  # the attention of the model that `predict` and the pipeline both run
LINEAR = "lln_diag"
SDPA = "transformers, sdpa"
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

MIXED_SEQUENCES = 64  # number of sequences of mixed lengths
MIXED_BATCH = 16  # sequences in a batch that is padded without regard to lengths
MIXED_LENGTHS = (8, 512)  # the shortest and the longest sequence; lengths are uniform on a logarithmic scale

Predict = Callable[[list[str]], list[float]]  # maps texts to their probabilities of the second class
Logits = Callable[[Tensor], Tensor]  # maps tokens (B, N) to the logits (B, classes) on the CPU


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


def write_checkpoint(path: Path, data: Path, preset: str, attention: str, max_positions: int = MAX_POSITIONS) -> None:
    """Write a checkpoint of a classification model with random parameters."""
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
    sizes: dict[str, Any] = dict(zip(SIZE_FIELDS, SIZES[preset], strict=True))
    sizes |= {"attention": attention, "max_positions": max_positions}
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
    for attention in (SOFTMAX, LINEAR):
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


def checkpoint_logits(checkpoint: Path, data: Path) -> Logits:
    """Load a checkpoint, and return the function from tokens to logits behind `predict`."""
    model = lln_fairseq.load(checkpoint, data)
    return lambda tokens: model._class_logits(tokens.to(model._device)).cpu()


def transformers_logits(directory: Path) -> Logits:
    """Load an exported softmax model with torch's fused attention, and return its function from tokens to logits."""
    import transformers

    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model_class = transformers.AutoModelForSequenceClassification
    model = model_class.from_pretrained(directory, attn_implementation="sdpa").eval().to(device)

    @torch.no_grad()
    def logits(tokens: Tensor) -> Tensor:
        tokens = tokens.to(device)
        return model(input_ids=tokens, attention_mask=tokens.ne(PAD).long()).logits.cpu()

    return logits


def onnx_logits(path: Path, threads: int) -> Logits:
    """Load an exported model.onnx, and return its function from tokens to logits, which uses the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def logits(tokens: Tensor) -> Tensor:
        inputs = {"input_ids": tokens.numpy(), "attention_mask": tokens.ne(PAD).long().numpy()}
        return torch.from_numpy(session.run(None, inputs)[0])

    return logits


def build_logits(preset: str, directory: Path, data: Path, max_positions: int, threads: int) -> dict[str, Logits]:
    """Write the checkpoints and the exported models to the directory, and return the models to time, by name."""
    from lln_fairseq.conversion.export import export

    with_onnx = all(importlib.util.find_spec(name) for name in ("onnxruntime", "onnxscript"))
    models: dict[str, Logits] = {}
    for attention in (SOFTMAX, LINEAR):
        checkpoint = directory / f"{preset}_{attention}.pt"
        exported = directory / f"{preset}_{attention}_hf"
        write_checkpoint(checkpoint, data, preset, attention, max_positions)
        export(checkpoint, exported, data, onnx=with_onnx)
        models[attention] = checkpoint_logits(checkpoint, data)
        if attention == SOFTMAX:
            models[SDPA] = transformers_logits(exported)
        if with_onnx:
            models[f"onnxruntime, {attention}"] = onnx_logits(exported / "model.onnx", threads)
    return models


def random_tokens(length: int) -> Tensor:
    """Return a sequence of random token ids (length), always the same for a length."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(NUM_SPECIAL, NUM_PIECES, (length,), generator=generator)
    tokens[0] = BOS
    tokens[-1] = EOS
    return tokens


def check_same_logits(models: dict[str, Logits], tokens: Tensor) -> None:
    """Raise RuntimeError if transformers or onnxruntime does not give the logits of the same model here."""
    for name, model in models.items():
        own = models[LINEAR if LINEAR in name else SOFTMAX](tokens)
        difference = (model(tokens) - own).abs().max().item()
        if not difference <= TOLERANCE * max(own.abs().max().item(), 1):
            raise RuntimeError(f"{name} and the loaded model differ by {difference:.1e} in logits")


def lengths_table(models: dict[str, Logits], lengths: list[int], repeats: int) -> str:
    """Time every model on a single sequence of each length, and return the results as a table.

    The last column is the median of the quotients of times that were measured one after the other.
    """
    cells = [("model", "tokens", "median [ms]", "fastest [ms]", "times as fast as sdpa")]
    for length in lengths:
        tokens = random_tokens(length)[None]
        check_same_logits(models, tokens)
        times = interleaved({name: functools.partial(model, tokens) for name, model in models.items()}, "cpu", repeats)
        for name, passed in times.items():
            quotients = [softmax / own for softmax, own in zip(times[SDPA], passed, strict=False)]
            spread = Spread.of(passed)
            speed = f"{statistics.median(quotients):.2f}"
            cells.append((name, str(length), f"{spread.median:.2f}", f"{spread.low:.2f}", speed))
    return aligned(cells)


def mixed_lengths() -> list[int]:
    """Return MIXED_SEQUENCES lengths, uniform on a logarithmic scale, in random order, always the same."""
    generator = random.Random(SEED)
    shortest, longest = MIXED_LENGTHS
    return [round(shortest * (longest / shortest) ** generator.random()) for _ in range(MIXED_SEQUENCES)]


def mixed_table(models: dict[str, Logits], repeats: int) -> str:
    """Time every model on sequences of mixed lengths, in batches by length and as they come, and return a table."""
    from fairseq.data.data_utils import collate_tokens

    from lln_fairseq.data.text_ids import batch_by_length

    samples = [random_tokens(length) for length in mixed_lengths()]
    real_tokens = sum(len(sample) for sample in samples)
    numbers = list(range(len(samples)))
    batches_in_order = [numbers[start : start + MIXED_BATCH] for start in range(0, len(samples), MIXED_BATCH)]
    orders = {"by length": list(batch_by_length(samples)), "in order": batches_in_order}
    runs: dict[tuple[str, str], Callable[[], None]] = {}
    padded_tokens = {}
    for order, batches in orders.items():
        inputs = [collate_tokens([samples[number] for number in batch], PAD) for batch in batches]
        padded_tokens[order] = sum(tokens.numel() for tokens in inputs)
        for name, model in models.items():
            runs[name, order] = functools.partial(run_batches, model, inputs)
    times = interleaved(runs, "cpu", repeats)
    cells = [("model", "batches", "padding", "real tokens [1/s]")]
    for (name, order), passed in times.items():
        padding = 1 - real_tokens / padded_tokens[order]
        tokens_per_second = 1e3 * real_tokens / statistics.median(passed)
        cells.append((name, order, f"{padding:.0%}", f"{tokens_per_second:.0f}"))
    return aligned(cells)


def run_batches(model: Logits, batches: list[Tensor]) -> None:
    """Call a model once for each batch of tokens (B, N)."""
    for tokens in batches:
        model(tokens)


def results_table(rows: list[Row], sentences: int) -> str:
    """Return the rows as a table; `sentences` is the number of sentences that were predicted together."""
    cells = [("preset", "model", "one sentence [ms]", f"{sentences} sentences [1/s]")]
    for row in rows:
        cells.append((row.preset, row.model, row.single.text(), row.many.text(0)))
    return aligned(cells)


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.benchmarks.prediction", __doc__)
    parser.add_argument("--presets", nargs="+", choices=SIZES, default=["tiny", "small"])
    parser.add_argument("--sentences", type=at_least_one, default=1000)
    parser.add_argument("--lengths", nargs="+", type=at_least_one, help="time sequences of these numbers of tokens")
    parser.add_argument("--repeats", type=at_least_one, default=30, help="with --lengths; default: %(default)s")
    parser.add_argument("--threads", type=at_least_one, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    """Measure all presets in a temporary directory and print the tables."""
    lln_fairseq.register()  # before fairseq is imported: it configures the root logger
    disable_malloc_trim()
    torch.set_num_threads(args.threads)
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        data = directory / "data"
        data.mkdir()
        write_data(data)
        if args.lengths:
            for preset in args.presets:
                max_positions = max(MAX_POSITIONS, *args.lengths)
                models = build_logits(preset, directory, data, max_positions, args.threads)
                torch.set_num_threads(args.threads)
                print(f"{preset}, {device}, torch {torch.__version__}")
                print(lengths_table(models, args.lengths, args.repeats))
                print(mixed_table(models, REPEATS), flush=True)
            return
        rows = []
        for preset in args.presets:
            rows += measure_preset(preset, directory, data, args)
            print(f"{preset} done", file=sys.stderr)
    table = results_table(rows, args.sentences)
    print(f"{device}, torch {torch.__version__}, sentences of 3 to {LONGEST} words\n{table}")


if __name__ == "__main__":
    sys.exit(main())
