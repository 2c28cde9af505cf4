"""Small models of Hugging Face with random weights and with tokenizers, as directories."""

import json

import torch
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

from lln_fairseq.data.tokenizers import train_sentencepiece
from lln_fairseq.data.vocabulary import load_vocabulary
from lln_fairseq.inference.loading import load_model

TEXTS = ["The plot isn't new – but it holds.", "Éva saw 2 films; we saw none!", "a", "unknown ☃ letters and <mask>"]
PIECES = 38
SHAKE = 0.1  # large weights show every mistake
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
CLASSES = {
    "roberta": (RobertaConfig, RobertaForMaskedLM, RobertaModel),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaForMaskedLM, None),
    "bert": (BertConfig, BertForMaskedLM, BertModel),
}
TOKENIZERS = {"roberta": RobertaTokenizerFast, "bert": BertTokenizerFast, "xlm-roberta": XLMRobertaTokenizer}


def make_model(kind, folder, headless=False, seed=0, **options):
    """A model of Hugging Face that is saved in `folder`, tokenizer included; large weights show every mistake."""
    rows = {"roberta": byte_level_bpe, "xlm-roberta": pieces, "bert": word_piece}[kind](folder)
    config_class, with_head, without = CLASSES[kind]
    special = {} if kind == "bert" else dict(bos_token_id=0, pad_token_id=1, eos_token_id=2, type_vocab_size=1)
    positions = 40 if kind == "bert" else 42
    config = config_class(vocab_size=rows, max_position_embeddings=positions, **special | SIZES | options)
    torch.manual_seed(seed)
    model = (without if headless else with_head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def byte_level_bpe(folder):
    """RoBERTa's: vocab.json in fairseq's order, not that of the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters,
                                                                show_progress=False))  # fmt: skip
    model = json.loads(tokenizer.to_str())["model"]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(model["vocab"]), "<mask>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    return len(tokens)


def word_piece(folder):
    """BERT's: [PAD] first, the special tokens in the midst."""
    words = ["the", "plot", "isn", "new", "but", "it", "holds", "eva", "films", "we", "un", "##known", "##s", "t", "2"]
    signs = list("–;!.'’☃") + ["##" + letter for letter in "abcdefghijklmnopqrstuvwxyz"] + list("abcdefghijklmnopqrstu")
    tokens = [*dict.fromkeys(["[PAD]", "[unused0]", *words, "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return len(tokens)


def pieces(folder):
    """XLM-R's: a SentencePiece model whose ids are shifted by one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sentencepiece.bpe.model").write_bytes(train_sentencepiece(TEXTS * 3, PIECES, "unigram"))
    return PIECES + 2


def make_model_with_settings(kind, folder, settings, as_tokenizer_json=True, added=None):
    """As make_model, with these settings in tokenizer_config.json, these added tokens and two rows for new tokens."""
    model = make_model(kind, folder)
    if as_tokenizer_json:
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | settings))
    if added:
        ids = {token: model.config.vocab_size + number for number, token in enumerate(added)}
        (folder / "added_tokens.json").write_text(json.dumps(ids))
    model.resize_token_embeddings(model.config.vocab_size + 2)
    model.save_pretrained(folder)


def encoded(folder, texts=TEXTS):
    """(B, N) ids as data_prep and our tasks make them, padded."""
    vocabulary = load_vocabulary(str(folder))
    rows = [torch.tensor([0, *vocabulary.table[ids], 2]) for ids in vocabulary.tokenizer.encode_ids(texts)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)


def logits(folder, tokens):
    return ours(folder / "model.pt", tokens)


def rename(tensors, name, new):
    tensors[new] = tensors.pop(name)


def padded_batch(rows=65):
    tokens = torch.randint(4, rows - 1, (4, 37), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 0
    for row, length in enumerate((37, 36, 9, 1)):
        tokens[row, length:] = 1
    return tokens


def ours(checkpoint, tokens, head=None):
    model, _ = load_model(str(checkpoint))
    with torch.no_grad():
        return model(tokens, **({"classification_head_name": head} if head else {}))[0]


def shaken(path):
    """The checkpoint with noise on all parameters."""
    state = torch.load(path)
    generator = torch.Generator().manual_seed(1)
    for name, value in state["model"].items():
        if value.is_floating_point() and not name.endswith("version"):
            value += SHAKE * torch.randn(value.shape, generator=generator)
    state["model"]["encoder.lm_head.weight"] = state["model"]["encoder.sentence_encoder.embed_tokens.weight"]
    torch.save(state, path)
    return path
