"""Trainings in which four workers split their sequences compute the same as one worker.

The same four processes run several trainings, one after the other, because starting processes takes most of the time.
"""

import re
import time

import pytest
import torch
from fairseq.logging import metrics
from fairseq.logging.progress_bar import _tensorboard_writers

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.errors import UserError
from lln_fairseq.inference import evaluate
from lln_fairseq.models.token_shards import shard_bounds
from lln_fairseq.training.sequence_parallel import SequenceParallelism, shard_multiple
from tests.fairseq_runs import (
    CLASSIFICATION,
    MASKED_LM,
    TRAINING,
    USER_DIR,
    make_classification,
    make_corpus,
    split_options,
    train,
)
from tests.models.small_model import build_model
from tests.workers import DISTRIBUTED, free_port, run_workers, start_training

WORKERS = 4
SMALL_MODEL = split_options("--arch lln_roberta_tiny --dropout 0 --attention-dropout 0 --batch-size 4")
LEARNED = split_options("--rotary --lln-diag-gain learned --sample-break-mode eos --clip-norm 0.5")
SCORED = split_options("--criterion lln_sentence_prediction --probe-interval 2")
SCORES = {"valid_loss", "valid_accuracy", "valid_f1", "valid_mcc"}
# For each run: its data, its options, and the number of workers that share a sequence.
RUNS = {
    "masked": ("corpus", (*MASKED_LM, *SMALL_MODEL, "--max-update", 20), 2),
    "padded": ("corpus", (*MASKED_LM, *SMALL_MODEL, *LEARNED), 4),
    "blocks": ("corpus", (*MASKED_LM, *SMALL_MODEL, "--attention", "block_diag"), 4),
    "lln": ("corpus", (*MASKED_LM, *SMALL_MODEL, "--attention", "lln", "--checkpoint-activations"), 2),
    "classified": ("sentences", (*CLASSIFICATION, *SMALL_MODEL, *SCORED), 2),
    "fairseq's": ("sentences", (*CLASSIFICATION, *SMALL_MODEL, "--attention", "lln"), 4),
}
GROUPS = [("masked", "padded", "classified"), ("blocks", "lln", "fairseq's")]  # each is trained by the same processes


class RecordedMetrics:
    """A context that records the metrics of every update before fairseq rounds them, as a list of dictionaries."""

    def __enter__(self):
        self.log_scalar = metrics.log_scalar
        rows = []

        def record_and_log(key, value, *args, **kwargs):
            if key == "gnorm":  # the first metric of an update; a validation follows an update and has none
                rows.append({})
            if rows:
                rows[-1].setdefault(key, float(value))
            self.log_scalar(key, value, *args, **kwargs)

        metrics.log_scalar = record_and_log
        return rows

    def __exit__(self, *exc_info):
        metrics.log_scalar = self.log_scalar


def run_arguments(name, directory, update_freq):
    """Return the data directory, the save_dir and the options of a run."""
    data, run_options, _ = RUNS[name]
    save_dir = directory / f"{name}-{update_freq}"
    tensorboard = ("--tensorboard-logdir", save_dir / "tb")
    return directory / data, save_dir, *USER_DIR, *run_options, "--update-freq", update_freq, *tensorboard


