"""A training's log has no warning that its user cannot mend, and keeps all others."""

import warnings

import pytest

from lln_fairseq.host.advice import hide_advice
from tests.fairseq_runs import CLASSIFICATION, LLN, MASKED_LM, make_classification, make_corpus, train

KINDS = {
    "masked LM": (make_corpus, (*MASKED_LM, "--num-workers", 1)),
    "fine-tuning": (make_classification, (*CLASSIFICATION, "--criterion", "lln_sentence_prediction")),
}


def shown(found):
    return [f"{item.filename}: {item.message}" for item in found if not issubclass(item.category, DeprecationWarning)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_shows_no_advice_to_the_authors_of_fairseq(kind, tmp_path, monkeypatch):
    make, options = KINDS[kind]
    data = make(tmp_path / "data")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(monkeypatch, tmp_path / "a.log", data, tmp_path / "a", *options, *LLN, "--max-update", 1)
        before = shown(found)
        found.clear()
        hide_advice()
        train(monkeypatch, tmp_path / "b.log", data, tmp_path / "b", *options, *LLN, "--max-update", 2)
    assert shown(found) == []
    for message in ("torch.cuda.amp.autocast", "'pin_memory'", "The version_base parameter", "ConfigStore schema"):
        assert any(message in line for line in before), f"nobody warns of {message} any more: remove it"


ADVICE = "`torch.cuda.amp.autocast(args...)` is deprecated. Please use `torch.amp.autocast('cuda', args...)` instead."


@pytest.mark.parametrize(
    ("message", "module", "is_shown"),
    [
        (ADVICE, "fairseq.tasks.fairseq_task", False),
        (ADVICE, "my_attention", True),
        ("the loss is NaN", "fairseq.tasks.fairseq_task", True),
    ],
)
def test_other_warnings_are_shown(message, module, is_shown):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hide_advice()
        warnings.warn_explicit(message, FutureWarning, f"{module}.py", 1, module)
    assert bool(found) == is_shown
