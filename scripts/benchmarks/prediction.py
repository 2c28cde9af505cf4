"""Time loaded models in inference, compared with transformers and onnxruntime.

    python -m scripts.benchmarks.prediction --threads 1
    python -m scripts.benchmarks.prediction --threads 1 --without onnxruntime --lengths 564 1024 2140 --first-text 16 \
        --attentions softmax block_diag:block_size=128,global_tokens=first_segment

The models get the token ids of a single sequence of each length, or of a pair with --first-text. The loaded models run
in every precision that is faster than float32 on this processor, transformers with torch's fused softmax attention
(sdpa) in float32 and bfloat16, and the exported models in onnxruntime in float32 and 8 bits, if it is installed.
Attentions that are not the default ones are only loaded; layouts of configs/layout are named like attentions.
onnxruntime holds all attention weights of softmax, which takes more than 10 GB for 8,192 tokens: leave those models out
with --without "onnxruntime, softmax".

The models have random weights and two classes, and nothing is downloaded. All models are timed in turn, repeat by
repeat, so that a noisy machine slows all of them alike, and times are medians.
"""

import argparse
import functools
import importlib.util
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

import lln_fairseq
from lln_fairseq.command import run_main
from lln_fairseq.models.presets import PRESETS
from lln_fairseq.provenance import describe_provenance, write_result
from lln_fairseq.terminal import at_least_one, program_parser, progress_bar, text_table
from lln_fairseq.text.special_symbols import BOS, EOS, NUM_SPECIAL, PAD
from lln_fairseq.text.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lln_fairseq.text.vocabulary import new_vocabulary
from lln_fairseq.timing import interleaved
from lln_fairseq.training.malloc import disable_malloc_trim
from scripts.benchmarks.meter import (
    attention_options,
    device_name,
    model_argument,
    output_file,
)

SIZES = {**PRESETS, "minilm": (6, 384, 1536, 12)}  # minilm: the sizes of all-MiniLM-L6-v2
SOFTMAX = "softmax"
LINEAR = "lln_diag"
SDPA = "transformers, sdpa"
SDPA_BFLOAT16 = f"{SDPA}, bfloat16"
EIGHT_BITS = ", 8 bits"  # ends the names of quantized models
LOW_PRECISIONS = ("bfloat16", "int8")  # of loaded models
ONNX = "onnxruntime"
NUM_WORDS = 2000  # different words in the sentences on which the tokenizer is trained
NUM_PIECES = 1000  # vocabulary size of the tokenizer
LABELS = ("0", "1")
MAX_POSITIONS = 512
HEAD = "sentence_classification_head"
LONGEST = 40  # words of the longest sentence
SEED = 0
NOISE = 0.1  # scale of noise that is added to the weights, without which all texts would get the same logits

Logits = Callable[[Tensor], Tensor]  # maps tokens (B, N) to the logits (B, classes) on the CPU


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
    directory.mkdir()
    (directory / "dict.txt").write_text(text, encoding="utf-8")


def write_checkpoint(path: Path, data: Path, preset: str, attention: str, max_positions: int) -> None:
    """Write a checkpoint of a classification model with random parameters. attention_options explains `attention`."""
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
    sizes |= attention_options(attention) | {"max_positions": max_positions}
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


def load_checkpoint_models(checkpoint: Path, data: Path, attention: str) -> dict[str, Logits]:
    """Load a checkpoint in every precision that is used here, and return the functions from tokens to logits.

    The keys are the names of the models. A precision in which the model cannot be computed faster is left out.
    """
    models: dict[str, Logits] = {}
    for precision in ("float32", *LOW_PRECISIONS):
        model = lln_fairseq.load(checkpoint, data, precision=precision, device="cpu")
        if model.precision == precision:
            name = attention if precision == "float32" else f"{attention}, {precision}"
            models[name] = functools.partial(loaded_logits, model)
    return models


