"""What our tasks mend, each beside the host's own behaviour."""

import pytest
from fairseq.data import data_utils
from fairseq.tasks import setup_task
from omegaconf import OmegaConf

from lln_fairseq.errors import InputError
from tests.fairseq_runs import make_classification, make_corpus


def make_task(name, data, **options):
    return setup_task(OmegaConf.create({"_name": name, "data": str(data), "seed": 1, **options}))


def make_masked_lm(data, mode, **options):
    return make_task("lln_masked_lm", data, tokens_per_sample=32, sample_break_mode=mode, **options)


def make_classifier(name, data, **options):
    return make_task(name, data, num_classes=2, regression_target=False, classification_head_name="head", **options)


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


def test_batches_of_like_lengths(tmp_path):
    data = make_classification(tmp_path, sizes=(("train", 160),))
    padding, numbers = {}, {}
    for group in (False, True):
        found = batches(make_classifier("lln_sentence_prediction", data, group_by_length=group), "train")
        tokens = [batch["net_input"]["src_tokens"] for batch in found]
        padding[group] = sum(int((x == 1).sum()) for x in tokens) / sum(x.numel() for x in tokens)
        numbers[group] = [number for batch in found for number in batch["id"].tolist()]
        assert all(len(x) == 8 for x in tokens)
    assert padding[True] < padding[False] / 3
    assert sorted(numbers[True]) == sorted(numbers[False])


def samples_of(task, split):
    """The samples in the order of the data, without padding."""
    samples = {}
    for batch in batches(task, split):
        for number, tokens in zip(batch["id"].tolist(), batch["net_input"]["src_tokens"], strict=True):
            samples[number] = tokens[tokens != task.source_dictionary.pad()].tolist()
    return [samples[number] for number in range(len(samples))]


def test_one_line_a_sample_and_the_tail_of_a_long_one_in_the_next(corpus):
    masked_lm = make_masked_lm(corpus, "eos", skip_masking=True)
    expected = []
    for line in data_utils.load_indexed_dataset(str(corpus / "valid"), masked_lm.source_dictionary):
        pieces = [piece.tolist() for piece in line.split(31)]
        if len(pieces) > 1 and len(pieces[-1]) == 1:  # never alone: complete_doc takes it for the end of a document
            pieces[-1].insert(0, pieces[-2].pop())
        expected += [[0, *piece] for piece in pieces]
    assert any(len(sample) == 32 for sample in expected)
    assert samples_of(masked_lm, "valid") == expected


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
def test_no_token_is_lost_and_no_sample_is_too_long(mode, tmp_path):
    data = make_corpus(tmp_path, sizes=(("valid", 50),))
    task = make_masked_lm(data, mode, skip_masking=True)
    samples = samples_of(task, "valid")
    lines = data_utils.load_indexed_dataset(str(data / "valid"), task.source_dictionary)
    assert max(lines.sizes) > 32
    assert max(map(len, samples)) <= 32
    assert [token for sample in samples for token in sample[1:]] == [token for line in lines for token in line.tolist()]


def test_the_host_makes_samples_that_are_too_long(tmp_path):
    data = make_corpus(tmp_path, sizes=(("valid", 50),))
    options = dict(tokens_per_sample=32, sample_break_mode="complete", shorten_method="truncate")
    host = make_task("masked_lm", data, **options)
    host.load_dataset("valid")
    assert host.dataset("valid").sizes[0].max() == 33  # one more than the positions
    ours = make_task("lln_masked_lm", data, **options)
    ours.load_dataset("valid")
    assert ours.dataset("valid").sizes[0].max() == 32


def test_another_number_of_classes_than_labels_is_refused(tmp_path):
    data = make_classification(tmp_path, sizes=(("valid", 5),))
    with pytest.raises(InputError, match=r"num_classes is 3, but .*label/dict\.txt has 2 labels: 0, 1"):
        make_task("lln_sentence_prediction", data, num_classes=3, regression_target=False)


@pytest.mark.parametrize("option", ["init_token", "separator_token"])
def test_a_token_that_is_not_in_the_dictionary_is_refused(option, tmp_path):
    data = make_classification(tmp_path, sizes=(("valid", 5),))
    with pytest.raises(InputError, match=rf"task\.{option} is 1000000000, and must be in \[0, 64\]"):
        make_classifier("lln_sentence_prediction", data, **{option: 10**9})


def test_a_missing_split_is_named(corpus):
    for mode in ("eos", "none"):
        with pytest.raises(InputError, match="cannot load split 'test'"):
            make_masked_lm(corpus, mode).load_dataset("test")


def test_a_directory_without_dictionaries_is_named(tmp_path):
    with pytest.raises(InputError, match=r"not a binarised data directory: .*dict\.txt is missing"):
        make_masked_lm(tmp_path, "none")
    with pytest.raises(InputError, match=r"not a binarised data directory: .*input0/dict\.txt is missing"):
        make_classifier("lln_sentence_prediction", tmp_path)
