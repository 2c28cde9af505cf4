"""Test the units of the paper's Table 1 and their report, with tiny models and tasks."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import lln_fairseq.__main__
from lln_fairseq.errors import UserError
from scripts.research import conversion, fine_tuning, pretraining, programs, table1, units
from scripts.research.programs import ProgramFailed, Programs, locked
from scripts.research.report import LABELS, write_report
from scripts.research.units import Task, Unit, all_units
from tests.conversion.sources import make_model
from tests.fairseq_runs import hydra_train
from tests.text_runs import random_sentence, write_raw_tasks

# Runs the command line with tiny models and tasks.
TINY_UNIT = """
from scripts.research import conversion, fine_tuning, pretraining, table1, units
pretraining.MODEL = "nano"
pretraining.VOCABULARY = 300
conversion.STAGES["linearized"] = (120, 0)
units.TASKS["sst2"] = units.Task("SST-2", train=32, held_out=16, epochs=1)
raise SystemExit(table1.main())
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("conversion", "qnly", "elu"), "no such task: qnly; did you mean 'qnli'?"),
        (("conversion", "qnli", "elo"), "no such attention: elo; did you mean 'elu'?"),
        (
            ("fine_tuning", "qnli", "softmax"),
            "qnli has no shorter task to start from: choose from qnli4, qnli16, qnli64, qqp4\n",
        ),
        (("pretraining", "lin_diag"), "no such attention: lin_diag; did you mean 'lln_diag'?"),
    ],
)
def test_unknown_unit_is_one_line(words, message, tmp_path, capsys):
    assert table1.main([*words, "--work", str(tmp_path)]) == 1

    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_missing_text_is_one_line_with_the_log(tmp_path, capsys):
    text = tmp_path / "no_text"
    options = ["--work", str(tmp_path), "--text", str(text), "--results", str(tmp_path / "results")]

    assert table1.main(["pretraining", "elu", *options]) == 1

    error = capsys.readouterr().err
    assert error.startswith(f"error: data ended with exit code 1: cannot read {text}")
    assert error.count("\n") == 1
    assert Path(error.split("(see ")[1].strip(" )\n")).exists()


