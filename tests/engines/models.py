"""Write an encoder and a classifier with random weights, as checkpoints of this project and exported, and the texts.

    python -m tests.engines.models FOLDER

This needs fairseq and transformers. The files are KIND/model.pt, KIND-exported/ and texts.txt.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForSequenceClassification, RobertaModel

from lln_fairseq.__main__ import main as run_program
from tests.engines.rows import WORDS, make_rows

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the words."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), SPECIAL, strict=True))
    names |= {"cls_token": "<s>", "sep_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names).save_pretrained(folder)


def main(folder: Path) -> None:
    torch.manual_seed(1)
    config = RobertaConfig(vocab_size=len(SPECIAL) + len(WORDS), max_position_embeddings=130, num_labels=3, **SIZES)
    config.id2label = {0: "low", 1: "middle", 2: "high"}
    config.label2id = {label: number for number, label in config.id2label.items()}
    config.initializer_range = 0.2  # so that the outputs of texts differ
    sources = {"encoder": RobertaModel(config), "classifier": RobertaForSequenceClassification(config)}
    for kind, model in sources.items():
        source = folder / f"{kind}-source"
        model.save_pretrained(source)
        write_tokenizer(source)
        converted = folder / kind
        for arguments in (
            ["convert", source, converted, "--attention", "lln_diag"],
            ["export", converted / "model.pt", folder / f"{kind}-exported"],
        ):
            code = run_program([str(argument) for argument in arguments])
            if code:
                sys.exit(code)
    lines = [text or b"" for _, text in make_rows()]
    (folder / "texts.txt").write_bytes(b"\n".join(lines) + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
