"""Test the comparison of trained attentions: its overrides, the table, the plot, and a tiny run."""

import json

import pytest
from torch.utils.tensorboard import SummaryWriter

from lln_fairseq.errors import UserError
from lln_fairseq.inference import evaluate
from lln_fairseq.provenance import read_commit
from scripts import compare_attentions
from scripts.compare_attentions import comparison_table, plot_losses, read_results
from tests.fairseq_runs import forget_previous_run, hydra_train

SMALL = (
    "run=cpu",
    "model.encoder_embed_dim=32",
    "model.encoder_ffn_embed_dim=64",
    "model.encoder_layers=1",
    "common.log_interval=2",
    "finetune:task.max_positions=128",
)


def write_results(out, attention, seed, losses, accuracy):
    """Write the files that a pre-training, a fine-tuning and its evaluation leave."""
    folder = out / attention / f"seed{seed}"
    for kind in ("train_inner", "valid"):
        with SummaryWriter(folder / "tensorboard" / kind) as writer:
            for step, loss in enumerate(losses, start=1):
                writer.add_scalar("loss", loss, 10 * step)
    (folder / "glue" / "sst2").mkdir(parents=True)
    score = {"accuracy": accuracy, "majority": 0.5, "loss": 1.0}
    (folder / "glue" / "sst2" / "valid.json").write_text(json.dumps(score))


def cells_by_first_word(table):
    """Return the remaining words of every line, joined by single spaces."""
    lines = {}
    for line in table.splitlines():
        first, *words = line.split()
        lines[first] = " ".join(words)
    return lines


def test_table_and_plot_show_mean_and_range_over_seeds(tmp_path):
    write_results(tmp_path, "softmax", seed=1, losses=(9, 6.0), accuracy=0.7)
    write_results(tmp_path, "softmax", seed=2, losses=(9, 5.0), accuracy=0.9)
    write_results(tmp_path, "softmax", seed=3, losses=(9, 5.5), accuracy=0.75)
    write_results(tmp_path, "lln", seed=1, losses=(9, 7.25), accuracy=0.6)
    write_results(tmp_path, "cosformer", seed=1, losses=(9, 6.25), accuracy=0.5)
    write_results(tmp_path, "cosformer", seed=2, losses=(9, 4.75), accuracy=0.5)
    # The last validation of this run is at another update, so it is not compared with softmax.
    write_results(tmp_path, "cosformer", seed=3, losses=(9, 7, 4.0), accuracy=0.5)

    seeds = {attention: [1, 2, 3] for attention in ("softmax", "lln", "elu", "cosformer")}
    results = read_results(tmp_path, seeds, {"sst2": "accuracy"})

    cells = cells_by_first_word(comparison_table(results, [1, 2, 3]))
    assert cells["softmax"] == "5.50 (5.00–6.00) 78.3 (70.0–90.0) 3"
    assert cells["lln"] == "7.25 +1.250 60.0 1"
    assert cells["elu"] == "- - - 0"
    assert cells["cosformer"] == "5.00 (4.00–6.25) +0.000 (-0.250 to +0.250) 50.0 (50.0–50.0) 3"
    assert cells["(majority"] == "class) - 50.0"
    plot_losses(tmp_path / "a.png", results)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_overrides_reach_their_stage():
    args = compare_attentions.parse_arguments(
        [
            *("--attentions", "elu", "--updates", "9"),
            *("corpus=wikitext103", "glue=sst2,mnli", "run=gpu1", "finetune:model=tiny"),
            *("pretrain:dataset.batch_size=4", "finetune:common.log_interval=3"),
        ]
    )

    overrides = compare_attentions.Overrides(args)

    assert overrides.tasks == ["sst2", "mnli"]
    pretrain = compare_attentions.compose_config("pretrain", overrides.for_pretraining("elu", 5))
    finetune = compare_attentions.compose_config("finetune", overrides.for_finetuning("elu", 5, "mnli", args.data))
    assert (pretrain.task.data, pretrain.optimization.max_update) == ("data-bin/wikitext-103", 9)
    assert (pretrain.dataset.batch_size, finetune.dataset.batch_size) == (4, 32)
    assert (pretrain.model._name, finetune.model._name) == ("lln_roberta_nano", "lln_roberta_tiny")
    assert (pretrain.common.log_interval, finetune.common.log_interval) == (100, 3)
    for config in (pretrain, finetune):
        assert (config.common.seed, config.common.fp16, config.model.attention) == (5, True, "elu")


def test_no_task_leaves_out_fine_tuning(tmp_path):
    args = compare_attentions.parse_arguments(["--attentions", "elu", "glue=none"])
    write_results(tmp_path, "elu", seed=1, losses=(9, 6.0), accuracy=0.7)

    results = read_results(tmp_path, {"elu": [1]}, {})

    assert compare_attentions.Overrides(args).tasks == []
    assert cells_by_first_word(comparison_table(results, [1]))["elu"] == "6.00 1"


def test_failed_run_is_not_in_the_results(tmp_path, monkeypatch, capsys):
    for attention in ("softmax", "elu"):
        write_results(tmp_path, attention, seed=1, losses=(9, 6.0), accuracy=0.7)

    def run_attention(args, overrides, recipes, attention, seed):
        if attention == "elu":
            raise UserError("the disk is full")

    monkeypatch.setattr(compare_attentions, "run_attention", run_attention)
    words = ["--attentions", "softmax,elu", "--seeds", "1", "--out", str(tmp_path), "corpus=wikitext103", "glue=none"]

    assert compare_attentions.main(words) == 1

    runs = json.loads((tmp_path / "comparison.json").read_text())["runs"]
    assert [run["attention"] for run in runs] == ["softmax"]
    assert "error: the disk is full" in capsys.readouterr().err


