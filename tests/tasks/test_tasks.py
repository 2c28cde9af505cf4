"""What our tasks mend, each beside the host's own behaviour."""

import pytest
import torch
from fairseq.data import data_utils
from fairseq.tasks import setup_task
from omegaconf import OmegaConf

from lln_fairseq.errors import InputError
from tests.fairseq_runs import make_classification, make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def make_task(name, data, **options):
    return setup_task(OmegaConf.create({"_name": name, "data": str(data), "seed": 1, **options}))


def make_masked_lm(data, mode, **options):
    return make_task("lln_masked_lm", data, tokens_per_sample=32, sample_break_mode=mode, **options)


def make_classifier(name, data):
    return make_task(name, data, num_classes=2, regression_target=False, classification_head_name="head")


def batches(task, split):
    task.load_dataset(split)
    iterator = task.get_batch_iterator(
        task.dataset(split), max_sentences=8, max_positions=512, required_batch_size_multiple=8
    )
    return list(iterator.next_epoch_itr(shuffle=False))


@pytest.mark.parametrize(("name", "scored"), [("lln_sentence_prediction", 61), ("sentence_prediction", 56)])
def test_no_row_is_dropped(name, scored, tmp_path):
    data = make_classification(tmp_path, sizes=(("valid", 61),))
    assert sum(len(batch["target"]) for batch in batches(make_classifier(name, data), "valid")) == scored


def test_one_line_a_sample(corpus):
    masked_lm = make_masked_lm(corpus, "eos", skip_masking=True)
    lines = data_utils.load_indexed_dataset(str(corpus / "valid"), masked_lm.source_dictionary)
    samples = {}
    for batch in batches(masked_lm, "valid"):
        for number, tokens in zip(batch["id"].tolist(), batch["net_input"]["src_tokens"], strict=True):
            samples[number] = tokens[tokens != masked_lm.source_dictionary.pad()]
    assert sorted(samples) == list(range(len(lines)))
    for number, line in enumerate(lines):
        assert torch.equal(samples[number], torch.cat((torch.tensor([0]), line[:31])))


def test_a_missing_split_is_named(corpus):
    for mode in ("eos", "none"):
        with pytest.raises(InputError, match="cannot load split 'test'"):
            make_masked_lm(corpus, mode).load_dataset("test")


def test_a_directory_without_dictionaries_is_named(tmp_path):
    with pytest.raises(InputError, match=r"not a binarised data directory: .*dict\.txt is missing"):
        make_masked_lm(tmp_path, "none")
    with pytest.raises(InputError, match=r"not a binarised data directory: .*input0/dict\.txt is missing"):
        make_classifier("lln_sentence_prediction", tmp_path)