def test_list_shows_what_is_missing(tmp_path, capsys):
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion" / "qnli_elu_seed2.json").touch()

    assert table1.main(["list", "--results", str(tmp_path)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "missing  floor qnli"
    assert "missing  pretraining softmax --seed 1" in lines
    assert "done     conversion qnli elu --seed 2" in lines
    assert lines[-1] == f"1 of {len(all_units())} units are done"
    assert len(set(lines)) == len(all_units()) + 1


def test_all_skips_a_unit_that_another_process_runs(tmp_path, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(table1, "run_conversion", lambda unit, *_: ran.append(unit))
    monkeypatch.setattr(table1, "all_units", lambda: [Unit("conversion", "qnli", name, 1) for name in ("elu", "lln")])

    with locked(tmp_path / "conversion" / "qnli_elu_seed1.lock"):
        assert table1.main(["all", "--work", str(tmp_path), "--results", str(tmp_path)]) == 0
        assert table1.main(["conversion", "qnli", "elu", "--work", str(tmp_path)]) == 1

    assert [unit.attention for unit in ran] == ["lln"]
    assert "another process is running qnli_elu_seed1" in capsys.readouterr().err


def test_failed_programs_run_again_and_finished_ones_do_not(tmp_path, monkeypatch):
    (tmp_path / "in.json").write_text("[1]")
    out = tmp_path / "out.json"
    programs = Programs(tmp_path, {tmp_path: "WORK", None: "GLUE"})

    with pytest.raises(ProgramFailed, match=r"can't open .*absent.* \(see .*logs/format\.log\)"):
        programs.run("format", ["json.tool", tmp_path / "absent", out], out)
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "killed.py").write_text(killed)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ProgramFailed) as failure:
        programs.run("format", ["killed"], out)
    assert failure.value.reason == ""  # not the line of the first attempt
    programs.run("format", ["json.tool", tmp_path / "in.json", out], out)
    assert json.loads(out.read_text()) == [1]
    out.write_text("kept")
    programs.run("format", ["json.tool", tmp_path / "in.json", out], out)

    assert out.read_text() == "kept"
    assert programs.commands == {"format": "json.tool WORK/in.json WORK/out.json"}


@pytest.fixture
def in_this_process(monkeypatch):
    """Run the programs in this process, which saves the imports. Return the list of the steps that ran."""
    steps = []

    def run(self, step, arguments, output):
        module, *words = map(str, arguments)
        self.commands[step] = " ".join([module, *words])
        if output is not None and output.exists():
            return
        steps.append(step)
        if words[0] == "train":
            hydra_train(monkeypatch, *words[2:], recipe=words[1].partition("=")[2])
        elif module == "lln_fairseq":
            assert lln_fairseq.__main__.main(words) == 0
        else:
            assert importlib.import_module(module).main(words) == 0

    monkeypatch.setattr(Programs, "run", run)
    return steps


def test_conversion_unit_scores_all_stages_and_parts(tmp_path, monkeypatch, in_this_process):
    monkeypatch.setitem(conversion.STAGES, "linearized", (12, 0))
    monkeypatch.setitem(units.TASKS, "sst2", Task("SST-2", train=32, held_out=16, epochs=1))
    work = tmp_path / "work"
    results = tmp_path / "results"
    make_model("bert", work / "minilm")
    options = ["--work", str(work), "--results", str(results), "--glue", str(write_raw_tasks(tmp_path / "glue"))]

    for attention in ("softmax", "lln_diag"):
        assert table1.main(["conversion", "sst2", attention, *options]) == 0

    softmax = json.loads((results / "conversion" / "sst2_softmax_seed1.json").read_text())
    linear = json.loads((results / "conversion" / "sst2_lln_diag_seed1.json").read_text())
    assert in_this_process.count("train sst2") == 1  # the teacher is shared
    assert softmax["rows"] == {"train": 32, "valid": 30, "test": 16}
    assert linear["scores"].keys() == {"softmax", "swapped", "linearized", "LLN only", "Diag only"}
    assert linear["scores"]["softmax"] == softmax["scores"]["softmax"]
    for scores in linear["scores"].values():
        assert scores["all"] == pytest.approx((30 * scores["valid"] + 16 * scores["test"]) / 46, abs=1e-4)
    assert 0 < linear["relative_error"] < 1
    assert not list(work.glob("conversion/*/*/model.pt"))


def test_attentions_of_a_long_task_are_trained_from_the_same_start(tmp_path, monkeypatch, in_this_process):
    monkeypatch.setattr(fine_tuning, "TRANSFER_STEPS", 3)
    monkeypatch.setattr(fine_tuning, "VALIDATE_INTERVAL", 1)
    task = Task("SST-2", train=32, held_out=16, epochs=1, start="sst2", batch_size=16, positions=1100)
    monkeypatch.setitem(units.TASKS, "sst2", Task("SST-2", train=32, held_out=16, epochs=1))
    monkeypatch.setitem(units.TASKS, "long", task)
    monkeypatch.setitem(units.SOFTMAX_LAYERS, "lln_diag", "0")
    work = tmp_path / "work"
    make_model("bert", work / "minilm")
    options = ["--work", str(work), "--results", str(tmp_path), "--glue", str(write_raw_tasks(tmp_path / "glue"))]

    for attention in ("softmax", "lln_diag"):
        assert table1.main(["fine_tuning", "long", attention, *options]) == 0

    contents = {}
    for attention in ("softmax", "lln_diag"):
        contents[attention] = json.loads((tmp_path / "fine_tuning" / f"long_{attention}_seed1.json").read_text())
        assert contents[attention]["dev_accuracy"].keys() == {"1"}
        assert contents[attention]["scores"]["trained"].keys() == {"valid", "test", "all"}
    start = f"{work}/teachers/sst2_seed1/checkpoint_last.pt"
    assert f"finetune_from_model={start} " in contents["softmax"]["commands"]["train long"]
    assert contents["lln_diag"]["commands"]["linearized"].startswith(f"lln_fairseq linearize {start} ")
    assert "--softmax-layers 0 " in contents["lln_diag"]["commands"]["linearized"]
    words = contents["lln_diag"]["commands"]["train"].split()
    assert "model.softmax_layers='0'" in words
    assert {"attention=lln_diag", "model.lln_diag_mix=average", "model.lln_diag_block_size=128"} <= set(words)
    monkeypatch.setattr(conversion, "LONG_STAGES", {"swapped": (0, 0), "linearized": (1, 0), "distilled": (1, 1)})
    assert table1.main(["conversion", "long", "block_diag", *options]) == 0
    scores = json.loads((tmp_path / "conversion" / "long_block_diag_seed1.json").read_text())["scores"]
    assert scores.keys() == {"softmax", "swapped", "linearized", "distilled"}
    assert table1.main(["conversion", "long", "lln_diag", *options]) == 0
    scores = json.loads((tmp_path / "conversion" / "long_lln_diag_seed1.json").read_text())["scores"]
    assert {"LLN only", "Diag only"} <= scores.keys()  # of the second layer; the first one keeps softmax
    assert in_this_process.count("train sst2") == in_this_process.count("train long") == 1


def test_floor_unit_compares_the_words_of_a_pair(tmp_path, monkeypatch):
    generator = random.Random(3)
    words = [f"word{number}" for number in range(20)]
    directory = tmp_path / "glue" / "QNLI"
    directory.mkdir(parents=True)
    for split, count in (("train", 300), ("dev", 40)):
        lines = ["index\tquestion\tsentence\tlabel"]
        for number in range(count):
            question, other = generator.sample(words, 2)
            label = generator.choice(("entailment", "not_entailment"))
            sentence = question if label == "entailment" else other
            lines.append(f"{number}\twhat is {question}\tit is {sentence}\t{label}")
        (directory / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    options = ["--glue", str(tmp_path / "glue"), "--work", str(tmp_path), "--results", str(tmp_path)]
    monkeypatch.setitem(units.TASKS, "qnli", Task("QNLI", train=250, held_out=50))

    assert table1.main(["floor", "qnli", *options]) == 0

    content = json.loads((tmp_path / "floor" / "qnli_tf_idf_seed1.json").read_text())
    assert content["rows"] == {"train": 250, "valid": 40, "test": 50}
    assert content["scores"]["tf_idf"]["all"] > 0.95  # neither text alone says anything about the label


def test_refused_attention_says_why(tmp_path, monkeypatch):
    data = tmp_path / "data" / "qnli"
    data.mkdir(parents=True)
    counts = {"samples": 2, "tokens": 20}
    manifest = {"counts": {}, "settings": {"source": {}}, "datasets": {"input0": {"valid": counts}}}
    (data / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(conversion, "make_teacher", lambda *_: tmp_path / "checkpoint_last.pt")
    monkeypatch.setattr(conversion, "score", lambda *_: {"all": 0.5})
    results = tmp_path / "results"

    assert table1.main(["conversion", "qnli", "tnn", "--work", str(tmp_path), "--results", str(results)]) == 0

    content = json.loads((results / "conversion" / "qnli_tnn_seed1.json").read_text())
    assert content["refused"] == "tnn replaces the whole encoder layer, and cannot replace a teacher's attention"


def test_diverged_distillation_keeps_the_scores_of_earlier_stages(tmp_path, monkeypatch):
    log = tmp_path / "log"
    log.write_text("error: the distillation diverged to NaN\n")

    def linearize(programs, stage, *_):
        if stage == "distilled":
            raise ProgramFailed(stage, 1, log, 0)
        return tmp_path / stage / "model.pt"

    monkeypatch.setattr(conversion, "make_teacher", lambda *_: tmp_path / "checkpoint_last.pt")
    monkeypatch.setattr(conversion, "make_data", lambda *_: tmp_path)
    monkeypatch.setattr(conversion, "describe_unit", lambda *_: {})
    monkeypatch.setattr(conversion, "linearize", linearize)
    monkeypatch.setattr(conversion, "score", lambda *_: {"all": 0.5})
    unit = Unit("conversion", "qqp4", "block_diag", 1)

    conversion.run_conversion(unit, tmp_path, tmp_path / "results", None)

    content = json.loads(unit.result(tmp_path / "results").read_text())
    assert content["scores"]["swapped"] == {"all": 0.5}
    assert content["refused"] == "the distillation diverged to NaN"


def start_tiny_unit(*arguments):
    return subprocess.Popen([sys.executable, "-c", TINY_UNIT, *map(str, arguments)])


def kill_when_written(process, file):
    """Kill a process once a file exists."""
    deadline = time.monotonic() + 300
    while not file.exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.exhaustive
def test_killed_pretraining_unit_resumes_to_the_same_result(tmp_path):
    generator = random.Random(5)
    text = tmp_path / "text"
    text.mkdir()
    for split, lines in (("train", 2000), ("valid", 100), ("test", 10)):
        sentences = "\n".join(random_sentence(generator) for _ in range(lines))
        (text / f"wiki.{split}.raw").write_text(f"{sentences}\n")
    unit = ("pretraining", "lln_diag", "--updates", 20, "--text", text)
    killed = tmp_path / "killed"
    whole = tmp_path / "whole"
    checkpoint = killed / "pretraining" / "lln_diag_seed1" / "checkpoint_last.pt"

    kill_when_written(start_tiny_unit(*unit, "--work", killed, "--results", killed), checkpoint)
    for folder in (killed, whole):
        assert start_tiny_unit(*unit, "--work", folder, "--results", folder).wait() == 0

    results = [folder / "pretraining" / "lln_diag_seed1.json" for folder in (killed, whole)]
    assert results[0].read_text() == results[1].read_text()
    assert len(json.loads(results[0].read_text())["bits"]) == pretraining.VALIDATIONS


@pytest.mark.exhaustive
def test_killed_conversion_unit_resumes_to_the_same_result(tmp_path):
    make_model("bert", tmp_path / "minilm")
    glue = write_raw_tasks(tmp_path / "glue")
    unit = ("conversion", "sst2", "lln_diag", "--work", tmp_path, "--glue", glue)
    directory = tmp_path / "conversion" / "sst2_lln_diag_seed1"

    kill_when_written(
        start_tiny_unit(*unit, "--results", tmp_path / "killed"), directory / "linearized" / "linearize.pt"
    )
    assert not (directory / "linearized" / "model.pt").exists()
    for name in ("killed", "whole"):  # the second one begins again, with the same teacher
        assert start_tiny_unit(*unit, "--results", tmp_path / name).wait() == 0

    results = [tmp_path / name / "conversion" / "sst2_lln_diag_seed1.json" for name in ("killed", "whole")]
    assert results[0].read_text() == results[1].read_text()


def write_result(results, unit, **content):
    path = unit.result(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"kind": unit.kind, "task": unit.task, "attention": unit.attention, "mean_tokens": 48} | content)
    )


def write_times(path, milliseconds):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"milliseconds": {"minilm": milliseconds}}))


