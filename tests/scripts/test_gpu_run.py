"""scripts/gpu_run.sh: its order and limits, the folder it packs, the report, and a whole rehearsal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lln_fairseq.ops.backends.triton import launch
from scripts.benchmarks import tiles
from scripts.experiments import compare_attentions
from scripts.gpu import pack, predict, results, run, schedule
from tests.fairseq_runs import make_classification, make_corpus

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_run.sh"


def says(text, code=0, seconds=0.0):
    """A command that says something, takes so long and ends with this code."""
    return [sys.executable, "-c", f"import time; print({text!r}, flush=True); time.sleep({seconds}); exit({code})"]


@pytest.fixture
def run_steps(tmp_path, monkeypatch):
    """A function that runs steps made of these commands, by name; returns the exit code."""

    def call(commands, *arguments, minutes=1.0, always=()):
        made = tuple(
            schedule.Step(name, minutes, lambda out, _, c=c: c, name in always) for name, c in commands.items()
        )
        monkeypatch.setattr(run, "STEPS", made)
        return run.main(["--out", str(tmp_path / "out"), "--steps", f"1-{len(made)}", *arguments])

    return call


def test_a_step_that_fails_does_not_stop_the_next_and_what_ended_is_not_run_again(run_steps, tmp_path, capsys):
    commands = {"first": [says("one", 3)], "second": [says("two"), says("three")]}
    assert run_steps(commands) == 1
    out = capsys.readouterr().out
    assert [word for word in ("one", "two", "three") if word in out] == ["one", "two", "three"]
    assert "first-1: exit code 3, see" in out
    assert json.loads((tmp_path / "out" / "steps.json").read_text()) == {"first-1": 3, "second-1": 0, "second-2": 0}
    assert run_steps(commands) == 1
    assert capsys.readouterr().out.count("done before") == 3
    assert (tmp_path / "out" / "logs" / "second-2.log").read_text() == "three\n"


def test_what_takes_too_long_is_cut_off_and_goes_on_the_next_time(run_steps, tmp_path, capsys):
    slow = {"slow": [says("begun", seconds=60)], "next": [says("after")]}
    assert run_steps(slow, minutes=0.02) == 1
    assert json.loads((tmp_path / "out" / "steps.json").read_text()) == {"slow-1": "cut off", "next-1": 0}
    assert run_steps({**slow, "slow": [says("begun")]}) == 0
    assert "next-1: done before" in capsys.readouterr().out


def test_no_time_is_left_for_what_comes_after_the_limit(run_steps, tmp_path):
    assert run_steps({"slow": [says("begun", seconds=60)], "next": [says("after")]}, "--minutes", "0.02") == 1
    assert json.loads((tmp_path / "out" / "steps.json").read_text()) == {"slow-1": "cut off", "next-1": "cut off"}
    assert not (tmp_path / "out" / "logs" / "next-1.log").exists()


def test_the_report_is_made_when_the_time_is_over_and_every_time(run_steps, tmp_path, capsys):
    commands = {"slow": [says("begun", seconds=60)], "report": [says("all of it")]}
    for _ in range(2):
        assert run_steps(commands, "--minutes", "1.02", always=("report",)) == 1
        assert "all of it" in capsys.readouterr().out
        assert json.loads((tmp_path / "out" / "steps.json").read_text()) == {"slow-1": "cut off", "report-1": 0}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"first-1": null}', '{"first-1": "well"}'])
def test_a_damaged_list_of_results_is_begun_again(text, run_steps, tmp_path, capsys):
    file = tmp_path / "out" / "steps.json"
    file.parent.mkdir()
    file.write_text(text)
    assert run_steps({"first": [says("one")]}) == 0
    assert f"{file} is damaged: its commands are run again" in capsys.readouterr().out
    assert json.loads(file.read_text()) == {"first-1": 0}


def test_a_rehearsal_and_a_run_do_not_share_a_directory(run_steps, capsys):
    assert run_steps({"first": [says("one")]}, "--rehearse") == 0
    assert run_steps({"first": [says("one")]}) == 1
    assert "rehearsal.json: a rehearsal and a run on a GPU do not share a directory" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "7", "2-9", "a", ""])
def test_steps_that_there_are_not(text, capsys):
    with pytest.raises(SystemExit):
        run.main(["--steps", text])
    assert "--steps" in capsys.readouterr().err


def test_numbers_of_steps():
    assert run.numbers("6,1-3,2") == [6, 1, 2, 3]


@pytest.mark.parametrize("rehearsal", [False, True])
def test_the_overrides_of_the_trainings_compose(rehearsal, tmp_path):
    (compare,) = [c for c in schedule.training(tmp_path, rehearsal) if "compare_attentions" in c[2]]
    args = compare_attentions.parse(compare[3:])
    overrides = compare_attentions.Overrides(args)
    config = compare_attentions.configuration("pretrain", overrides.of_pretraining(args.attentions[0], 1))
    assert config.optimization.max_update == (4 if rehearsal else 200000)
    assert (config.optimization.get("stop_time_hours") or 0) == (0 if rehearsal else 0.05)
    for task in overrides.tasks:
        compare_attentions.configuration("finetune", overrides.of_finetuning(args.attentions[0], 1, task, args.data))


def test_every_file_that_a_step_names_is_there():
    assert all(Path(test).is_file() for test in schedule.KERNEL_TESTS)


def make_data(folder):
    make_corpus(folder / "data-bin" / "wikitext-103")
    make_classification(folder / "data-bin" / "glue" / "SST-2")


def test_rehearsal(tmp_path):
    make_data(tmp_path)
    done = subprocess.run(
        [SCRIPT, "--rehearse"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    out = tmp_path / "runs" / "rehearsal"
    results = json.loads((out / "rehearsal.json").read_text())
    assert set(results.values()) == {0}, done.stdout + done.stderr
    assert done.returncode == 0
    assert {name.rpartition("-")[0] for name in results} == {step.name for step in schedule.STEPS}
    text = (out / "report.txt").read_text()
    assert "kernel tests: 1 tests, 0 failures, 0 errors" in text
    assert "killed training: resumed at update " in text
    assert "sst2 valid [%]" in text
    assert "FALLS SHORT" not in text  # nothing is judged by an interpreter's times
    assert {path.name for path in (out / "figures").glob("*.png")} >= {"figure_1.png", "figure_8.png", "figure_9.png"}


ROW = {"mechanism": "lln_diag", "dtype": "float16", "batch": 8, "heads": 12, "length": 4096, "dim": 64, "error": 1e-3,
       "floor_ms": 0.06, "ours_ms": 0.1, "flash_ms": 0.5, "torch_ms": 0.3, "graph_ms": 0.09, "ours_mb": 1.0,
       "flash_mb": 2.0}  # fmt: skip


def test_the_report_says_what_falls_short_and_what_is_missing(tmp_path):
    rows = [{**ROW, "direction": "forward"}, {**ROW, "direction": "both", "floor_ms": 0.07}]
    (tmp_path / "attention_float16.json").write_text(json.dumps({"rows": rows}))
    text = results.report(tmp_path)
    assert "LLN+Diag forward, of the floor: 0.60 (at 4096), wanted 0.7: FALLS SHORT" in text
    assert "forward and backward, of the floor: 0.70 (at 4096), wanted 0.6: holds" in text
    assert "against flash at 4096: 5.00 (at 4096), wanted 4.0: holds" in text
    assert "against flash at 16384" not in text
    assert "device.json: not measured" in text
    assert "killed training: not resumed" in text


def test_a_patch_of_the_table_of_tiles_applies(tmp_path):
    key = (90, 2, 64)
    changed = launch.TILES[key]._replace(dkv=launch.Tile(16, 4, 3, 128), joint_dkv=launch.Tile(64, 8, 2))
    patch = tmp_path / "tiles.patch"
    patch.write_text(tiles.patch_of(key, changed))
    target = tmp_path / "lln_fairseq" / "ops" / "backends" / "triton" / "launch.py"
    target.parent.mkdir(parents=True)
    target.write_text(Path(launch.__file__).read_text())
    subprocess.run(["git", "apply", "--directory", "", str(patch)], cwd=tmp_path, check=True)
    scope = {"__name__": "launch"}
    exec(compile(target.read_text(), "launch.py", "exec"), scope)
    assert tuple(scope["TILES"][key].dkv) == (16, 4, 3, 128)
    assert [tuple(tile) for tile in scope["TILES"][key]] == [tuple(tile) for tile in changed]


def test_loops_are_counted_as_often_as_they_run():
    code = [(0, "MOV R1, R2"), (16, "MUFU.EX2 R1, R1"), (32, "@P0 BRA 0x10"), (48, "FADD R1, R1"), (64, "@P1 BRA 0x0"),
            (80, "BRA 0x70"), (96, "EXIT")]  # fmt: skip
    assert predict.dynamic_count(code, [3, 5]) == (3 * (1 + 5 * 2 + 2) + 2, 3 * 5)
    assert predict.dynamic_count(code[:3], [3, 5]) == (1 + 3 * 2, 3)


def test_programs_that_a_multiprocessor_holds():
    h100 = predict.DEVICES[90]
    assert predict.resident_programs(246, 4, 32768, h100) == 2  # by registers
    assert predict.resident_programs(32, 4, 65536, h100) == 3  # by shared memory
    assert predict.resident_programs(16, 8, 0, h100) == 8  # by warps


def test_predictions_come_from_compiled_kernels():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "scripts.gpu.predict", "--dims", "16", "--mechanisms", "lln", "--tokens", "1024",
               "--length", "1024", "--heads", "1"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("_lln")]
    assert [line[0] for line in lines] == ["_lln_state_kernel", "_lln_out_kernel", "_lln_dstate_kernel",
                                           "_lln_dkv_kernel"], done.stderr  # fmt: skip
    assert all(0 <= float(line[-1]) <= 1 and int(line[2]) > 0 for line in lines)
    refused = subprocess.run(command, cwd=ROOT, env={**environment, "TRITON_INTERPRET": "1"}, capture_output=True)
    assert (refused.returncode, refused.stderr.count(b"\n")) == (1, 1)


def test_pack_takes_the_checkout_the_wheels_and_two_splits(tmp_path, monkeypatch, capsys):
    make_data(tmp_path)
    make_classification(tmp_path / "data-bin" / "glue" / "QNLI")
    folders = [tmp_path / "data-bin" / name for name in ("wikitext-103", "glue/SST-2", "glue/QNLI")]
    for folder in folders:
        (folder / "manifest.json").write_text("{}")
    monkeypatch.setattr(pack, "get_wheels", lambda folder, python, platform: folder.mkdir())
    monkeypatch.setattr(pack, "ROOT", ROOT)
    where = ["--text", str(folders[0]), "--glue", str(tmp_path / "data-bin" / "glue")]
    assert pack.main([str(tmp_path / "carry"), *where]) == 0
    carried = {str(path.relative_to(tmp_path / "carry")) for path in (tmp_path / "carry").rglob("*")}
    assert {"scripts/gpu_run.sh", "lln_fairseq/__init__.py", "wheels", "data-bin/wikitext-103/train.bin"} <= carried
    assert "data-bin/glue/SST-2/label/dict.txt" in carried
    assert not any("/test." in name and name.startswith("data-bin") for name in carried)
    assert pack.main([str(tmp_path / "carry"), *where]) == 1
    monkeypatch.setattr(pack, "LIMIT", 1000)
    assert pack.main([str(tmp_path / "other"), *where]) == 1
    assert pack.main([str(tmp_path / "none"), "--text", str(tmp_path)]) == 1
    exists, large, unfinished = capsys.readouterr().err.splitlines()
    assert "carry exists: give another folder" in exists
    assert "more than 0: give less text" in large
    assert "is no finished data directory" in unfinished
    assert {path.name for path in tmp_path.iterdir()} == {"data-bin", "carry"}
