"""model.onnx of an exported model: plain operations of ONNX, any number of sequences, any length.

    input_ids (B, N) int64, attention_mask (B, N) int64, 0 = padding -> logits (B, N, V), of a classifier (B, classes)

The file is written only if onnxruntime gives the model's own logits with it. transformers is what it is traced through.
"""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lln_fairseq.conversion.directory import write_large
from lln_fairseq.conversion.encoder import OFFSET
from lln_fairseq.data.special_symbols import BOS, NUM_SPECIAL, PAD
from lln_fairseq.errors import InputError, first_line

FILE = "model.onnx"
NAMES = ("input_ids", "attention_mask")
PACKAGES = ("transformers", "onnxscript", "onnxruntime")
TOLERANCE = 1e-4  # the largest error in logits, relative to the largest logit
ONE_FILE = 1.9e9  # bytes; a protobuf holds 2 GiB, larger weights go into model.onnx.data


class Logits(nn.Module):
    """A model of transformers with two inputs and one output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, N), (B, N) -> logits"""
        return self.model(input_ids, attention_mask=attention_mask).logits


def check_packages() -> None:
    """Raises: InputError where one is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"--onnx needs {', '.join(missing)}: pip install 'lln-fairseq[onnx]'")


def write(folder: Path, config: Mapping[str, Any], logits: Callable[[Tensor], Tensor]) -> None:
    """Adds model.onnx to a directory that has config.json and model.safetensors.

    `logits`: of tokens (B, N), padded at the right, by the model that was exported.
    Raises: InputError where the model cannot be traced, or onnxruntime gives other logits.
    """
    positions = config["max_position_embeddings"] - OFFSET
    block = config.get("block_size") or config["hidden_size"] // config["num_attention_heads"]
    with _quiet(), _plain_operations() as modeling, torch.no_grad():
        model = _load(modeling, folder, config["architectures"][0])
        tokens = _tokens(2, min(positions, block + 3), config["vocab_size"])  # more than one block, where it may have
        try:
            program = torch.onnx.export(
                Logits(model), (tokens, tokens.ne(PAD).long()), dynamo=True, verbose=False,
                input_names=NAMES, output_names=["logits"], dynamic_shapes=({0: "batch", 1: "length"},) * len(NAMES),
            )  # fmt: skip
        except Exception as error:  # the exporter has dozens of its own
            raise InputError(f"{FILE} cannot be made: {first_line(error)}") from error
        assert program is not None  # as it is where no file is named
        _forget_source(program.model.graph)
        large = sum(x.numel() * x.element_size() for x in model.parameters()) > ONE_FILE
        write_large(folder / FILE, lambda path: program.save(path, external_data=large))
        _check(folder / FILE, _batches(config["vocab_size"], positions, block), logits)


@contextmanager
def _plain_operations() -> Iterator[Any]:
    """The modeling file, whose models do without our kernels meanwhile."""
    from lln_fairseq.conversion import modeling_lln_roberta as modeling

    before, modeling.HAS_KERNELS = modeling.HAS_KERNELS, False
    try:
        yield modeling
    finally:
        modeling.HAS_KERNELS = before


def _load(modeling: Any, folder: Path, architecture: str) -> nn.Module:
    import transformers

    source = modeling if hasattr(modeling, architecture) else transformers
    found = getattr(source, architecture).from_pretrained(folder, attn_implementation="eager", local_files_only=True)
    return found.eval()


def _tokens(sequences: int, length: int, vocabulary: int, padded: bool = False) -> Tensor:
    """Random tokens (B, N); `padded`: every sequence but the first has padding, the last one the most."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(NUM_SPECIAL, vocabulary, (sequences, length), generator=generator)
    tokens[:, 0] = BOS
    for row in range(sequences if padded else 0):
        tokens[row, max(1, length - row * length // sequences) :] = PAD
    return tokens


def _check(path: Path, batches: Iterator[Tensor], logits: Callable[[Tensor], Tensor]) -> None:
    """Raises: InputError where onnxruntime fails, or gives other logits for real tokens."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it logs is in its errors too
    options.intra_op_num_threads = torch.get_num_threads()
    session = None
    for tokens in batches:
        real = tokens.ne(PAD)
        case = f"{len(tokens)} x {tokens.shape[1]} tokens, {'not padded' if real.all() else 'padded'}"
        inputs = {name: x.numpy() for name, x in zip(NAMES, (tokens, real.long()), strict=True)}
        try:
            session = session or onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            found = torch.from_numpy(session.run(["logits"], inputs)[0])
        except Exception as error:  # it has a class for each of its codes, without a common one
            raise InputError(f"onnxruntime fails with {path.name}, {case}: {first_line(error)}") from error
        expected = logits(tokens)
        if expected.dim() == 3:  # of a masked LM, whose logits at padding mean nothing
            found, expected = found[real], expected[real]
        off = ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()
        if not off <= TOLERANCE:
            raise InputError(f"{path.name} gives other logits than the model: relative error {off:.0e}, {case}")


def _batches(vocabulary: int, longest: int, block: int) -> Iterator[Tensor]:
    """Batches (B, N) of other sizes than the traced one, without padding and with it."""
    for sequences, length in ((1, 1), (1, 3 * block), (3, 7), (5, 2 * block + 3)):
        for padded in (False, True):
            yield _tokens(sequences, min(length, longest), vocabulary, padded)


def _forget_source(graph: Any) -> None:
    """Removes what the exporter notes of this machine's source files, which takes more room than a small model."""
    for part in (*graph.all_nodes(), *graph.inputs, *graph.outputs, *graph.initializers.values()):
        part.metadata_props.clear()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on packages that it does not need."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
