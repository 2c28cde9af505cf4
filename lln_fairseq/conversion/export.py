"""Export a checkpoint as a Hugging Face directory with the model, its tokenizer and a model card.

    lln-fairseq export CHECKPOINT OUT [--onnx] [--int8]

A pre-trained model becomes a masked language model, a fine-tuned model a sequence classifier, and a converted encoder
without a language-model head an encoder for `SentenceTransformer(OUT)`. With softmax attention the result is a stock
RoBERTa. The attentions lln, lln_diag, block_diag and window, rotary positions, layer norms before the blocks and
DistilBERT's classification head come with their own code, which you load with `AutoModel.from_pretrained(OUT,
trust_remote_code=True)`. --onnx adds onnx/model.onnx, and --int8 also onnx/model_quantized.onnx with 8-bit weights.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lln_fairseq.checkpoints.compatibility import check_tokenizer, label_names
from lln_fairseq.checkpoints.config import STOCK_ATTENTION
from lln_fairseq.checkpoints.pooling import Pooling, pool_hidden_states, stored_pooling
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily, plugin_state
from lln_fairseq.checkpoints.run_tokenizer import FOLDER
from lln_fairseq.checkpoints.source_settings import stored_settings
from lln_fairseq.conversion.directory import CONFIG, new_directory, write_large
from lln_fairseq.conversion.model_card import model_card
from lln_fairseq.conversion.onnx_int8 import write_int8
from lln_fairseq.conversion.read_tokenizer import TOKENIZER
from lln_fairseq.conversion.sentence_transformers_files import length_file, sentence_files
from lln_fairseq.conversion.to_hugging_face import (
    convert_to_hugging_face,
    longest_exported_sequence,
    modeling_files,
)
from lln_fairseq.conversion.to_onnx import (
    LAST_HIDDEN_STATE,
    LOGITS,
    SENTENCE_EMBEDDING,
    TOKEN_EMBEDDINGS,
    Outputs,
    check_packages,
    write_onnx,
)
from lln_fairseq.conversion.write_tokenizer import convert_tokenizer, count_ids, describe_differences, find_tokenizer
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.models.options import attention_options
from lln_fairseq.text.pairs import ROBERTA_PAIRS
from lln_fairseq.text.special_symbols import BOS, EOS, MASK, NUM_SPECIAL, PAD, UNKNOWN, format_dictionary
from lln_fairseq.text.tokenizers import TOKENIZER_FILES, make_tokenizer
from lln_fairseq.text.vocabulary import Vocabulary, vocabulary_identity

# Options of this project's models that fairseq's own RoBERTa does not have, with the values that it uses.
STOCK_OPTIONS = {
    "attention": STOCK_ATTENTION,
    "softmax_layers": None,
    "layer_norm_eps": 1e-5,
    "pair_form": ROBERTA_PAIRS,
}
NEVER = -100.0  # the bias of a token that is never predicted


def export(
    checkpoint: Path,
    out: Path,
    data: Path | None = None,
    tokenizer: Path | None = None,
    onnx: bool = False,
    int8: bool = False,
) -> list[str]:
    """Export a checkpoint to a new Hugging Face directory, which is written completely or not at all.

    Args:
        checkpoint: a pre-trained or fine-tuned checkpoint.
        out: the directory to create.
        data: the data directory with the dictionaries; None takes that of the training run or, if that has none, the
            run's tokenizer directory.
        tokenizer: the directory of the tokenizer; None looks for it near the checkpoint and the data, and exports
            no tokenizer if there is none.
        onnx: also write onnx/model.onnx.
        int8: also write onnx/model.onnx and onnx/model_quantized.onnx.

    Returns:
        Lines for the user: a hint if there is no tokenizer, the name of the exported class, with an encoder's pooling,
        and the ONNX files.

    Raises:
        UserError: if a file cannot be read, `tokenizer` has no tokenizer, the model or its tokenizer cannot be
            exported, or `out` exists.
    """
    if onnx or int8:
        check_packages()
    lines = []
    with new_directory(out) as directory:
        data_directory = None
        if data:
            data_directory = str(data)
        model, task = load_model(str(checkpoint), data_directory, dictionaries_only=True)
        state = load_checkpoint_lazily(str(checkpoint))
        args = _model_options(model)
        head, labels = _classification_head(model, task, args.pair_form)
        options = attention_options(args.attention, args)
        pooling = None
        if not head:
            pooling = stored_pooling(state)
        is_encoder = pooling is not None
        settings = stored_settings(state)
        exported = convert_to_hugging_face(model.cpu().state_dict(), args, options, head, labels, is_encoder, settings)
        longest = min(longest_exported_sequence(exported.config), task.max_positions())  # as in `predict`
        directories = [checkpoint.parent / FOLDER, checkpoint.parent, Path(task.cfg.data), Path(task.cfg.data).parent]
        source_files = _tokenizer_files(tokenizer, directories)
        files: dict[str, bytes] = {}
        if source_files:
            symbols = task.source_dictionary.symbols
            kind = _check_same_tokenizer(source_files, symbols, state, str(tokenizer or task.cfg.data), str(checkpoint))
            dictionary = format_dictionary(symbols[NUM_SPECIAL:], {}, multiple=1)
            vocabulary = Vocabulary(make_tokenizer(kind, source_files), dictionary)
            if vocabulary.missing:
                lines.append(vocabulary.missing_message())
            files = convert_tokenizer(vocabulary, longest, args.pair_form)
            new_rows = count_ids(files) - vocabulary.size
            if new_rows > 0:
                _add_unknown_rows(model, new_rows)
                exported = convert_to_hugging_face(
                    model.state_dict(), args, options, head, labels, is_encoder, settings
                )
        has_tokenizer = TOKENIZER in files
        if pooling is not None:
            features = exported.config["hidden_size"]
            files |= sentence_files(pooling, features, longest, settings)
        elif head:
            files |= length_file(longest)
        files[CONFIG] = (json.dumps(exported.config, indent=2, ensure_ascii=False) + "\n").encode()
        if "auto_map" in exported.config:
            files |= modeling_files()
        notes = describe_differences(source_files)
        card = model_card(exported.config, exported.purpose, longest, has_tokenizer, notes, pooling, onnx or int8)
        files["README.md"] = card.encode()
        for name, content in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
        _write_tensors(exported.tensors, directory / "model.safetensors")
        if not has_tokenizer:
            lines.append("without a tokenizer: give --tokenizer DIRECTORY")
        if onnx or int8:
            write_onnx(directory, exported.config, _output_function(model, head, pooling), pooling)
        if int8:
            write_int8(directory, exported.config)
    lines.append(f"{out}: {exported.config['architectures'][0]}")
    if pooling is not None:
        lines[-1] += f", sentence vectors (pooling: {pooling})"
    if onnx or int8:
        lines.append("in ONNX: " + ", ".join(str(path) for path in sorted(out.glob("onnx/*.onnx"))))
    return lines


def _classification_head(model: Any, task: Any, pair_form: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of a fine-tuned model's classification head and its labels; ("", ()) if the task has no head.

    Raises UserError if the model does not have the head of its task, or was trained on texts without the special tokens
    that the exported tokenizer writes.
    """
    name = getattr(task.cfg, "classification_head_name", "")
    if not name:
        return "", ()
    if name not in model.classification_heads:
        raise UserError(f"the model has no classification head {name}")
    exported = {"init_token": BOS, "strip_eos": False}
    if Path(task.cfg.data, "input1").is_dir() and pair_form == ROBERTA_PAIRS:
        exported["separator_token"] = EOS
    for option, value in exported.items():
        trained = getattr(task.cfg, option, value)
        if trained != value:
            raise UserError(f"{option}={trained} cannot be exported: Hugging Face's RoBERTa supports only {value}")
    return name, tuple(label_names(task))