def test_attention_may_have_options():
    args = compare_attentions.parse_arguments(["--attentions", "lln,lln_diag:mix=joint_offset,constants=paper,lln"])

    assert args.attentions == ["lln", "lln_diag:mix=joint_offset,constants=paper"]
    overrides = compare_attentions.Overrides(args).for_pretraining(args.attentions[1], 1)
    model = compare_attentions.compose_config("pretrain", overrides).model
    assert (model.attention, model.lln_diag_mix, model.lln_diag_constants) == ("lln_diag", "joint_offset", "paper")


def test_recipe_local_global_can_be_compared():
    args = compare_attentions.parse_arguments(["--attentions", "softmax,local_global"])

    overrides = compare_attentions.Overrides(args).for_pretraining(args.attentions[1], 1)
    model = compare_attentions.compose_config("pretrain", overrides).model
    assert (model.attention, model.softmax_layers, model.rotary) == ("window", "every:4", True)


@pytest.mark.parametrize("seeds", [["1", "2"], ["1 2"]])
def test_overrides_may_follow_the_seeds(seeds):
    args = compare_attentions.parse_arguments(["run=cpu", "--seeds", *seeds, "model=tiny"])

    assert (args.seeds, args.overrides) == ([1, 2], ["run=cpu", "model=tiny"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attentions", "softmax,nystrm"], "unknown attention 'nystrm'"),
        (["--attentions", "lln_diag:mix=jont"], "option 'mix' of attention 'lln_diag' is 'jont', choose from"),
        (["--out", "a", "softmax"], "neither an option nor a Hydra override: softmax"),
        (["--seeds", ""], "argument --seeds: must be whole numbers with spaces between them"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit):
        compare_attentions.main(arguments)

    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("attention=elu", "use --attentions instead of"),
        ("model.attention=elu", "use --attentions instead of"),
        ("pretrain:common.seed=7", "use --seeds instead of"),
        ("pretrain:corpus=wikitext103", "leave out the prefix of corpus="),
        ("corpus=wikitext103", "another tokenizer than the demo's task: give glue="),
    ],
)
def test_override_that_no_run_could_follow_is_refused(override, message):
    args = compare_attentions.parse_arguments([override])

    with pytest.raises(UserError, match=message):
        compare_attentions.Overrides(args)


@pytest.fixture
def in_process(monkeypatch):
    """Run trainings and evaluations in this process; return a list to which each appends its name."""
    names = []

    def call_logged(name, words, log, updates=None):
        names.append(name.partition(":")[0])
        program, *arguments = words[1:]
        if program == "train":
            hydra_train(monkeypatch, *arguments[2:], recipe=arguments[1])
            forget_previous_run()  # closes the files of TensorBoard
        else:
            evaluate.main(arguments)

    monkeypatch.setattr(compare_attentions, "call_logged", call_logged)
    return names


def test_runs_finish_and_are_not_repeated(in_process, corpus, task_data, tmp_path, capsys):
    attention = "lln_diag:mix=joint_offset"
    out = tmp_path / "out"

    def run(*options):
        arguments = ["--attentions", attention, "--seeds", "3", "--updates", "4", "--finetune-updates", "2"]
        arguments += ["--out", str(out), *SMALL, f"pretrain:task.data={corpus}", f"finetune:task.data={task_data}"]
        code = compare_attentions.main([*arguments, *options])
        return code, capsys.readouterr()

    code, first = run()
    assert code == 0
    row = next(line.split() for line in first.out.splitlines() if line.startswith(attention))
    (result,) = json.loads((out / "comparison.json").read_text())["runs"]
    assert (result["attention"], result["seed"], result["updates"][-1]) == (attention, 3, 4)
    assert row[1:] == [f"{result['bits'][-1]:.2f}", f"{result['scores']['demo valid']:.1f}", "1"]
    assert [start["commit"] for start in result["starts"]] == [read_commit()[0]]
    written = {path: path.stat().st_mtime_ns for path in [*out.rglob("valid.json"), *out.rglob("*.pt")]}
    in_process.clear()

    code, second = run()
    assert code == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert in_process == ["pre-train", "fine-tune on demo"]
    assert second.out.splitlines()[-4:] == first.out.splitlines()[-4:]


def test_other_budget_of_an_existing_run_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_attentions, "call_logged", lambda *args: None)
    for directory, updates in (("elu/seed1", 4), ("elu/seed1/glue/sst2", 2)):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "config.yaml").write_text(f"optimization: {{max_update: {updates}}}\n")
    words = ["--attentions", "elu", "--seeds", "1", "--out", str(tmp_path), "corpus=wikitext103", "glue=sst2"]

    for updates, message in ((5, "a run of 4 updates, not 5"), (4, "a run of 2 updates, not 3")):
        assert compare_attentions.main([*words, "--updates", str(updates), "--finetune-updates", "3"]) == 1
        assert f"{message}: give another --out" in capsys.readouterr().err
    assert not (tmp_path / "comparison.json").exists()
