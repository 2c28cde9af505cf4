"""Models as they are served: a directory, the runtime that computes it, and their time and memory."""

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.errors import UserError
from lln_fairseq.inference.runtimes import load_onnx, load_transformers
from lln_fairseq.inference.text_model import TextModel
from lln_fairseq.provenance import describe_provenance
from lln_fairseq.timing import can_measure_resident_peak, milliseconds, resident_peak

TRANSFORMERS = "transformers"
BFLOAT16 = "transformers, bfloat16"
ONNX = "onnxruntime"
ONNX_INT8 = "onnxruntime, 8 bits"
OWN = "lln_fairseq"  # a model that cannot be exported
ONNX_FILES = {ONNX: "onnx/model.onnx", ONNX_INT8: "onnx/model_quantized.onnx"}
REPEATS = 3  # of the calls with each text that are timed

# Maps rows of one or two texts to the logits (rows, classes) or vectors (rows, features), float32 on the CPU.
Outputs = Callable[[Sequence[tuple[str, ...]]], Tensor]


def load_served(directory: Path, runtime: str, longest: int, is_encoder: bool) -> Outputs:
    """Load a directory of Hugging Face in one of the runtimes above except OWN.

    Texts are cut to `longest` tokens as tokenizers do with truncation=True. `is_encoder` is True for sentence vectors.
    """
    from transformers import AutoTokenizer

    logging.getLogger("lln_fairseq.hub").setLevel(logging.ERROR)  # it warns of what is not used here
    import lln_fairseq.hub  # noqa: F401  opens our exports

    dtype = torch.bfloat16 if runtime == BFLOAT16 else torch.float32
    if is_encoder and runtime not in ONNX_FILES:
        return _load_sentence_transformer(directory, dtype, longest)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if runtime in ONNX_FILES:
        compute = load_onnx(directory / ONNX_FILES[runtime], torch.get_num_threads())
    else:
        compute = load_transformers(directory, dtype)

    def outputs(texts: Sequence[tuple[str, ...]]) -> Tensor:
        columns = [list(column) for column in zip(*texts, strict=True)]
        inputs = tokenizer(*columns, truncation=True, max_length=longest, padding=True, return_tensors="pt")
        return compute(dict(inputs))

    return outputs


def _load_sentence_transformer(directory: Path, dtype: torch.dtype, longest: int) -> Outputs:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise UserError("an encoder is compared in sentence-transformers: pip install sentence-transformers") from error
    model = SentenceTransformer(str(directory), model_kwargs={"dtype": dtype}, local_files_only=True)
    model.max_seq_length = longest

    def outputs(texts: Sequence[tuple[str, ...]]) -> Tensor:
        lines = [line for (line,) in texts]
        vectors = model.encode(lines, batch_size=len(lines), convert_to_tensor=True, show_progress_bar=False)
        return vectors.float().cpu()

    return outputs


def own_runtime(model: TextModel) -> Outputs:
    """Return the outputs of a loaded model, for one that cannot be exported."""

    def outputs(texts: Sequence[tuple[str, ...]]) -> Tensor:
        if not model.finetuned:
            vectors = model.encode([line for (line,) in texts])
            assert isinstance(vectors, Tensor)  # and not those of tokens
            return vectors
        rows: Any = model._map_texts(texts, model.inputs, model._class_logits, on_long="truncate")
        return torch.stack([logits for _, logits in rows])

    return outputs


def half_precisions() -> list[str]:
    """Return [BFLOAT16] if this machine has instructions for products of bfloat16, otherwise []."""
    instructions = describe_provenance()["instructions"]
    if torch.cuda.is_available() or {"avx512_bf16", "amx_bf16"} & set(instructions):
        return [BFLOAT16]
    return []


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def time_each(models: Mapping[str, Outputs], batches: Sequence[Sequence[tuple[str, ...]]]) -> dict[str, list[float]]:
    """Return the milliseconds per text of each model for every batch, the median of REPEATS calls, which are in turn.

    Before each of them is one that is not timed: a model that serves alone has its weights in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in models}
    for batch in batches:
        passed: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(REPEATS):
            for name, model in models.items():
                model(batch)
                passed[name].append(milliseconds(partial(model, batch), device()))
        for name, values in passed.items():
            times[name].append(statistics.median(values) / len(batch))
    return times


def memory_of(model: Outputs, batch: Sequence[tuple[str, ...]]) -> float | None:
    """Return the megabytes that the first call of a model takes at its peak, without its weights; None if unknown."""
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(batch)
        return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
    if not can_measure_resident_peak():
        return None
    return round(resident_peak(lambda: partial(model, batch)) / 1e6, 1)


def outputs_for_rows(
    model: Outputs, texts: Sequence[tuple[str, ...]], batch_size: int, advance: Callable[[int], object]
) -> Tensor:
    """Return the outputs for all texts, in their order. `advance` is called with the number of rows of each batch."""
    order = sorted(range(len(texts)), key=lambda number: sum(map(len, texts[number])))
    parts = []
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        parts.append(model([texts[number] for number in numbers]))
        advance(len(numbers))
    return torch.cat(parts)[torch.tensor(order).argsort()]
