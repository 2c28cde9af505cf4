"""Trainings in which workers share sequences: what one worker computes, on four.

The four workers do several trainings, one after the other, in the same processes.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.logging.progress_bar import _tensorboard_writers
from fairseq.options import get_training_parser, parse_args_and_arch
from omegaconf import OmegaConf

from lln_fairseq.analysis.events import read_curves
from lln_fairseq.errors import InputError
from lln_fairseq.inference import evaluate
from lln_fairseq.models import LLNRobertaModel
from lln_fairseq.modules.token_shards import shard_bounds
from lln_fairseq.training.sequence_parallel import SequenceSharing, shard_multiple
from lln_fairseq.training.settings import split_global_batch
from tests.fairseq_runs import (
    CLASSIFICATION,
    MASKED_LM,
    TRAINING,
    USER_DIR,
    make_classification,
    make_corpus,
    train,
)
from tests.helpers import with_representatives
from tests.workers import free_port, run_workers

ROOT = Path(__file__).parents[2]
WORKERS = 4
PLAIN = ("--arch", "lln_roberta_tiny", "--dropout", 0, "--attention-dropout", 0, "--batch-size", 4)
LEARNED = ("--lln-diag-gain", "learned", "--lln-diag-mix", "ratio")
PROBED = ("--probe-interval", 2)
SCORES = {"valid_loss", "valid_accuracy", "valid_f1", "valid_mcc"}
# name: (kind of data, options, workers that share a sequence)
RUNS = {
    "masked": ("corpus", (*MASKED_LM, *PLAIN, "--max-update", 20), 2),
    "padded": ("corpus", (*MASKED_LM, *PLAIN, *LEARNED, "--sample-break-mode", "eos", "--clip-norm", 0.5), 4),
    "blocks": ("corpus", (*MASKED_LM, *PLAIN, "--attention", "block_diag"), 4),
    "lln": ("corpus", (*MASKED_LM, *PLAIN, "--attention", "lln", "--checkpoint-activations"), 2),
    "classified": ("sentences", (*CLASSIFICATION, "--criterion", "lln_sentence_prediction", *PLAIN, *PROBED), 2),
    "fairseq's": ("sentences", (*CLASSIFICATION, *PLAIN, "--attention", "lln"), 4),
}

GROUPS = [("masked", "padded", "classified"), ("blocks", "lln", "fairseq's")]  # each trained by the same four workers


class Recorded:
    """What fairseq logs of every update, before it is rounded; `with Recorded() as rows`."""

    def __enter__(self):
        self.original, rows = metrics.log_scalar, []

        def log(key, value, *args, **kw):
            if key == "gnorm":  # the first of an update; a validation has none, and comes after all of an update
                rows.append({})
            if rows:
                rows[-1].setdefault(key, float(value))
            self.original(key, value, *args, **kw)

        metrics.log_scalar = log
        return rows

    def __exit__(self, *_):
        metrics.log_scalar = self.original


def options_of(name, directory, frequency):
    kind, options, _ = RUNS[name]
    return (directory / kind, directory / f"{name}-{frequency}", *USER_DIR, *options, "--update-freq", frequency,
            "--tensorboard-logdir", directory / f"{name}-{frequency}" / "tb")  # fmt: skip


def train_all(rank, names, directory, port):
    """Some of the runs, by one of four workers."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in names:
            size = RUNS[name][2]
            shared = ("--distributed-world-size", WORKERS, "--distributed-rank", rank, "--distributed-init-method",
                      f"tcp://127.0.0.1:{port}", "--distributed-no-spawn", "--distributed-backend", "gloo",
                      "--ddp-backend", "legacy_ddp", "--sequence-parallel-size", size)  # fmt: skip
            # fewer groups see several batches for an update
            data, save_dir, *options = options_of(name, directory, size // 2)
            with Recorded() as rows:
                log = train(monkeypatch, directory / f"log-{name}-{rank}", data, save_dir, *options, *shared)
            found[name] = rows, log["valid"]
            _tensorboard_writers.clear()
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    make_corpus(directory / "corpus")
    make_classification(directory / "sentences")
    return directory


@pytest.mark.parametrize("names", with_representatives(GROUPS, GROUPS[0]), ids=" ".join)
def test_workers_that_share_sequences_train_as_one_does(names, directory, monkeypatch):
    shared = run_workers(WORKERS, train_all, names, directory, free_port())
    for name in names:
        check_run(name, directory, shared, monkeypatch)
    if "masked" in names:
        check_one_goes_on(directory, shared, monkeypatch)


def check_run(name, directory, shared, monkeypatch):
    """The same figures, parameters and curves as one worker's."""
    data, save_dir, *options = options_of(name, directory, 2)
    save_dir = save_dir.with_name(f"{name}-alone")
    _tensorboard_writers.clear()
    with Recorded() as alone:
        log = train(
            monkeypatch, directory / f"log-{name}", data, save_dir, *options, "--tensorboard-logdir", save_dir / "tb"
        )
    assert len(alone) == (20 if name == "masked" else 3)
    for rows, _ in (found[name] for found in shared):
        assert [row.keys() for row in rows] == [row.keys() for row in alone]
        for key in ("loss", "gnorm", "wpb", "bsz", *(["accuracy"] if "accuracy" in alone[0] else [])):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in alone], rel=1e-5), key
    for ours, theirs in zip(shared[0][name][1], log["valid"], strict=True):
        for key in SCORES & theirs.keys():
            assert float(ours[key]) == pytest.approx(float(theirs[key]), abs=1.1e-3), key

    together = directory / f"{name}-{RUNS[name][2] // 2}"
    ours, theirs = (
        torch.load(path / "checkpoint_last.pt", weights_only=False)["model"] for path in (together, save_dir)
    )
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-4, msg=key)
    ours, theirs = (read_curves(path / "tb") for path in (together, save_dir))
    assert ours.keys() == theirs.keys()
    found = [tag for tag in theirs if tag.startswith(("attention/", "probe/")) and tag != "probe/seconds"]
    assert len(found) >= 6
    for tag in found:
        assert ours[tag].values == pytest.approx(theirs[tag].values, rel=1e-4, nan_ok=True), tag


