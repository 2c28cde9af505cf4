"""Write onnx/model_quantized.onnx, with 8-bit weights, next to model.onnx.

Only products with weight matrices are quantized. Weights are quantized ahead of time, with one scale per output
feature, and activations at run time. Everything else stays in float32: embeddings, attention, layer norms, the
classifier, and the output matrix of a language model. Attention stays in float32 because its long sums would lose
precision.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lln_fairseq.conversion import to_onnx
from lln_fairseq.conversion.directory import write_large
from lln_fairseq.conversion.silence import silence
from lln_fairseq.errors import UserError
from lln_fairseq.text.special_symbols import PAD

# The name that optimum gives to its quantized models, and that Transformers.js loads as dtype "q8". The names of
# sentence-transformers, such as model_qint8_avx512_vnni.onnx, state an instruction set, and this file runs on all.
QUANTIZED_FILE = "onnx/model_quantized.onnx"


def write_int8(directory: Path, config: Mapping[str, Any]) -> None:
    """Add onnx/model_quantized.onnx to a directory with onnx/model.onnx; `config` is the content of its config.json.

    UserError is raised if the file cannot be written, or gives outputs that are not finite.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source = directory / to_onnx.FILE
    target = directory / QUANTIZED_FILE
    graph = onnx.load(source, load_external_data=False).graph
    weights = {weight.name for weight in graph.initializer}
    products = [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    is_large = any(weight.data_location == onnx.TensorProto.EXTERNAL for weight in graph.initializer)

    def write(path: Path) -> None:
        # With reduce_range the weights have 7 bits. Processors without VNNI instructions add pairs of products of 8-bit
        # numbers in 16 bits, where 8-bit weights can overflow.
        quantize_dynamic(
            source,
            path,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=products,
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=is_large,
        )

    with silence():
        write_large(target, write)
    session = to_onnx.open_session(target)
    for tokens in to_onnx.check_batches(config):
        for name, output in to_onnx.run_session(session, tokens).items():
            if output.dim() == 3:
                output = output[tokens.ne(PAD)]  # the outputs at padding have no meaning
            if not output.isfinite().all():
                raise UserError(f"{name} of {target.name} is not finite: export without --int8")
