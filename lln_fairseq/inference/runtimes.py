"""Load exported models in the runtimes of others, transformers and onnxruntime, to compare times and outputs.

The functions that are returned take the inputs of the model by name: input_ids, attention_mask (0 = padding), and for
BERT token_type_ids, int64 tensors (B, N). They return the output as a float32 tensor on the CPU.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lln_fairseq.errors import UserError, first_line

ONNX_OUTPUTS = ("logits", "sentence_embedding")  # of a classifier, (B, classes), and of an encoder, (B, C)

Run = Callable[[Mapping[str, Tensor]], Tensor]


def load_transformers(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> Run:
    """Load a classifier with transformers, and return the function from its inputs to its logits (B, classes).

    Args:
        directory: a directory with config.json and the weights.
        dtype: of the weights and the computation.
        device: of the model; None takes a GPU if there is one.
        trust_remote_code: run the Python files of the directory. A model that this project exported has such files if
            it is not softmax; `import lln_fairseq.hub` makes them unnecessary.
        attn_implementation: as for transformers; None takes its default.

    Raises:
        UserError: if transformers is missing or cannot load the model.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError("running a model in transformers needs it: pip install 'lln-fairseq[hf]'") from error
    transformers.logging.set_verbosity_error()
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            directory,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"transformers cannot load {directory}: {first_line(error)}") from error
    model.to(target).eval()

    @torch.no_grad()
    def logits(inputs: Mapping[str, Tensor]) -> Tensor:
        moved = {name: values.to(target) for name, values in inputs.items()}
        return model(**moved).logits.float().cpu()

    return logits


def load_onnx(path: Path, threads: int) -> Run:
    """Load an exported ONNX model, and return the function from its inputs to logits or to the vectors of an encoder.

    It uses the CPU. Inputs that the model does not have are left out.

    Args:
        path: the file of the model.
        threads: the number of threads of a call.

    Raises:
        UserError: if onnxruntime is missing, or the model has none of ONNX_OUTPUTS.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError("running a model in ONNX needs onnxruntime: pip install 'lln-fairseq[onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Otherwise its threads go on spinning after a call, and take time from the model that is timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    outputs = [node.name for node in session.get_outputs()]
    output = next((name for name in ONNX_OUTPUTS if name in outputs), None)
    if output is None:
        raise UserError(f"{path} has no output {' or '.join(ONNX_OUTPUTS)}: its outputs are {', '.join(outputs)}")

    def run(inputs: Mapping[str, Tensor]) -> Tensor:
        arrays = {name: inputs[name].numpy() for name in names if name in inputs}
        return torch.from_numpy(session.run([output], arrays)[0]).float()

    return run