def check_one_goes_on(directory, shared, monkeypatch):
    """One process evaluates what workers trained together, and goes on with it."""
    model, task = evaluate.load_finetuned_model(
        str(directory / "classified-1" / "checkpoint_last.pt"), str(directory / "sentences")
    )
    scores = evaluate.compute_scores(task, evaluate.compute_outputs(model, task, "valid"))
    last = shared[0]["classified"][1][-1]
    assert 100 * scores["accuracy"] == pytest.approx(float(last["valid_accuracy"]), abs=0.01)
    assert scores["loss"] == pytest.approx(float(last["valid_loss"]), abs=1e-3)
    data, _, *options = options_of("masked", directory, 2)
    with Recorded() as rows:
        train(monkeypatch, directory / "log-again", data, directory / "masked-1", *options, "--max-update", 22,
              "--tensorboard-logdir", directory / "again")  # fmt: skip
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("tokens", "workers", "multiple", "lengths"),
    [(128, 2, 64, [64, 64]), (130, 2, 64, [64, 66]), (97, 4, 1, [25, 24, 24, 24]), (100, 4, 64, [64, 0, 0, 36]),
     (41, 4, 16, [16, 0, 16, 9]), (5, 3, 16, [0, 0, 5]), (3, 4, 1, [1, 1, 1, 0]), (0, 2, 16, [0, 0])],
)  # fmt: skip
def test_parts_are_whole_blocks_but_for_the_last(tokens, workers, multiple, lengths):
    parts = shard_bounds(tokens, workers, multiple)
    assert [end - start for start, end in parts] == lengths
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]