def test_report_has_means_ranges_and_the_control(tmp_path):
    scores = {"softmax": {"all": 0.8}, "swapped": {"all": 0.6}}
    for seed, accuracy in ((1, 0.7), (2, 0.72)):
        unit = Unit("conversion", "qnli", "lln_diag", seed)
        stages = {**scores, "linearized": {"all": accuracy}}
        write_result(tmp_path, unit, seed=seed, scores=stages, relative_error=0.2)
        unit = Unit("conversion", "qnli", "softmax", seed)  # another softmax model, that of another machine
        write_result(tmp_path, unit, seed=seed, scores={"softmax": {"all": 0.81}})
    unit = Unit("conversion", "qnli16", "block_diag_global_128", 1)
    stages = {"swapped": {"test": 0.6}, "linearized": {"test": 0.68}, "distilled": {"test": 0.73}}
    write_result(tmp_path, unit, spec=unit.spec, scores=stages)
    unit = Unit("conversion", "qnli", "joint_offset_global", 1)
    stages = {**scores, "linearized": {"all": 0.79}, "Diag only": {"all": 0.785}}
    write_result(tmp_path, unit, seed=1, scores=stages, relative_error=0.1)
    write_result(tmp_path, Unit("conversion", "qnli", "reformer", 1), seed=1, scores=stages, relative_error=0.0)
    stages = {**scores, "linearized": {"all": 0.7}}
    write_result(tmp_path, Unit("conversion", "qnli", "lln", 1), seed=1, scores=stages, relative_error=0.2)
    write_result(tmp_path, Unit("conversion", "qnli", "lln", 2), seed=2, scores=scores, refused="diverged to NaN")
    unit = Unit("conversion", "qnli", "tnn", 1)
    write_result(tmp_path, unit, seed=1, scores={"softmax": {"all": 0.8}}, refused="tnn replaces the layer")
    for attention, bits in (("softmax", [9.0, 6.17]), ("tnn", [8.0, 6.0])):
        probe = {"entropy": {"updates": [0, 10], "layer_00": [5.0, 4.0]}} if attention == "softmax" else {}
        write_result(
            tmp_path,
            Unit("pretraining", "", attention, 1),
            seed=1,
            updates=[500, 1000],
            tokens_per_update=4096,
            bits=bits,
            probe=probe,
        )

    for seed, accuracy in ((1, 0.77), (2, 0.75)):
        unit = Unit("fine_tuning", "qnli16", "block_diag_global", seed)
        content = {"dev_accuracy": {"73": 70.0, "146": 74.0}, "scores": {"trained": {"test": accuracy}}}
        write_result(tmp_path, unit, seed=seed, mean_tokens=564, **content)
    milliseconds = {"564": dict.fromkeys(units.FINE_TUNED.values(), 60.0) | {"softmax": 80.0}}
    write_times(tmp_path / "times" / "fine_tuning.json", milliseconds)
    milliseconds = {"512": {"softmax": 2.0, units.CONVERTED["lln_diag"]: 3.0}}
    write_times(tmp_path / "times" / "conversion.json", milliseconds)
    write_result(tmp_path, Unit("floor", "qnli16", "tf_idf", 1), scores={"tf_idf": {"test": 0.5, "all": 0.5}})
    write_result(tmp_path, Unit("floor", "qnli", "tf_idf", 1), seed=1, scores={"tf_idf": {"all": 0.58}})

    write_report(tmp_path)

    lines = (tmp_path / "table1.md").read_text().splitlines()
    titles = ("accuracy [%]: swapped in → linearized", "QNLI, 48 tokens")
    assert f"| {' | '.join(titles)} | time / softmax's, 512 tokens |" in lines
    assert "| softmax | 81.0 (81.0–81.0) | 1 |" in lines
    assert "| LLN+Diag, average (the paper's) | 60.0 → 71.0 (70.0–72.0) | 1.50 |" in lines
    assert "| blocks only, first text global | 78.5 |  |" in lines
    assert "| Reformer | 60.0 → 79.0 = |  |" in lines
    cells = ("60.0", "68.0", "73.0", "76.0 (75.0–77.0)", "60.0 (0.75)")
    assert f"| blocks only, first text global | {' | '.join(cells)} |" in lines
    assert "| TF-IDF and logistic regression |  |  |  | 50.0 |  |" in lines
    assert "| TF-IDF and logistic regression | 58.0 |  |" in lines
    assert "- TNN: tnn replaces the layer" in lines
    assert "| LLN only | 60.0 → 70.0 |  |" in lines
    assert "- LLN only: diverged to NaN" in lines
    assert "| softmax | 9.00 | 6.17 |" in lines
    assert (tmp_path / "pretraining.png").stat().st_size > 5000


