"""Write onnx/model.onnx for an exported model, in standard ONNX operations, for batches of any size.

    inputs:  input_ids (B, N) int64, attention_mask (B, N) int64, 0 = padding, which must be at the right;
             B is at least 1, and N is between 1 and the longest sequence of the model;
             token_type_ids (B, N) int64, if the model has an embedding of the second text
    outputs of a classifier: logits (B, classes)
    outputs of a masked language model: logits (B, N, V)
    outputs of an encoder: token_embeddings (B, N, C), sentence_embedding (B, C), last_hidden_state (B, N, C)

The model is traced through transformers, and onnxruntime must reproduce its outputs.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lln_fairseq.checkpoints.pooling import Pooling, pool_hidden_states
from lln_fairseq.conversion.directory import write_large
from lln_fairseq.conversion.silence import silence
from lln_fairseq.conversion.to_hugging_face import longest_exported_sequence
from lln_fairseq.errors import UserError, first_line
from lln_fairseq.text.pairs import second_text
from lln_fairseq.text.special_symbols import BOS, EOS, NUM_SPECIAL, PAD

FILE = "onnx/model.onnx"  # where sentence-transformers, text-embeddings-inference and Transformers.js look for it
LOGITS = "logits"
# The first two outputs of an encoder are those of optimum's export of a sentence-transformers model. The third is the
# first again, under the name that sentence-transformers needs with backend="onnx".
TOKEN_EMBEDDINGS = "token_embeddings"
SENTENCE_EMBEDDING = "sentence_embedding"
LAST_HIDDEN_STATE = "last_hidden_state"
PACKAGES = ("transformers", "onnxscript", "onnxruntime")
LONG = 200  # more tokens than the first segment of a pair can have global tokens
TOLERANCE = 1e-4  # the largest error of an output, relative to its largest number, which counts as MIN_SCALE at least
# A batch of one text can have a single logit near 0. The numbers of a normalized vector are small in every text.
MIN_SCALE = {LOGITS: 1.0, TOKEN_EMBEDDINGS: 1e-12, SENTENCE_EMBEDDING: 1e-12, LAST_HIDDEN_STATE: 1e-12}
ONE_FILE_BYTES = 1.9e9  # weights above this size go into model.onnx.data: a protobuf holds at most 2 GiB


Outputs = dict[str, Tensor]  # the outputs of a model by their names in model.onnx


class LogitsModule(nn.Module):
    """A model of transformers with a head, wrapped to have the inputs and the output of model.onnx."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Compute the logits of tokens (B, N) with a mask (B, N) that is 0 at padding."""
        return self.model(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).logits


