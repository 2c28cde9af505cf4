"""Two workers on one machine log the same as one worker, their run resumes, and the loss of one ends the other."""

import re
import time

import pytest
from fairseq.logging.progress_bar import _tensorboard_writers

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from tests.fairseq_runs import (
    CLASSIFICATION,
    LLN,
    TRAINING,
    make_classification,
    read_log,
    split_options,
    train,
    write_scores,
)
from tests.workers import DISTRIBUTED, free_port, start_training

SCORED = split_options("--criterion lln_sentence_prediction --dropout 0 --attention-dropout 0 --probe-interval 3")
OPTIONS = (*TRAINING, *CLASSIFICATION, *LLN, *SCORED)


def start_worker(data, save_dir, *worker_options):
    folders = ("--save-dir", save_dir, "--tensorboard-logdir", save_dir / "tb")
    return start_training(data, *OPTIONS, *folders, *worker_options)


def train_with_two_workers(data, save_dir, *extra_options):
    """Train in two processes, and return the statistics that the first one has logged."""
    address = ("--distributed-init-method", f"tcp://127.0.0.1:{free_port()}", "--distributed-world-size", 2)
    common = (*DISTRIBUTED, *address, *extra_options)
    workers = [start_worker(data, save_dir, *common, "--distributed-rank", rank) for rank in (0, 1)]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    exit_codes = [worker.returncode for worker in workers]
    assert exit_codes == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    return read_log(outputs[0])


@pytest.mark.exhaustive
def test_two_workers_log_the_same_as_one_and_resume(tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data")
    batch = ("--batch-size", 4, "--global-batch", 8)
    two = train_with_two_workers(data, tmp_path / "two", *batch)
    _tensorboard_writers.clear()  # fairseq keeps them for the life of a process
    single_options = (*OPTIONS, "--global-batch", 8, "--tensorboard-logdir", tmp_path / "one" / "tb")
    one = train(monkeypatch, tmp_path / "log", data, tmp_path / "one", *single_options)

    for key in ("valid_loss", "valid_accuracy", "valid_f1", "valid_mcc"):
        assert float(two["valid"][0][key]) == pytest.approx(float(one["valid"][0][key]), abs=0.02), key
    curves = read_curves(tmp_path / "two" / "tb")
    expected_curves = read_curves(tmp_path / "one" / "tb")
    tags = [tag for tag in expected_curves if tag.startswith("attention/")]
    assert len(tags) == 12
    for tag in tags:  # the batches differ
        assert curves[tag].values == pytest.approx(expected_curves[tag].values, rel=0.06), tag
    assert len(list((tmp_path / "two" / "tb" / "probe").iterdir())) == 1  # only the first worker writes
    for tag in ("probe/entropy/layer_01", "probe/residual/layer_01"):
        assert curves[tag].steps == expected_curves[tag].steps == [0, 3]
        assert curves[tag].values[0] == pytest.approx(expected_curves[tag].values[0], rel=1e-6)

    resumed = train_with_two_workers(data, tmp_path / "two", *batch, "--max-update", 5)
    first_update = next(row for row in resumed["train"] if "train_inner" not in row)
    assert int(first_update["num_updates"]) == 4

    resume_options = (*OPTIONS, *batch, "--max-update", 6, "--tensorboard-logdir", tmp_path / "two" / "tb")
    train(monkeypatch, tmp_path / "resumed.log", data, tmp_path / "two", *resume_options)
    state = load_checkpoint_lazily(str(tmp_path / "two" / "checkpoint_last.pt"))["extra_state"]["train_iterator"]
    assert state["iterations_in_epoch"] == 2 * 6  # one worker has now processed the batches of both


@pytest.mark.exhaustive
def test_two_workers_correlate_all_rows_of_a_regression(tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data")
    write_scores(data)
    regression = split_options("--num-classes 1 --regression-target --lr 1e-9")  # the batches of both runs differ
    two = train_with_two_workers(data, tmp_path / "two", *regression, "--batch-size", 4)
    single_options = (*OPTIONS, *regression, "--tensorboard-logdir", tmp_path / "one" / "tb")
    one = train(monkeypatch, tmp_path / "log", data, tmp_path / "one", *single_options)

    assert len(two["train"]) == len(one["train"]) == 3
    for key in ("valid_loss", "valid_pearson", "valid_spearman", "valid_pearson_spearman"):
        assert float(two["valid"][0][key]) == pytest.approx(float(one["valid"][0][key]), abs=0.011), key


@pytest.mark.exhaustive
def test_killed_worker_ends_the_other_in_one_line(tmp_path):
    data = make_classification(tmp_path / "data")
    address = ("--distributed-init-method", f"tcp://127.0.0.1:{free_port()}", "--distributed-world-size", 2)
    endless = ("--max-update", 10**6, "--disable-validation", "--no-save", *DISTRIBUTED, *address)
    workers = [start_worker(data, tmp_path / "run", *endless, "--distributed-rank", rank) for rank in (0, 1)]
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
