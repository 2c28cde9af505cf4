"""Turns a checkpoint of ours into a directory of Hugging Face: model, tokenizer, model card.

    python -m lln_fairseq export CHECKPOINT OUT [--onnx]

A pre-trained model becomes a masked LM, a fine-tuned one a sequence classifier. With softmax attention it is a stock
RoBERTa; lln and lln_diag come with their code: `AutoModel.from_pretrained(OUT, trust_remote_code=True)`. --onnx adds
the model as model.onnx.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lln_fairseq.checkpoints.compatibility import label_names
from lln_fairseq.checkpoints.config import STOCK_ATTENTION
from lln_fairseq.checkpoints.run_tokenizer import FOLDER
from lln_fairseq.conversion import to_hugging_face as to_hf
from lln_fairseq.conversion import to_onnx
from lln_fairseq.conversion import write_tokenizer as tokenizer_out
from lln_fairseq.conversion.directory import CONFIG, new_directory, write_large
from lln_fairseq.conversion.encoder import OFFSET
from lln_fairseq.conversion.model_card import model_card
from lln_fairseq.errors import InputError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.models.options import attention_options

STOCK = {"attention": STOCK_ATTENTION, "layer_norm_eps": 1e-5}


def export(
    checkpoint: Path, out: Path, data: Path | None = None, tokenizer: Path | None = None, onnx: bool = False
) -> list[str]:
    """Writes OUT whole or not at all; returns what the user should know of it.

    `data`: the data directory, where it is not that of the training; `tokenizer`: a directory with the tokenizer, where
    it is not with the checkpoint or the data; `onnx`: with model.onnx. Raises: InputError.
    """
    if onnx:
        to_onnx.check_packages()
    with new_directory(out) as folder:
        model, task = load_model(str(checkpoint), str(data) if data else None)
        head, labels = _head(model, task)
        args = _options(model)
        options = attention_options(args.attention, args)
        found = to_hf.export(model.cpu().state_dict(), args, options, head, labels)
        folders = [checkpoint.parent / FOLDER, checkpoint.parent, Path(task.cfg.data), Path(task.cfg.data).parent]
        files = tokenizer_out.find_tokenizer([tokenizer] if tokenizer else folders)
        if tokenizer and not files:
            raise InputError(f"{tokenizer} has no tokenizer")
        is_approximate = tokenizer_out.is_approximate(files)
        if files:
            positions = found.config["max_position_embeddings"] - OFFSET
            files = tokenizer_out.exported(files, task.source_dictionary.symbols, positions)
        files[CONFIG] = (json.dumps(found.config, indent=2, ensure_ascii=False) + "\n").encode()
        if "auto_map" in found.config:
            files[f"{to_hf.MODELING}.py"] = Path(to_hf.__file__).with_name(f"{to_hf.MODELING}.py").read_bytes()
        has_tokenizer = tokenizer_out.TOKENIZER in files
        card = model_card(found.config, found.purpose, has_tokenizer, is_approximate, folders)
        files["README.md"] = card.encode()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        _save(found.tensors, folder / "model.safetensors")
        if onnx:
            to_onnx.write(folder, found.config, _logits(model, head))
    missing = [] if tokenizer_out.TOKENIZER in files else ["without a tokenizer: give --tokenizer DIRECTORY"]
    return [*missing, f"{out}: {found.config['architectures'][0]}"]


def _options(model: Any) -> argparse.Namespace:
    """The model's options; fairseq's own RoBERTa has not all of them."""
    given = vars(model.args) if isinstance(model.args, argparse.Namespace) else dict(model.args)
    return argparse.Namespace(**STOCK | given)


def _head(model: Any, task: Any) -> tuple[str, tuple[str, ...]]:
    """The classification head of a fine-tuned model, and its labels."""
    name = getattr(task.cfg, "classification_head_name", "")
    if not name:
        return "", ()
    if name not in model.classification_heads:
        raise InputError(f"the model has no classification head {name}")
    return name, tuple(label_names(task))


def _logits(model: Any, head: str) -> Callable[[Tensor], Tensor]:
    """The model as a function of tokens (B, N)."""
    options = {"features_only": True, "classification_head_name": head} if head else {}
    model = model.float()
    return lambda tokens: model(tokens, **options)[0]


def _save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    write_large(path, lambda place: save_file(tensors, place, metadata={"format": "pt"}))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lln-fairseq export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="pre-trained or fine-tuned")
    parser.add_argument("out", type=Path, help="a new directory")
    parser.add_argument("--data", type=Path, help="the data directory (default: that of the training)")
    parser.add_argument("--tokenizer", type=Path, help="the tokenizer's directory (default: beside checkpoint or data)")
    parser.add_argument("--onnx", action="store_true", help="with model.onnx, checked with onnxruntime")
    args = vars(parser.parse_args(argv))
    print("\n".join(export(**args)))