def test_dropout_is_another_in_every_part(monkeypatch):
    def drawn(rank):
        """In two batches of an update."""
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
        sharing = SequenceSharing(cfg=None)
        sharing.group = "a group"
        torch.manual_seed(5)
        found = []
        for _ in range(2):
            sharing.seed_dropout()
            found.append(torch.rand(2).tolist())
        return found

    found = [drawn(rank) for rank in range(3)]
    assert found == [drawn(rank) for rank in range(3)]
    assert len({str(values) for worker in found for values in worker}) == 6
    torch.manual_seed(5)
    assert found[0] == torch.rand(2, 2).tolist()  # as without groups


def model_of(*options):
    arguments = [str(ROOT), "--arch", "lln_roberta_tiny", *map(str, options)]
    parser = get_training_parser()
    args = parse_args_and_arch(parser, [*arguments, *map(str, MASKED_LM), *map(str, TRAINING)])
    dictionary = Dictionary()
    task = SimpleNamespace(source_dictionary=dictionary, max_positions=lambda: 64)
    return LLNRobertaModel.build_model(convert_namespace_to_omegaconf(args).model, task)


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--attention", "softmax"), "attention softmax cannot share a sequence over workers"),
     (("--attention", "performer"), "attention performer with .* cannot share a sequence over workers"),
     (("--lln-diag-mix", "joint"), "attention lln_diag with .*mix=joint cannot share a sequence over workers"),
     (("--encoder-layerdrop", 0.2), "does not work with --encoder-layerdrop")],
)  # fmt: skip
def test_models_that_cannot_are_refused_by_name(options, message):
    with pytest.raises(InputError, match=message) as error:
        shard_multiple(model_of(*options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [0, 2])
def test_workers_must_come_in_whole_groups(size, directory, monkeypatch):
    data, _, *options = options_of("masked", directory, 1)
    with pytest.raises(InputError, match=f"is {size}, and must be a divisor of the number of workers, 1 "):
        train(monkeypatch, directory / "log-refused", data, directory / "refused", *options,
              "--sequence-parallel-size", size)  # fmt: skip


@pytest.mark.parametrize(("wanted", "given", "size", "frequency"), [(32, 4, 4, 4), (4, 4, 2, 1), (6, 4, 3, 1)])
def test_a_global_batch_is_split_over_groups(wanted, given, size, frequency):
    """Of four workers, two a sequence."""
    cfg = OmegaConf.create({
        "task": {"global_batch": wanted, "sequence_parallel_size": 2}, "dataset": {"batch_size": given},
        "distributed_training": {"distributed_world_size": 4}, "optimization": {"update_freq": [1]},
    })  # fmt: skip
    split_global_batch(cfg)
    assert (cfg.dataset.batch_size, cfg.optimization.update_freq) == (size, [frequency])


@pytest.mark.exhaustive
def test_a_worker_that_is_killed_ends_the_others_in_one_line(directory):
    program = "import lln_fairseq; lln_fairseq.register(); from fairseq_cli.train import cli_main; cli_main()"
    data, _, *options = options_of("masked", directory, 1)
    address = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", program, data, *TRAINING, *options, "--max-update", 10**6, "--save-dir",
               directory / "killed", "--distributed-world-size", 2, "--distributed-init-method", address,
               "--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp",
               "--sequence-parallel-size", 2, "--disable-validation", "--no-save", "--distributed-rank"]  # fmt: skip
    workers = [
        subprocess.Popen([*map(str, command), str(rank)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(2)
    ]  # fmt: skip
    try:
        for line in workers[0].stdout:
            if "train_inner" in line:
                break
        begin = time.monotonic()
        workers[1].kill()
        said = workers[0].communicate(timeout=60)[0]
    finally:
        for worker in workers:
            worker.kill()
    assert time.monotonic() - begin < 30
    assert workers[0].returncode == 1
    assert "Traceback" not in said
    (last,) = [line for line in said.splitlines() if "error: " in line]
    assert re.fullmatch(r"(\[rank0\]: )?error: another worker of this training has ended .* by peer\)", last), said[
        -2000:
    ]