def loaded_logits(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits (B, classes) of a loaded model for tokens (B, N), on the CPU."""
    return model._class_logits(tokens.to(model._device)).cpu()


def tokens_to_logits(run: Callable[[dict[str, Tensor]], Tensor], tokens: Tensor) -> Tensor:
    """Return the logits (B, classes) of a model in another runtime for tokens (B, N), padded with PAD."""
    return run({"input_ids": tokens, "attention_mask": tokens.ne(PAD).long()})


def build_models(directory: Path, data: Path, max_positions: int, args: argparse.Namespace) -> dict[str, Logits]:
    """Write the checkpoints and the exported models to the directory, and return the models to time, by name.

    The models of onnxruntime are not written if --without names all of them.
    """
    from lln_fairseq.conversion.export import export
    from lln_fairseq.inference.runtimes import load_onnx, load_transformers

    has_onnx = all(importlib.util.find_spec(name) for name in ("onnxruntime", "onnxscript"))
    with_onnx = has_onnx and ONNX not in args.without
    models: dict[str, Logits] = {}
    for number, attention in enumerate(args.attentions):
        checkpoint = directory / f"{number}.pt"
        write_checkpoint(checkpoint, data, args.preset, attention, max_positions)
        if attention not in (SOFTMAX, LINEAR):
            models |= load_checkpoint_models(checkpoint, data, attention)
            continue
        exported = directory / f"{attention}_hf"
        export(checkpoint, exported, data, onnx=with_onnx, int8=with_onnx)
        if attention == SOFTMAX:
            for name, dtype in ((SDPA, torch.float32), (SDPA_BFLOAT16, torch.bfloat16)):
                run = load_transformers(exported, dtype, "cpu", attn_implementation="sdpa")
                models[name] = functools.partial(tokens_to_logits, run)
        models |= load_checkpoint_models(checkpoint, data, attention)
        if with_onnx:
            for ending, file in (("", "onnx/model.onnx"), (EIGHT_BITS, "onnx/model_quantized.onnx")):
                run = load_onnx(exported / file, args.threads)
                models[f"{ONNX}, {attention}{ending}"] = functools.partial(tokens_to_logits, run)
    return {name: model for name, model in models.items() if not name.startswith(tuple(args.without))}


def random_tokens(length: int, first_text: int | None = None) -> Tensor:
    """Return random token ids (length), always the same for a length: a sequence, or a pair of texts.

    The first text of a pair has `first_text` tokens, <s> and </s> included, which a second </s> follows.
    """
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(NUM_SPECIAL, NUM_PIECES, (length,), generator=generator)
    tokens[0] = BOS
    if first_text is not None:
        tokens[first_text - 1 : first_text + 1] = EOS
    tokens[-1] = EOS
    return tokens


def time_lengths(
    models: dict[str, Logits], lengths: list[int], first_text: int | None, repeats: int
) -> dict[int, dict[str, list[float]]]:
    """Return the times in ms of every model on a single sequence of each length, by the length and the model."""
    times = {}
    with progress_bar("timing", len(lengths), "length") as bar:
        for length in lengths:
            tokens = random_tokens(length, first_text)[None]
            runs = {name: functools.partial(model, tokens) for name, model in models.items()}
            times[length] = interleaved(runs, "cpu", repeats)
            bar.update()
    return times


def lengths_table(times: dict[int, dict[str, list[float]]]) -> str:
    """Return the times as a table.

    A cell has the median time in milliseconds and, in brackets, how many times as fast as SDPA the model is: the median
    of the quotients of times that were measured one after the other.
    """
    rows: dict[str, list[str]] = {}
    for of_length in times.values():
        for name, passed in of_length.items():
            quotients = [softmax / own for softmax, own in zip(of_length[SDPA], passed, strict=False)]
            median = statistics.median(passed)
            digits = 1 if median < 100 else 0
            cell = f"{median:.{digits}f} ({statistics.median(quotients):.2f})"
            rows.setdefault(name, [name]).append(cell)
    header = ["milliseconds (times as fast as sdpa)", *(f"{length} tokens" for length in times)]
    return text_table([header, *rows.values()])


def medians(times: dict[int, dict[str, list[float]]]) -> dict[int, dict[str, float]]:
    rounded = {}
    for length, of_length in times.items():
        rounded[length] = {name: round(statistics.median(passed), 1) for name, passed in of_length.items()}
    return rounded


def main(argv: list[str] | None = None) -> int:
    parser = program_parser("python -m scripts.benchmarks.prediction", __doc__)
    parser.add_argument("--preset", choices=SIZES, default="minilm")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=at_least_one,
        default=[16, 64, 128, 512, 2048],
        help="numbers of tokens of the single sequences (default: %(default)s)",
    )
    parser.add_argument(
        "--attentions",
        nargs="+",
        type=model_argument,
        default=[SOFTMAX, LINEAR],
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"attentions of the loaded models, {SOFTMAX} among them (default: %(default)s)",
    )
    parser.add_argument(
        "--first-text", type=int, metavar="N", help="time pairs of texts, the first of which has N tokens"
    )
    parser.add_argument("--repeats", type=at_least_one, default=9, help="(default: %(default)s)")
    parser.add_argument("--threads", type=at_least_one, default=torch.get_num_threads())
    parser.add_argument(
        "--without",
        nargs="+",
        choices=[ONNX, f"{ONNX}, {SOFTMAX}", SDPA_BFLOAT16],
        default=[],
        help="leave out the models whose names start so",
    )
    parser.add_argument("--json", type=output_file, help="write the medians of the single sequences to this file")
    args = parser.parse_args(argv)
    if SOFTMAX not in args.attentions:
        parser.error(f"--attentions needs {SOFTMAX}, with which the others are compared")
    if args.first_text is not None and not 2 <= args.first_text <= min(args.lengths) - 2:
        parser.error("--first-text must be at least 2, and leave room for a second text in the shortest of --lengths")
    return run_main(lambda: benchmark(args))


def benchmark(args: argparse.Namespace) -> None:
    """Measure the models in a temporary directory, print the tables, and write the file of --json."""
    logging.disable(logging.INFO)  # warnings say which precisions are not used
    lln_fairseq.register()  # before fairseq is imported: it configures the root logger
    disable_malloc_trim()
    torch.set_num_threads(args.threads)
    provenance = describe_provenance()
    instructions = " ".join(provenance["instructions"]) or "unknown instructions"
    heading = f"{device_name('cpu')}, {instructions}, torch {torch.__version__}"
    max_positions = max(MAX_POSITIONS, *args.lengths)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        data = directory / "data"
        data.mkdir()
        write_data(data)
        models = build_models(directory, data, max_positions, args)
        torch.set_num_threads(args.threads)
        print(f"{args.preset}, {heading}")
        times = time_lengths(models, args.lengths, args.first_text, args.repeats)
        print(lengths_table(times), flush=True)
    if args.json:
        content = {"preset": args.preset, "first_text": args.first_text, "milliseconds": medians(times)}
        write_result(args.json, content, provenance)


if __name__ == "__main__":
    sys.exit(main())