def _model_options(model: Any) -> argparse.Namespace:
    """Return the options of a model, with STOCK_OPTIONS for those that fairseq's own RoBERTa does not have."""
    options = vars(model.args) if isinstance(model.args, argparse.Namespace) else dict(model.args)
    return argparse.Namespace(**STOCK_OPTIONS | options)


def _tokenizer_files(tokenizer: Path | None, directories: list[Path]) -> dict[str, bytes]:
    """Return the files of the tokenizer in the directory `tokenizer`, or in the first of `directories` that has one.

    They are empty if `tokenizer` is None and no directory has one. Raises UserError if `tokenizer` has none.
    """
    if tokenizer is None:
        return find_tokenizer(directories)
    files = find_tokenizer([tokenizer])
    if not files:
        raise UserError(f"{tokenizer} has no tokenizer")
    return files


def _add_unknown_rows(model: Any, count: int) -> None:
    """Add tokens with the embedding of <unk>, which the language-model head never predicts, to a model in place."""

    def extended(matrix: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.cat([matrix, matrix[UNKNOWN].expand(count, -1)]))

    embedding = model.encoder.sentence_encoder.embed_tokens
    head = getattr(model.encoder, "lm_head", None)
    if head is not None:
        is_tied = head.weight is embedding.weight
        head.weight = extended(head.weight)
        head.bias = nn.Parameter(torch.cat([head.bias, torch.full((count,), NEVER)]))
    embedding.weight = extended(embedding.weight)
    embedding.num_embeddings += count
    if head is not None and is_tied:
        head.weight = embedding.weight