class EncoderModule(nn.Module):
    """An encoder of transformers, wrapped to have the inputs and the outputs of model.onnx."""

    def __init__(self, model: nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the hidden states (B, N, C), the vectors (B, C) and a copy of the hidden states.

        The tokens are (B, N), with a mask (B, N) that is 0 at padding.
        """
        outputs = self.model(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        hidden_states = outputs.last_hidden_state
        vectors = pool_hidden_states(hidden_states, attention_mask.bool(), self.pooling)
        return hidden_states, vectors, hidden_states.clone()


def check_packages() -> None:
    """Raise UserError if a package that the ONNX export needs is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--onnx needs {', '.join(missing)}: pip install 'lln-fairseq[onnx]'")
    try:
        importlib.import_module("transformers.models.roberta.modeling_roberta")
    except (ImportError, OSError, RuntimeError) as error:
        advice = ""
        if "torchaudio" in str(error):  # fairseq requires it, and transformers 5 imports it
            advice = ". It does not fit the installed torch and is not needed: pip uninstall torchaudio"
        raise UserError(f"transformers cannot be imported: {first_line(error)}{advice}") from error


def write_onnx(
    directory: Path,
    config: Mapping[str, Any],
    reference: Callable[[Tensor], Outputs],
    pooling: Pooling | None = None,
) -> None:
    """Add onnx/model.onnx, and model.onnx.data for large weights, to a directory with config.json and its weights.

    `reference` is the model that was exported, a function from tokens (B, N), padded at the right, to its outputs.
    `pooling` is None for a model with a head. UserError is raised if the model cannot be traced, or onnxruntime fails
    or its outputs differ. Files that were written then stay in `directory`.
    """
    path = directory / FILE
    path.parent.mkdir()
    with silence(), torch.no_grad():
        model = _load_exported_model(directory, config["architectures"][0])
        module: nn.Module = LogitsModule(model)
        output_names = [LOGITS]
        if pooling is not None:
            module = EncoderModule(model, pooling)
            output_names = [TOKEN_EMBEDDINGS, SENTENCE_EMBEDDING, LAST_HIDDEN_STATE]
        # More than one block, if the model takes so many tokens.
        length = min(longest_exported_sequence(config), _block_size(config) + 3)
        tokens = _random_tokens(2, length, config["vocab_size"])
        inputs = _model_inputs(tokens, config["type_vocab_size"] > 1)
        try:
            program = torch.onnx.export(
                module,
                tuple(inputs.values()),
                dynamo=True,
                verbose=False,
                input_names=list(inputs),
                output_names=output_names,
                dynamic_shapes=({0: "batch", 1: "length"},) * len(inputs),
            )
        except Exception as error:  # the exporter has dozens of exception classes
            raise UserError(f"{path.name} cannot be made: {first_line(error)}") from error
        assert program is not None  # it is None only if the exporter writes a file itself
        _remove_source_locations(program.model.graph)
        _remove_shapes_of_weights(program.model.graph)
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        write_large(path, lambda path: program.save(path, external_data=size > ONE_FILE_BYTES))
        _check_onnx_outputs(path, check_batches(config), reference)


def _load_exported_model(directory: Path, architecture: str) -> nn.Module:
    """Load the exported model in evaluation mode; its class is in the modeling file or else in transformers."""
    import transformers

    from lln_fairseq.conversion import modeling_lln_roberta as modeling

    module: Any = transformers
    if hasattr(modeling, architecture):
        module = modeling
    model_class = getattr(module, architecture)
    model = model_class.from_pretrained(directory, attn_implementation="eager", local_files_only=True)
    return model.eval()


def _model_inputs(tokens: Tensor, has_token_types: bool) -> dict[str, Tensor]:
    """Return the inputs of model.onnx by their names, for tokens (B, N) that are padded at the right."""
    inputs = {"input_ids": tokens, "attention_mask": tokens.ne(PAD).long()}
    if has_token_types:
        inputs["token_type_ids"] = second_text(tokens, EOS, PAD).long()
    return inputs


def _random_tokens(sequences: int, length: int, vocabulary: int, padded: bool = False) -> Tensor:
    """Return random tokens (sequences, length), seeded with the length.

    Row i is a pair, whose first text ends behind (i + 1) / (sequences + 1) of the row, if there is room for it. With
    `padded`, row i ends with i * length // sequences padding tokens, but always has a first token.
    """
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(NUM_SPECIAL, vocabulary, (sequences, length), generator=generator)
    for row in range(sequences):
        end = (row + 1) * length // (sequences + 1)
        tokens[row, end : end + 2] = EOS
    tokens[:, 0] = BOS
    if padded:
        for row in range(sequences):
            real_tokens = max(1, length - row * length // sequences)
            tokens[row, real_tokens:] = PAD
    return tokens


def _check_onnx_outputs(path: Path, batches: Iterator[Tensor], reference: Callable[[Tensor], Outputs]) -> None:
    """Raise UserError if onnxruntime fails on a batch, or an output of a real token is off by more than TOLERANCE."""
    session = None
    for tokens in batches:
        real = tokens.ne(PAD)
        padding = "not padded" if real.all() else "padded"
        batch_name = f"{len(tokens)} x {tokens.shape[1]} tokens, {padding}"
        try:
            if session is None:
                session = open_session(path)
            outputs = run_session(session, tokens)
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise UserError(f"onnxruntime fails with {path.name}, {batch_name}: {first_line(error)}") from error
        for name, expected in reference(tokens).items():
            actual = outputs[name]
            if expected.dim() == 3:  # the outputs at padding have no meaning
                actual = actual[real]
                expected = expected[real]
            scale = expected.abs().max().clamp_min(MIN_SCALE[name])
            error_size = ((actual - expected).abs().max() / scale).item()
            if not error_size <= TOLERANCE:
                raise UserError(
                    f"{path.name} gives other {name} than the model: relative error {error_size:.0e}, {batch_name}"
                )


def open_session(path: Path) -> Any:
    """Return an onnxruntime session on the CPU, with torch's number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # fatal only: its exceptions carry the same messages
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run_session(session: Any, tokens: Tensor) -> Outputs:
    """Return all outputs of a session for tokens (B, N) that are padded at the right."""
    has_token_types = any(item.name == "token_type_ids" for item in session.get_inputs())
    inputs = {name: value.numpy() for name, value in _model_inputs(tokens, has_token_types).items()}
    names = [output.name for output in session.get_outputs()]
    values = [torch.from_numpy(value) for value in session.run(names, inputs)]
    return dict(zip(names, values, strict=True))


def check_batches(config: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield random tokens (B, N) of several sizes, which differ from the traced one, each without and with padding."""
    longest = longest_exported_sequence(config)
    block_size = _block_size(config)
    for sequences, length in ((1, 1), (1, max(3 * block_size, LONG)), (3, 7), (5, 2 * block_size + 3)):
        for padded in (False, True):
            yield _random_tokens(sequences, min(length, longest), config["vocab_size"], padded)


def _block_size(config: Mapping[str, Any]) -> int:
    return config.get("block_size") or config["hidden_size"] // config["num_attention_heads"]


def _remove_source_locations(graph: Any) -> None:
    """Remove the exporter's records of source files, which are larger than a small model and name this machine."""
    for part in (*graph.all_nodes(), *graph.inputs, *graph.outputs, *graph.initializers.values()):
        part.metadata_props.clear()


def _remove_shapes_of_weights(graph: Any) -> None:
    """Remove the types and shapes of the weights from the graph's list of shapes (value_info).

    The tensors state them already. onnxruntime's quantization transposes the weights of a Gemm without changing the
    list, and then finds that both contradict each other.
    """
    for weight in graph.initializers.values():
        weight.type = None
        weight.shape = None
