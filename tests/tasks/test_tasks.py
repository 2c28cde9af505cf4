"""The samples and batches of the tasks, compared with those of fairseq's own tasks."""

import shutil

import pytest
from fairseq.data import data_utils
from fairseq.tasks import setup_task
from omegaconf import OmegaConf

from lln_fairseq.errors import UserError
from tests.fairseq_runs import make_classification, make_corpus, write_scores

PAD = 1


def make_task(name, data, **options):
    return setup_task(OmegaConf.create({"_name": name, "data": str(data), "seed": 1, **options}))


def make_masked_lm(data, mode, **options):
    return make_task("lln_masked_lm", data, tokens_per_sample=32, sample_break_mode=mode, **options)


def make_classifier(name, data, **options):
    return make_task(name, data, num_classes=2, regression_target=False, classification_head_name="head", **options)


def load_batches(task, split):
    """Return the batches of a split, of at most 8 samples, in the order in which they are made."""
    task.load_dataset(split)
    iterator = task.get_batch_iterator(
        task.dataset(split), max_sentences=8, max_positions=512, required_batch_size_multiple=8
    )
    return list(iterator.next_epoch_itr(shuffle=False))


@pytest.mark.parametrize(("name", "scored_rows"), [("lln_sentence_prediction", 61), ("sentence_prediction", 56)])
def test_only_stock_fairseq_drops_rows(name, scored_rows, tmp_path):
    data = make_classification(tmp_path, sizes=(("valid", 61),))
    batches = load_batches(make_classifier(name, data), "valid")
    assert sum(len(batch["target"]) for batch in batches) == scored_rows


@pytest.mark.parametrize("limits", [{"max_positions": 20, "max_tokens": None}, {"max_positions": 30, "max_tokens": 20}])
def test_too_long_rows_are_rejected(limits, tmp_path):
    task = make_classifier("lln_sentence_prediction", make_classification(tmp_path, sizes=(("train", 60),)))
    task.load_dataset("train")
    with pytest.raises(UserError, match=r"a sample has 41 tokens, but .* at most 20: set .*shorten_method=truncate"):
        task.get_batch_iterator(task.dataset("train"), **limits, ignore_invalid_inputs=True)


def test_group_by_length_reduces_padding(tmp_path):
    data = make_classification(tmp_path, sizes=(("train", 160),))
    padding = {}
    row_ids = {}
    for group in (False, True):
        task = make_classifier("lln_sentence_prediction", data, group_by_length=group)
        batches = load_batches(task, "train")
        assert all(len(batch["id"]) == 8 for batch in batches)
        tokens = [batch["net_input"]["src_tokens"] for batch in batches]
        padding[group] = sum(int((x == PAD).sum()) for x in tokens) / sum(x.numel() for x in tokens)
        row_ids[group] = sorted(row for batch in batches for row in batch["id"].tolist())
    assert padding[True] < padding[False] / 3
    assert row_ids[True] == row_ids[False]


def test_first_batches_of_a_grouped_validation_are_not_the_shortest(tmp_path):
    """dataset.max_valid_steps validates on the first batches only."""
    data = make_classification(tmp_path, sizes=(("train", 160), ("valid", 160)))
    task = make_classifier("lln_sentence_prediction", data, group_by_length=True)
    longest = [batch["net_input"]["src_tokens"].shape[1] for batch in load_batches(task, "valid")]
    assert max(longest[:5]) > 35
    assert longest != sorted(longest)


def load_samples(task, split):
    """Return the samples of a split in the order of the data, as lists of token ids without padding."""
    samples = {}
    for batch in load_batches(task, split):
        for row, tokens in zip(batch["id"].tolist(), batch["net_input"]["src_tokens"], strict=True):
            samples[row] = tokens[tokens != PAD].tolist()
    return [samples[row] for row in range(len(samples))]


