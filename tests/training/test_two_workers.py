"""Two workers on one machine: the same metrics and scalars as one, and a resume."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fairseq.logging.progress_bar import _tensorboard_writers

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.checkpoints.reading import load_checkpoint_lazily
from tests.fairseq_runs import CLASSIFICATION, TRAINING, make_classification, read_log, train
from tests.workers import free_port

ROOT = Path(__file__).parents[2]
FAIRSEQ_TRAIN = "import lln_fairseq; lln_fairseq.register(); from fairseq_cli.train import cli_main; cli_main()"
OPTIONS = (*TRAINING, *CLASSIFICATION, "--criterion", "lln_sentence_prediction", "--user-dir", ROOT / "lln_fairseq",
           "--arch", "lln_roberta_tiny", "--dropout", 0, "--attention-dropout", 0, "--probe-interval", 3)  # fmt: skip


def start(data, save_dir, *options):
    command = [sys.executable, "-c", FAIRSEQ_TRAIN, data, *OPTIONS, "--save-dir", save_dir,
               "--tensorboard-logdir", save_dir / "tb", *options]  # fmt: skip
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def two_workers(data, save_dir, *options):
    common = ("--distributed-world-size", 2, "--distributed-init-method", f"tcp://127.0.0.1:{free_port()}",
              "--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")  # fmt: skip
    workers = [start(data, save_dir, *common, "--distributed-rank", rank, *options) for rank in range(2)]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    return read_log(outputs[0])


@pytest.mark.exhaustive
def test_two_workers_measure_what_one_does_and_resume(tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data")
    two = two_workers(data, tmp_path / "two", "--batch-size", 4, "--global-batch", 8)
    _tensorboard_writers.clear()  # fairseq keeps one for the life of a process
    one = train(monkeypatch, tmp_path / "log", data, tmp_path / "one", *OPTIONS, "--global-batch", 8,
                "--tensorboard-logdir", tmp_path / "one" / "tb")  # fmt: skip
    for key in ("valid_loss", "valid_accuracy", "valid_f1", "valid_mcc"):
        assert float(two["valid"][0][key]) == pytest.approx(float(one["valid"][0][key]), abs=0.02), key
    ours, theirs = (read_curves(tmp_path / run / "tb") for run in ("two", "one"))
    tags = [tag for tag in theirs if tag.startswith("attention/")]
    assert len(tags) == 12
    for tag in tags:
        assert ours[tag].values == pytest.approx(theirs[tag].values, rel=0.06), tag  # other batches
    assert len(list((tmp_path / "two" / "tb" / "probe").iterdir())) == 1  # the first worker's alone
    for tag in ("probe/entropy/layer_01", "probe/residual/layer_01"):
        assert ours[tag].steps == theirs[tag].steps == [0, 3]
        assert ours[tag].values[0] == pytest.approx(theirs[tag].values[0], rel=1e-6)
    again = two_workers(data, tmp_path / "two", "--batch-size", 4, "--global-batch", 8, "--max-update", 5)
    assert next(int(row["num_updates"]) for row in again["train"] if "train_inner" not in row) == 4
    train(monkeypatch, tmp_path / "alone.log", data, tmp_path / "two", *OPTIONS, "--batch-size", 4, "--global-batch", 8,
          "--max-update", 6, "--tensorboard-logdir", tmp_path / "two" / "tb")  # fmt: skip
    state = load_checkpoint_lazily(str(tmp_path / "two" / "checkpoint_last.pt"))["extra_state"]["train_iterator"]
    assert state["iterations_in_epoch"] == 2 * 6  # batches of the one that goes on with what two have left


@pytest.mark.exhaustive
def test_two_workers_score_a_regression_as_one_does(tmp_path, monkeypatch):
    data = make_classification(tmp_path / "data")
    for split, rows in (("train", 60), ("valid", 11)):
        (data / "label" / f"{split}.label").write_text("".join(f"{row % 5}.5\n" for row in range(rows)))
    regression = ("--num-classes", 1, "--regression-target", "--batch-size", 4, "--probe-interval", 0)
    two = two_workers(data, tmp_path / "two", *regression)
    _tensorboard_writers.clear()  # fairseq keeps one for the life of a process
    one = train(monkeypatch, tmp_path / "log", data, tmp_path / "one", *OPTIONS, *regression, "--update-freq", 2)
    for key in ("valid_loss", "valid_pearson", "valid_spearman"):
        assert two["valid"][0][key] == one["valid"][0][key], key