def _check_same_tokenizer(
    files: Mapping[str, bytes], symbols: Sequence[str], state: Mapping[str, Any], where: str, checkpoint: str
) -> str:
    """Return the kind of the tokenizer with these files.

    Raises UserError if the files in `where` are not those of the tokenizer that the checkpoint was made with.

    `symbols` are those of the task's dictionary, to which the task appended <mask> unless dict.txt has it.
    """
    kind = next(kind for kind, names in TOKENIZER_FILES.items() if set(names) == set(files))
    dictionary = symbols[NUM_SPECIAL:]
    without_mask = [symbol for symbol in dictionary if symbol != MASK]
    if plugin_state(state).get("tokenizer") != vocabulary_identity(kind, files, dictionary):
        check_tokenizer(state, vocabulary_identity(kind, files, without_mask), where, checkpoint)
    return kind


def _output_function(model: Any, head: str, pooling: Pooling | None) -> Callable[[Tensor], Outputs]:
    """Return a function from tokens (B, N), padded at the right, to the outputs that model.onnx must have.

    These are the hidden states and vectors of an encoder, which has a pooling, or the logits of the classification head
    `head`, or of the LM head. The model is converted to float32 in place.
    """
    options: dict[str, Any] = {}
    if head:
        options = {"features_only": True, "classification_head_name": head}
    elif pooling is not None:
        options = {"features_only": True}
    model = model.float()

    def outputs(tokens: Tensor) -> Outputs:
        result = model(tokens, **options)[0]
        if pooling is None:
            return {LOGITS: result}
        vectors = pool_hidden_states(result, tokens.ne(PAD), pooling)
        return {TOKEN_EMBEDDINGS: result, SENTENCE_EMBEDDING: vectors, LAST_HIDDEN_STATE: result}

    return outputs


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises UserError if that fails, for example because the disk is full."""
    from safetensors.torch import save_file

    write_large(path, lambda part: save_file(tensors, part, metadata={"format": "pt"}))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a pre-trained or fine-tuned checkpoint")
    parser.add_argument("out", type=Path, help="the directory to create")
    parser.add_argument("--data", type=Path, help="the data directory (default: that of the training run)")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="the tokenizer's directory (default: near the checkpoint or the data)",
    )
    parser.add_argument("--onnx", action="store_true", help="also write onnx/model.onnx, checked with onnxruntime")
    parser.add_argument("--int8", action="store_true", help="also write it, and onnx/model_quantized.onnx")
    args = parser.parse_args(argv)
    if args.onnx or args.int8:
        print("writing model.onnx and comparing its outputs, which can take a minute", flush=True)
    for line in export(args.checkpoint, args.out, args.data, args.tokenizer, args.onnx, args.int8):
        print(line)
