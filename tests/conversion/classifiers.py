"""Small Hugging Face classifiers with random weights and tokenizers, saved as directories."""

import json

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    CamembertConfig,
    CamembertTokenizerFast,
    DistilBertConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.conversion.sources import ROBERTA_IDS, SIZES, make_byte_level_bpe, make_sentencepiece, make_word_piece

LABELS = ["not the same", "same", "the plot"]
PAIRS = [("The plot isn't new", "Éva saw 2 films"), ("a", "but it holds – we saw none!"), ("", "a"), ("a film", "")]
TEXTS = ["The plot isn't new – but it holds.", "Éva saw 2 films; we saw none!", "a"]
DISTILBERT_SIZES = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}


def make_camembert_pieces(folder):
    """Save CamemBERT's tokenizer, in which <s> has the id 5 and </s> the id 6, and return its size."""
    make_sentencepiece(folder)
    return len(CamembertTokenizerFast.from_pretrained(folder))


# For each kind: the function that saves the tokenizer, its class, the configuration, and its options.
CLASSIFIERS = {
    "roberta": (make_byte_level_bpe, "RobertaTokenizer", RobertaConfig, SIZES | ROBERTA_IDS),
    "xlm-roberta": (make_sentencepiece, "XLMRobertaTokenizer", XLMRobertaConfig, SIZES | ROBERTA_IDS),
    "camembert": (make_camembert_pieces, "CamembertTokenizer", CamembertConfig, SIZES | ROBERTA_IDS),
    "bert": (make_word_piece, "BertTokenizer", BertConfig, SIZES),
    "distilbert": (make_word_piece, "DistilBertTokenizer", DistilBertConfig, DISTILBERT_SIZES),
}


def make_classifier(kind, folder, labels=LABELS, positions=40, make_tokenizer=None, tokenizer=None, **options):
    """Save a classifier with large random weights and its tokenizer in `folder`, and return the model.

    `make_tokenizer` and `tokenizer`, the name of its class, replace those of the kind.
    """
    kinds_make_tokenizer, kinds_tokenizer, config_class, sizes = CLASSIFIERS[kind]
    make_tokenizer = make_tokenizer or kinds_make_tokenizer
    tokenizer_class = tokenizer or kinds_tokenizer
    rows = make_tokenizer(folder)
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text()) if settings_file.exists() else {}
    settings_file.write_text(json.dumps(settings | {"tokenizer_class": tokenizer_class}))
    if config_class not in (BertConfig, DistilBertConfig):
        positions += 2  # two of them are not used
    config = config_class(
        vocab_size=rows,
        max_position_embeddings=positions,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        **sizes | options,
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def transformers_logits(model, folder, texts, longest=None):
    """Return the logits (texts, classes) that transformers gives to texts, or pairs, each alone.

    Those of more than `longest` tokens are cut.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    logits = []
    for text in texts:
        parts = [[text]] if isinstance(text, str) else [[part] for part in text]
        with torch.no_grad():
            batch = tokenizer(*parts, truncation=longest is not None, max_length=longest, return_tensors="pt")
            logits.append(model.eval()(**batch).logits[0])
    return torch.stack(logits)