def train_runs(rank, names, directory, port):
    """Train some of the runs as one of four workers. Return the metrics of each: of its updates and its validations."""
    results = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in names:
            group_size = RUNS[name][2]
            address = ("--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-rank", rank)
            workers = ("--distributed-world-size", WORKERS, "--sequence-parallel-size", group_size)
            # One group of four workers sees two batches per update, two groups of two see one batch each.
            data, save_dir, *run_options = run_arguments(name, directory, update_freq=group_size // 2)
            log_file = directory / f"log-{name}-{rank}"
            with RecordedMetrics() as updates:
                log = train(monkeypatch, log_file, data, save_dir, *run_options, *workers, *address, *DISTRIBUTED)
            results[name] = updates, log["valid"]
            _tensorboard_writers.clear()
    return results


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    make_corpus(directory / "corpus")
    make_classification(directory / "sentences")
    return directory


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", GROUPS, ids=" ".join)
def test_workers_that_split_sequences_train_like_one(names, directory, monkeypatch):
    results = run_workers(WORKERS, train_runs, names, directory, free_port())
    for name in names:
        check_run(name, directory, [result[name] for result in results], monkeypatch)
    if "classified" in names:
        check_evaluation(directory, last_scores=results[0]["classified"][1][-1])
    if "masked" in names:
        check_resume(directory, monkeypatch)


def check_run(name, directory, results, monkeypatch):
    """Check that one worker logs the same metrics and curves, and trains the same parameters."""
    data, save_dir, *run_options = run_arguments(name, directory, update_freq=2)
    save_dir = save_dir.with_name(f"{name}-single")
    tensorboard = ("--tensorboard-logdir", save_dir / "tb")
    _tensorboard_writers.clear()
    with RecordedMetrics() as expected_updates:
        log = train(monkeypatch, directory / f"log-{name}", data, save_dir, *run_options, *tensorboard)
    assert len(expected_updates) == (20 if name == "masked" else 3)

    for updates, _ in results:
        assert [update.keys() for update in updates] == [update.keys() for update in expected_updates]
        for key in ("loss", "gnorm", "wpb", "bsz", "accuracy"):
            if key in expected_updates[0]:
                expected = [update[key] for update in expected_updates]
                assert [update[key] for update in updates] == pytest.approx(expected, rel=1e-5), key
    for scores, expected_scores in zip(results[0][1], log["valid"], strict=True):
        for key in SCORES & expected_scores.keys():
            assert float(scores[key]) == pytest.approx(float(expected_scores[key]), abs=1.1e-3), key

    shared_dir = directory / f"{name}-{RUNS[name][2] // 2}"
    check_same_model(shared_dir, save_dir)
    check_same_curves(shared_dir, save_dir)


def check_same_model(directory, expected_directory):
    model = torch.load(directory / "checkpoint_last.pt", weights_only=False)["model"]
    expected_model = torch.load(expected_directory / "checkpoint_last.pt", weights_only=False)["model"]
    assert model.keys() == expected_model.keys()
    for key in model:
        torch.testing.assert_close(model[key], expected_model[key], rtol=0, atol=1e-4, msg=key)


def check_same_curves(directory, expected_directory):
    curves = read_curves(directory / "tb")
    expected_curves = read_curves(expected_directory / "tb")
    assert curves.keys() == expected_curves.keys()
    tags = [tag for tag in curves if tag.startswith(("attention/", "probe/")) and tag != "probe/seconds"]
    assert len(tags) >= 6
    for tag in tags:
        assert curves[tag].values == pytest.approx(expected_curves[tag].values, rel=1e-4, nan_ok=True), tag


def check_evaluation(directory, last_scores):
    """Check that one process gives the scores of the last validation to a checkpoint of four workers."""
    checkpoint = directory / "classified-1" / "checkpoint_last.pt"
    model, task = evaluate.load_finetuned_model(str(checkpoint), str(directory / "sentences"))
    scores = evaluate.compute_scores(task, evaluate.compute_outputs(model, task, "valid"))
    assert 100 * scores["accuracy"] == pytest.approx(float(last_scores["valid_accuracy"]), abs=0.01)
    assert scores["loss"] == pytest.approx(float(last_scores["valid_loss"]), abs=1e-3)


def check_resume(directory, monkeypatch):
    """Check that one process resumes a run of four workers."""
    data, _, *run_options = run_arguments("masked", directory, update_freq=2)
    resume_options = ("--max-update", 22, "--tensorboard-logdir", directory / "resumed")
    with RecordedMetrics() as updates:
        train(monkeypatch, directory / "log-resumed", data, directory / "masked-1", *run_options, *resume_options)
    assert len(updates) == 2


@pytest.mark.parametrize(
    ("tokens", "workers", "multiple", "lengths"),
    [
        (128, 2, 64, [64, 64]),
        (130, 2, 64, [64, 66]),
        (97, 4, 1, [25, 24, 24, 24]),
        (100, 4, 64, [64, 0, 0, 36]),
        (41, 4, 16, [16, 0, 16, 9]),
        (5, 3, 16, [0, 0, 5]),
        (3, 4, 1, [1, 1, 1, 0]),
        (0, 2, 16, [0, 0]),
    ],
)
def test_shards_are_whole_blocks_except_for_the_last(tokens, workers, multiple, lengths):
    shards = shard_bounds(tokens, workers, multiple)
    assert [end - start for start, end in shards] == lengths
    assert [start for start, _ in shards] == [0, *(end for _, end in shards[:-1])]


def random_numbers_of_two_batches(rank, monkeypatch):
    """Return the random numbers that a worker draws after `seed_dropout` in two batches of an update."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    parallelism = SequenceParallelism(cfg=None)
    parallelism.group = "a group"
    torch.manual_seed(5)
    numbers = []
    for _ in range(2):
        parallelism.seed_dropout()
        numbers.append(torch.rand(2).tolist())
    return numbers


def test_dropout_differs_between_workers_and_batches(monkeypatch):
    numbers = [random_numbers_of_two_batches(rank, monkeypatch) for rank in range(3)]
    assert len({str(batch) for worker in numbers for batch in worker}) == 6
    assert numbers == [random_numbers_of_two_batches(rank, monkeypatch) for rank in range(3)]
    torch.manual_seed(5)
    assert numbers[0] == torch.rand(2, 2).tolist()  # the first worker draws the same as without groups


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "softmax"}, "attention softmax cannot split a sequence across workers"),
        ({"attention": "window"}, "attention window .*cannot split a sequence across workers"),
        ({"attention": "performer"}, "attention performer with .* cannot split a sequence across workers"),
        ({"lln_diag_mix": "joint_offset"}, "lln_diag with .*mix=joint_offset.* cannot split a sequence across workers"),
        ({"encoder_layerdrop": 0.2}, "does not work with --encoder-layerdrop"),
        ({"pair_form": "bert"}, "does not work with --pair-form bert"),
    ],
)
def test_unsupported_model_is_rejected_by_name(options, message):
    with pytest.raises(UserError, match=message) as error:
        shard_multiple(build_model(**options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [0, 2])
def test_group_size_must_divide_number_of_workers(size, directory, monkeypatch):
    data, _, *run_options = run_arguments("masked", directory, update_freq=1)
    with pytest.raises(UserError, match=f"must divide the number of workers, 1 .* got {size}"):
        train(
            monkeypatch,
            directory / "log-rejected",
            data,
            directory / "rejected",
            *run_options,
            "--sequence-parallel-size",
            size,
        )


@pytest.mark.exhaustive
def test_killed_worker_ends_the_other_in_one_line(directory):
    data, _, *run_options = run_arguments("masked", directory, update_freq=1)
    endless = ("--max-update", 10**6, "--disable-validation", "--no-save", "--save-dir", directory / "killed")
    address = ("--distributed-init-method", f"tcp://127.0.0.1:{free_port()}")
    group = (*DISTRIBUTED, *address, "--distributed-world-size", 2, "--sequence-parallel-size", 2)
    options = (*TRAINING, *run_options, *endless, *group)
    workers = [start_training(data, *options, "--distributed-rank", rank) for rank in (0, 1)]
    try:
        for line in workers[0].stdout:
            if "train_inner" in line:
                break
        begin = time.monotonic()
        workers[1].kill()
        output = workers[0].communicate(timeout=60)[0]
    finally:
        for worker in workers:
            worker.kill()

    assert time.monotonic() - begin < 30
    assert workers[0].returncode == 1
    assert "Traceback" not in output
    (error,) = [line for line in output.splitlines() if "error: " in line]
    expected = r"(\[rank0\]: )?error: another worker of this training has ended .* by peer\)"
    assert re.fullmatch(expected, error), output[-2000:]