def test_report_of_pretrainings_that_end_early(tmp_path):
    curves = (("softmax", 1, [9.0, 8.0, 7.0]), ("softmax", 2, [9.5, 8.2]), ("tnn", 1, [9.2, 8.4]))
    for attention, seed, bits in curves:
        write_result(
            tmp_path,
            Unit("pretraining", "", attention, seed),
            seed=seed,
            updates=[500, 1000, 1500][: len(bits)],
            tokens_per_update=4096,
            bits=bits,
            probe={},
        )

    write_report(tmp_path)

    lines = (tmp_path / "table1.md").read_text().splitlines()
    assert "| bits after million tokens | 2.0 | 4.1 | 6.1 |" in lines
    assert "| softmax | 9.25 (9.00–9.50) | 8.10 (8.00–8.20) | 7.00 |" in lines
    assert "| tnn | 9.20 | 8.40 |  |" in lines


def test_only_some_first_seeds_are_pretrained_to_the_end():
    pretrainings = [unit for unit in units.all_units() if unit.kind == units.PRETRAINING]
    whole = [unit.name for unit in pretrainings if pretraining.last_update(unit, 5000) == 5000]
    assert whole == ["softmax_seed1", "lln_diag_seed1", "window_seed1", "window_softmax_last_seed1"]
    arguments = pretraining.training_arguments(pretrainings[-3], Path("data"), Path("out"), 5000)
    assert "model.softmax_layers='3'" in arguments
    arguments = pretraining.training_arguments(pretrainings[-1], Path("data"), Path("out"), 5000)
    assert {"optimization.max_update=1000", "lr_scheduler.total_num_update=5000"} <= set(arguments)
    assert {"lr_scheduler.warmup_updates=100", "dataset.validate_interval_updates=500"} <= set(arguments)


