"""Write model_quantized.onnx next to model.onnx, with 8-bit weights, and compare the outputs of both on texts.

Only products with weight matrices are quantized. Weights are quantized ahead of time, with one scale per output
feature, and activations at run time. Everything else stays in float32: embeddings, attention, layer norms, the
classifier, and the output matrix of a language model. Attention stays in float32 because its long sums would lose
precision.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.conversion import to_onnx
from lln_fairseq.conversion.directory import write_large
from lln_fairseq.conversion.read_tokenizer import TOKENIZER
from lln_fairseq.data.text import read_lines
from lln_fairseq.errors import InputError

# The name that optimum gives to its quantized models, and that Transformers.js loads as dtype "q8". The names of
# sentence-transformers, such as model_qint8_avx512_vnni.onnx, state an instruction set, and this file runs on all.
QUANTIZED_FILE = "model_quantized.onnx"
MAX_TEXTS = 1000  # texts of a file that are compared
TEXTS = (
    "The weather was mild, so we walked along the river until it got dark.",
    "How do I reset the password of my account?",
    "Open the settings, choose Security, and click on the link to set a new password.",
    "The central bank raised interest rates by a quarter of a percentage point on Thursday.",
    "A gripping film with two outstanding leads and an ending that nobody will see coming.",
    "I wanted to like this restaurant, but the soup was cold and the waiter forgot our order twice.",
    "Photosynthesis turns carbon dioxide and water into sugar and oxygen.",
    "What is the capital of Australia?",
    "Canberra was chosen as the capital in 1908 as a compromise between Sydney and Melbourne.",
    "The function returns None if the key is not in the dictionary.",
    "She has played the violin since she was five.",
    "A man is riding a bicycle down a busy street.",
    "Someone is cycling through heavy traffic.",
    "The patient was given 20 mg of the drug twice a day for six weeks.",
    "Not a single ticket was left, although the show would not begin for another three months.",
    "Ok.",
    "The treaty was signed in Lisbon in 2007. It changed how the member states vote, gave the parliament more power, "
    "and for the first time described how a country can leave the union.",
    "Mix the flour with the butter, add two eggs and a pinch of salt, and let the dough rest for an hour.",
    "The team lost its first four matches of the season and then did not lose again until May.",
    "Light from the nearest star other than the Sun takes more than four years to reach us.",
)


def write_int8(directory: Path) -> None:
    """Add model_quantized.onnx to a directory with model.onnx.

    Raises:
        InputError: if onnxruntime cannot quantize the model, or the file cannot be written.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source = directory / to_onnx.FILE
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

    with to_onnx.silence():
        write_large(directory / QUANTIZED_FILE, write)


def read_texts(path: Path) -> list[str]:
    """Return the first MAX_TEXTS lines of a UTF-8 file that are not empty. Raises InputError if there are none."""
    texts = []
    with open(path, "rb") as file:
        for line in read_lines(file, str(path)):
            if line.strip():
                texts.append(line.strip())
            if len(texts) == MAX_TEXTS:
                break
    if not texts:
        raise InputError(f"{path} has no text")
    return texts


def compare_with_float(directory: Path, longest: int, texts: Sequence[str], takes_pairs: bool = False) -> str:
    """Compare model_quantized.onnx with model.onnx on texts, and return the result as a sentence.

    It states the cosine of the sentence vectors of an encoder, how often the most likely label of a classifier or the
    most likely token of a language model is the same, or the difference of the scores of a regression.

    Args:
        directory: the exported model with both files and tokenizer.json.
        longest: the longest sequence of the model, to which texts are cut.
        texts: the texts to compare; a tab separates the two texts of a pair.
        takes_pairs: whether the model takes pairs. A text without a tab is then paired with the next one.

    Raises:
        InputError: if an output of model_quantized.onnx is not finite.
    """
    float_session = to_onnx.open_session(directory / to_onnx.FILE)
    int8_session = to_onnx.open_session(directory / QUANTIZED_FILE)
    cosines: list[float] = []
    score_differences: list[float] = []
    is_same: list[bool] = []
    is_language_model = False
    for tokens in _encode(directory / TOKENIZER, longest, texts, takes_pairs):
        expected = to_onnx.run_session(float_session, tokens)
        actual = to_onnx.run_session(int8_session, tokens)
        for name, output in actual.items():
            if not output.isfinite().all():
                raise InputError(f"{name} of {QUANTIZED_FILE} is not finite: export without --int8")
        if to_onnx.SENTENCE_EMBEDDING in actual:
            vector = actual[to_onnx.SENTENCE_EMBEDDING]
            cosines.append(F.cosine_similarity(vector, expected[to_onnx.SENTENCE_EMBEDDING]).item())
            continue
        actual_logits = actual[to_onnx.LOGITS]
        expected_logits = expected[to_onnx.LOGITS]
        if actual_logits.shape[-1] == 1:
            score_differences.append((actual_logits - expected_logits).abs().item())
            continue
        is_same += actual_logits.argmax(dim=-1).eq(expected_logits.argmax(dim=-1)).flatten().tolist()
        is_language_model = actual_logits.dim() == 3
    if cosines:
        mean = sum(cosines) / len(cosines)
        result = f"cosine with the float vectors of {len(cosines)} texts: mean {mean:.4f}, lowest {min(cosines):.4f}"
    elif score_differences:
        mean = sum(score_differences) / len(score_differences)
        result = f"difference from the float scores of {len(score_differences)} texts: "
        result += f"mean {mean:.4f}, largest {max(score_differences):.4f}"
    elif is_language_model:
        result = f"same most likely token as in float at {sum(is_same)} of {len(is_same)} positions"
    else:
        result = f"same label as in float for {sum(is_same)} of {len(is_same)} texts"
    return f"{QUANTIZED_FILE}: {result}"


def _encode(path: Path, longest: int, texts: Sequence[str], takes_pairs: bool) -> Iterator[Tensor]:
    """Yield the tokens (1, N) of every text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest)
    for number, text in enumerate(texts):
        first, tab, second = text.partition("\t")
        if takes_pairs and not tab:
            second = texts[(number + 1) % len(texts)]
        if takes_pairs or tab:
            encoding = tokenizer.encode(first.strip(), second.strip())
        else:
            encoding = tokenizer.encode(first.strip())
        yield torch.tensor([encoding.ids])