def test_mode_eos_splits_long_lines(corpus):
    task = make_masked_lm(corpus, "eos", skip_masking=True)
    expected = []
    for line in data_utils.load_indexed_dataset(str(corpus / "valid"), task.source_dictionary):
        pieces = [piece.tolist() for piece in line.split(31)]
        # complete_doc takes a line of a single token for the end of a document, so a piece has at least two.
        if len(pieces) > 1 and len(pieces[-1]) == 1:
            pieces[-1].insert(0, pieces[-2].pop())
        expected += [[0, *piece] for piece in pieces]
    assert any(len(sample) == 32 for sample in expected)
    assert load_samples(task, "valid") == expected


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
def test_no_token_is_lost_and_no_sample_is_too_long(mode, tmp_path):
    data = make_corpus(tmp_path, sizes=(("valid", 50),))
    task = make_masked_lm(data, mode, skip_masking=True)
    lines = data_utils.load_indexed_dataset(str(data / "valid"), task.source_dictionary)
    assert max(lines.sizes) > 32

    samples = load_samples(task, "valid")

    assert max(map(len, samples)) <= 32
    tokens_of_samples = [token for sample in samples for token in sample[1:]]
    tokens_of_lines = [token for line in lines for token in line.tolist()]
    assert tokens_of_samples == tokens_of_lines


@pytest.mark.parametrize(("name", "longest"), [("lln_masked_lm", 32), ("masked_lm", 33)])
def test_only_stock_fairseq_makes_samples_longer_than_tokens_per_sample(name, longest, tmp_path):
    data = make_corpus(tmp_path, sizes=(("valid", 50),))
    task = make_task(name, data, tokens_per_sample=32, sample_break_mode="complete", shorten_method="truncate")
    task.load_dataset("valid")
    assert task.dataset("valid").sizes[0].max() == longest


@pytest.mark.parametrize(("model_positions", "expected"), [(None, 16), (8, 16), (64, 64)])
def test_model_keeps_more_positions_than_the_task(model_positions, expected, tmp_path):
    task = make_classifier("lln_sentence_prediction", make_classification(tmp_path), max_positions=16)
    sizes = {"encoder_layers": 1, "encoder_embed_dim": 8, "encoder_ffn_embed_dim": 8, "encoder_attention_heads": 2}
    config = OmegaConf.create({"_name": "lln_roberta", "max_positions": model_positions, **sizes})

    model = task.build_model(config)

    assert model.max_positions() == config.max_positions == expected
    assert model.encoder.sentence_encoder.embed_positions.num_embeddings == expected + 2
    assert task.max_positions() == 16


def test_regression_has_one_target(tmp_path):
    data = make_classification(tmp_path)
    with pytest.raises(UserError, match=r"a regression has one target: set task\.num_classes=1, got 2"):
        make_task("lln_sentence_prediction", data, num_classes=2, regression_target=True)


def test_num_classes_must_match_labels(tmp_path):
    data = make_classification(tmp_path, sizes=(("valid", 5),))
    with pytest.raises(UserError, match=r"num_classes must be .*label/dict\.txt, 2 \(0, 1\), got 3"):
        make_task("lln_sentence_prediction", data, num_classes=3, regression_target=False)


@pytest.mark.parametrize("option", ["init_token", "separator_token"])
def test_token_option_must_be_in_dictionary(option, tmp_path):
    data = make_classification(tmp_path, sizes=(("valid", 5),))
    with pytest.raises(UserError, match=rf"task\.{option} must be .* in \[0, 64\], got 1000000000"):
        make_classifier("lln_sentence_prediction", data, **{option: 10**9})


@pytest.mark.parametrize("mode", ["eos", "none"])
def test_missing_split_is_named(mode, corpus):
    with pytest.raises(UserError, match="cannot load split 'test'"):
        make_masked_lm(corpus, mode).load_dataset("test")


def test_tasks_say_what_a_data_directory_has_instead(corpus, task_data, tmp_path):
    with pytest.raises(UserError, match=f"{task_data} has labeled rows, for a classifier"):
        make_masked_lm(task_data, "none")
    with pytest.raises(UserError, match=f"{corpus} has text without labels, but labeled rows are needed"):
        make_classifier("lln_sentence_prediction", corpus)
    regression = shutil.copytree(task_data, tmp_path / "regression")
    write_scores(regression)
    (regression / "label" / "dict.txt").unlink()
    with pytest.raises(
        UserError, match=r"has the numbers of a regression, but classes are needed: train with glue=stsb"
    ):
        make_classifier("lln_sentence_prediction", regression)