def test_units_keep_weights_in_float32_on_a_gpu(monkeypatch):
    def words(task):
        return fine_tuning.training_words(task, "softmax", 1, Path("data"), Path("start"), Path("out"))

    monkeypatch.setattr(programs, "choose_precision", lambda: "bfloat16")
    assert "common.bf16=true" in words("qnli16")
    assert "common.bf16=true" not in words("qnli")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for task in ("qnli16", "qnli"):
        assert {"run=gpu1", "common.fp16=false", "task.autocast=true"} <= set(words(task))
        assert "common.bf16=true" not in words(task)


def test_report_of_one_long_conversion_and_two_schedules(tmp_path):
    unit = Unit("conversion", "qnli16", "block_diag_global_128", 1)
    stages = {"swapped": {"test": 0.6}, "linearized": {"test": 0.68}, "distilled": {"test": 0.73}}
    write_result(tmp_path, unit, spec=unit.spec, scores=stages)
    write_times(tmp_path / "times" / "fine_tuning.json", {"564": {"softmax": 80.0}})
    for attention, updates in (("softmax", [500, 1000]), ("tnn", [1, 2])):
        content = {"tokens_per_update": 4096, "bits": [9.0, 8.0], "probe": {}}
        write_result(tmp_path, Unit("pretraining", "", attention, 1), seed=1, updates=updates, **content)

    write_report(tmp_path)

    text = (tmp_path / "table1.md").read_text()
    assert "| blocks only, first text global | 60.0 | 68.0 | 73.0 |  |  |" in text
    assert "| softmax | 9.00 | 8.00 |" in text
    assert "| tnn | 9.00 | 8.00 |" in text


def test_every_converted_attention_has_a_label():
    hybrids = {name for name in units.SOFTMAX_LAYERS if name in units.CONVERTED}  # for qqp4 only
    assert {"softmax", *LABELS, *units.CONVERTED_ON_LONG_PAIRS, *hybrids} == set(units.CONVERTED)


def test_report_without_results_says_what_to_run(tmp_path):
    with pytest.raises(UserError, match=r"has no results: run `python -m scripts\.research\.table1 all "):
        write_report(tmp_path)
