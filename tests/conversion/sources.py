"""Small Hugging Face models with random weights and tokenizers, saved as directories."""

import json

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BertTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
    RobertaTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaTokenizer,
)

from lln_fairseq.inference.loading import load_model
from lln_fairseq.text.tokenizers import train_sentencepiece
from lln_fairseq.text.vocabulary import load_vocabulary

TEXTS = ["The plot isn't new – but it holds.", "Éva saw 2 films; we saw none!", "a", "unknown ☃ letters and <mask>"]
TRANSFORMERS_5 = not transformers.__version__.startswith("4.")
PIECES = 38  # the size of the SentencePiece vocabulary
NOISE = 0.1  # large weights make every mistake visible
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
ROBERTA_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "type_vocab_size": 1}
# For each kind: the configuration, the model with a language-model head, and the model without.
CLASSES = {
    "roberta": (RobertaConfig, RobertaForMaskedLM, RobertaModel),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaForMaskedLM, None),
    "bert": (BertConfig, BertForMaskedLM, BertModel),
    # as multilingual-e5-small: pad_token_id in config.json is 0, which is <s> in the tokenizer
    "bert-sentencepiece": (BertConfig, BertForMaskedLM, BertModel),
}
TOKENIZERS = {
    "roberta": RobertaTokenizerFast,
    "bert": BertTokenizerFast,
    "xlm-roberta": XLMRobertaTokenizer,
    "bert-sentencepiece": XLMRobertaTokenizer,
}


def make_model(kind, folder, headless=False, positions=40, **options):
    """Save a model with large random weights and its tokenizer in `folder`, and return the model."""
    config_class, model_class, headless_class = CLASSES[kind]
    if headless:
        model_class = headless_class
    options = SIZES | options
    if kind == "bert":
        rows = make_word_piece(folder)
    elif kind == "roberta":
        rows = make_byte_level_bpe(folder)
    else:
        rows = make_sentencepiece(folder)
    if kind == "bert-sentencepiece":
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLMRobertaTokenizer"}))
    if config_class is not BertConfig:
        positions += 2  # two of them are not used
        options = ROBERTA_IDS | options
    config = config_class(vocab_size=rows, max_position_embeddings=positions, **options)
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def make_byte_level_bpe(folder):
    """Save RoBERTa's tokenizer and return its size. Its ids are in fairseq's order, not in the order of merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(model["vocab"]), "<mask>"]
    merges = [" ".join(pair) for pair in model["merges"]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return len(tokens)


def make_word_piece(folder):
    """Save BERT's tokenizer and return its size. [PAD] is the first token, the other special ones are in the middle."""
    words = ["the", "plot", "isn", "new", "but", "it", "holds", "eva", "films", "we", "un", "##known", "##s", "t", "2"]
    letters = list("abcdefghijklmnopqrstu")
    endings = [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokens = ["[PAD]", "[unused0]", *words, "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"–;!.'’☃", *endings, *letters]
    tokens = list(dict.fromkeys(tokens))  # without duplicates
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return len(tokens)


def make_sentencepiece(folder):
    """Save XLM-R's tokenizer and return its size: a SentencePiece model whose ids are shifted by one, and <mask>."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sentencepiece.bpe.model").write_bytes(train_sentencepiece(TEXTS * 3, PIECES, "unigram"))
    return PIECES + 2


def make_model_with_settings(kind, folder, settings, as_tokenizer_json=True, added=()):
    """Save a model whose tokenizer has settings in tokenizer_config.json, added tokens, and rows for two new tokens."""
    model = make_model(kind, folder)
    if as_tokenizer_json:
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    previous = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(previous | settings))
    if added:
        ids = {token: model.config.vocab_size + number for number, token in enumerate(added)}
        (folder / "added_tokens.json").write_text(json.dumps(ids))
    model.resize_token_embeddings(model.config.vocab_size + 2)
    model.save_pretrained(folder)


def encode_texts(folder, texts=TEXTS):
    """Return the ids (B, N) that data_prep and the tasks give to the texts with the tokenizer in `folder`, padded."""
    vocabulary = load_vocabulary(str(folder))
    rows = [torch.tensor([0, *vocabulary.table[ids], 2]) for ids in vocabulary.tokenizer.encode_ids(texts)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)


def padded_batch(rows=65):
    """Return random tokens (4, 37) of a dictionary with `rows` symbols, of which only the first row has no padding."""
    tokens = torch.randint(4, rows - 1, (4, 37), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 0
    for row, length in enumerate((37, 36, 9, 1)):
        tokens[row, length:] = 1
    return tokens


def compute_logits(checkpoint, tokens, head=None):
    """Return the logits that a checkpoint of this project gives, those of a classification head if one is named."""
    model, _ = load_model(str(checkpoint))
    options = {"classification_head_name": head} if head else {}
    with torch.no_grad():
        return model(tokens, **options)[0]


def rename_tensor(tensors, name, new_name):
    """Rename a tensor in a dictionary, in place."""
    tensors[new_name] = tensors.pop(name)


def add_noise(path):
    """Add noise to all parameters of a checkpoint, in place, keep its head tied, and return its path."""
    state = torch.load(path)
    generator = torch.Generator().manual_seed(1)
    for name, value in state["model"].items():
        if value.is_floating_point() and not name.endswith("version"):
            value += NOISE * torch.randn(value.shape, generator=generator)
    state["model"]["encoder.lm_head.weight"] = state["model"]["encoder.sentence_encoder.embed_tokens.weight"]
    torch.save(state, path)
    return path
