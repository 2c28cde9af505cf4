"""Tests of scripts/gpu_run.sh: a rehearsal, the limits of time, the folder that it packs, and the search for tiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lln_fairseq.ops.backends.triton import launch
from scripts import compare_attentions
from scripts.benchmarks import attention, gpu, model, tiles
from tests.fairseq_runs import make_classification, make_corpus

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_run.sh"


def run_script(folder, *arguments, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run([SCRIPT, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.exhaustive
def test_rehearsal_reports_the_steps_that_ran(tmp_path):
    done = run_script(tmp_path, "--rehearse", "kernels", "attention")

    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "runs" / "rehearsal" / "report.txt").read_text()
    for text in ("1 passed", "vs sdpa", "== training: NOT COMPLETE"):
        assert text in report


@pytest.mark.parametrize("commands", [gpu.step_commands, gpu.rehearsal_commands])
def test_commands_of_the_steps_are_valid(commands, tmp_path):
    arguments = {name: command[3:] for name, command in commands(tmp_path).items()}

    attention.parse_arguments(arguments["attention"])
    model.parse_arguments(arguments["model"])
    args = compare_attentions.parse_arguments(arguments["training"])
    overrides = compare_attentions.Overrides(args)
    pretraining = compare_attentions.compose_config("pretrain", overrides.for_pretraining("lln", 1))
    finetuning = compare_attentions.compose_config("finetune", overrides.for_finetuning("lln", 1, "sst2", args.data))

    assert (pretraining.optimization.max_update, finetuning.optimization.max_update) in [(200000, 1500), (2, 2)]


@pytest.fixture
def run_steps(tmp_path, monkeypatch):
    """Return a function that runs commands as steps of a minute each and returns the exit code and the report."""

    def run(commands, *arguments):
        monkeypatch.setattr(gpu, "MINUTES", dict.fromkeys(commands, 1))
        monkeypatch.setattr(gpu, "rehearsal_commands", lambda out: commands)
        code = gpu.main(["--rehearse", "--out", str(tmp_path), *arguments])
        return code, (tmp_path / "report.txt").read_text()

    return run


def python(code):
    return [sys.executable, "-c", code]


def test_failed_step_does_not_stop_the_next_and_runs_again(run_steps):
    code, report = run_steps({"first": python("exit('out of luck')"), "second": python("print('two')")})
    assert code == 1
    assert "== first: NOT COMPLETE\nout of luck" in report
    assert "== second: 0 s\ntwo" in report

    code, report = run_steps({"first": python("print('one')"), "second": python("print('two')")})
    assert code == 0
    assert report.count("two") == 1


def test_steps_after_the_time_limit_do_not_start(run_steps):
    slow = python("import time; print('begun', flush=True); time.sleep(60)")

    code, report = run_steps({"slow": slow, "next": python("print('after')")}, "--minutes", "0.02")

    assert code == 1
    assert "== slow: NOT COMPLETE" in report
    assert "== next: NOT COMPLETE" in report
    assert "after" not in report


def test_packed_folder_holds_checkout_and_data(tmp_path):
    """Instead of pip, a script makes the folder of the wheels."""
    make_corpus(tmp_path / "data-bin" / "wikitext-103")
    make_classification(tmp_path / "data-bin" / "glue" / "SST-2")
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\nwhile [ "$1" != --wheel-dir ]; do shift; done\nmkdir "$2"\n')
    pip.chmod(0o755)

    done = run_script(tmp_path, "--pack", "packed", PYTHON=str(pip))

    assert done.returncode == 0, done.stderr
    for name in (
        "scripts/gpu_run.sh",
        "data-bin/wikitext-103/train.bin",
        "data-bin/glue/SST-2/label/dict.txt",
        "wheels",
    ):
        assert (tmp_path / "packed" / name).exists()


def test_tile_search_keeps_the_fastest(monkeypatch, capsys):
    key = (90, 2, 64)
    before = launch.TILES[key]
    current = before.state
    milliseconds_by_stages = {current.stages: 2.0, 1: 1.0, 3: 4.0}
    monkeypatch.setattr(launch, "capability", lambda device: 90)
    monkeypatch.setitem(launch.TILES, key, before)  # restores it after the test
    monkeypatch.setattr(tiles, "candidate_tiles", lambda tile: [tile._replace(stages=1), tile._replace(stages=3)])
    monkeypatch.setattr(
        tiles, "milliseconds", lambda run, device: milliseconds_by_stages[launch.TILES[key].state.stages]
    )
    sizes = ["--device", "cpu", "--tokens", "32", "--length", "32", "--heads", "1", "--dim", "16", "--repeats", "1"]

    assert tiles.main([*sizes, "--kernels", "state"]) == 0

    assert launch.TILES[key].state == current._replace(stages=1)
    assert "fastest" in capsys.readouterr().out
