"""`import lln_fairseq.hub`: exported directories open without fairseq and without trust_remote_code."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from lln_fairseq.conversion.convert import convert
from lln_fairseq.conversion.export import export
from tests.conversion.classifiers import make_classifier
from tests.conversion.sources import TRANSFORMERS_5, make_model

# What the package needs for training only.
BLOCKED = ("fairseq", "hydra", "omegaconf")
AUTO_CLASSES = {
    "encoder": AutoModel,
    "language_model": AutoModelForMaskedLM,
    "classifier": AutoModelForSequenceClassification,
}
PAIR = ("The plot isn't new", "Éva saw 2 films")
# Opens the directories and saves the outputs of the models, and what pipeline and sentence-transformers give.
OPEN = f"""
import sys, torch
for name in {BLOCKED}:
    sys.modules[name] = None  # as if it were not installed
import lln_fairseq.hub
import transformers
tokens = torch.arange(4, 30)[None]
for folder, name in {[(folder, auto_class.__name__) for folder, auto_class in AUTO_CLASSES.items()]}:
    model = getattr(transformers, name).from_pretrained(folder).eval()
    assert type(model).__module__ == "lln_fairseq.conversion.modeling_lln_roberta"
    assert not model.is_backend_compatible()  # with vLLM, which then rejects the model
    torch.save(model(tokens)[0], folder + ".pt")
classify = transformers.pipeline("text-classification", model="classifier")
print(classify([dict(text={PAIR[0]!r}, text_pair={PAIR[1]!r})]))
"""
SENTENCE_TRANSFORMERS = f"""
import lln_fairseq.hub
from sentence_transformers import CrossEncoder, SentenceTransformer
print(CrossEncoder("classifier", device="cpu").predict([{PAIR}]))
print(SentenceTransformer("encoder", device="cpu").encode("a text").shape)
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Return a directory with an exported encoder, masked language model and classifier."""
    folder = tmp_path_factory.mktemp("exports")
    make_model("bert", folder / "encoder_in", headless=True)
    make_model("roberta", folder / "language_model_in")
    make_classifier("bert", folder / "classifier_in", ["relevance"])
    for name in AUTO_CLASSES:
        convert(folder / f"{name}_in", folder / f"{name}_converted", "lln_diag")
        export(folder / f"{name}_converted" / "model.pt", folder / name)
    return folder


def run_python(code, folder):
    """Return what the code prints in a new process in this folder, which can download nothing and asks no question."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )


def test_exports_open_without_fairseq_and_remote_code(exports):
    done = run_python(OPEN, exports)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attn_implementation='lln_window' needs transformers 5, got 4") == (not TRANSFORMERS_5)
    assert "'label': 'relevance'" in done.stdout
    tokens = torch.arange(4, 30)[None]
    for name, auto_class in AUTO_CLASSES.items():
        model = auto_class.from_pretrained(exports / name, trust_remote_code=True).eval()
        with torch.no_grad():
            expected = model(tokens)[0]
        torch.testing.assert_close(torch.load(exports / f"{name}.pt"), expected, rtol=1e-5, atol=1e-5)


def test_sentence_transformers_opens_exports_without_remote_code(exports):
    pytest.importorskip("sentence_transformers")

    done = run_python(SENTENCE_TRANSFORMERS, exports)

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("(32,)\n")


def test_exports_need_hub_or_remote_code(exports):
    code = "from transformers import AutoModel; AutoModel.from_pretrained('encoder')"

    done = run_python(code, exports)

    assert done.returncode == 1
    assert "trust_remote_code=True" in done.stderr.splitlines()[-1]


def longest_text_of_text_embeddings_inference(folder):
    """Compute the longest text as router/src/lib.rs (0d124dc) does, and require what it requires of a classifier."""
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"].keys() == {str(number) for number in config["label2id"].values()}
    assert all(isinstance(name, str) for name in config.get("auto_map", {}).values())
    settings = folder / "sentence_bert_config.json"
    if settings.exists():
        return json.loads(settings.read_text())["max_seq_length"]
    offset = 0
    if config["model_type"] in ("xlm-roberta", "camembert", "roberta"):
        offset = config["pad_token_id"] + 1
    return config["max_position_embeddings"] - offset


def test_text_embeddings_inference_cuts_texts_at_the_longest_sequence(exports):
    folder = exports / "classifier"
    longest = longest_text_of_text_embeddings_inference(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    assert model(torch.full((1, longest), 5)).logits.isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):  # of transformers 4 and 5
        model(torch.full((1, longest + 1), 5))
