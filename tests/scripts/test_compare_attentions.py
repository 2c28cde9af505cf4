"""The trained comparison: what reaches which stage, the table and the plot, and a real run at the smallest size."""

import json

import pytest
from torch.utils.tensorboard import SummaryWriter

from scripts import compare_attentions as compare
from scripts.compare_report import draw, read_rows, table
from tests.fairseq_runs import make_classification, make_corpus

SMALL = ("run=cpu", "model.encoder_embed_dim=32", "model.encoder_ffn_embed_dim=64", "model.encoder_layers=1",
         "common.log_interval=2", "finetune:task.max_positions=128")  # fmt: skip


def results(out, attention, seed, losses, accuracy):
    """What a run of fairseq and its evaluation leave."""
    folder = out / attention / f"seed{seed}"
    for kind in ("train_inner", "valid"):
        with SummaryWriter(folder / "tensorboard" / kind) as writer:
            for step, loss in enumerate(losses, start=1):
                writer.add_scalar("loss", loss, 10 * step)
    (folder / "glue" / "sst2").mkdir(parents=True)
    score = {"accuracy": accuracy, "majority": 0.5, "loss": 1.0}
    (folder / "glue" / "sst2" / "valid.json").write_text(json.dumps(score))


def test_table_and_plot_show_the_median_and_the_range_over_seeds(tmp_path):
    for seed, (loss, accuracy) in enumerate(((6.0, 0.7), (5.0, 0.9), (5.5, 0.75)), start=1):
        results(tmp_path, "softmax", seed, (9, loss), accuracy)
    results(tmp_path, "lln", 1, (9, 7.25), 0.6)
    results(tmp_path, "cosformer", 1, (9, 6.25), 0.5)
    results(tmp_path, "cosformer", 2, (9, 4.75), 0.5)
    results(tmp_path, "cosformer", 3, (9, 7, 4.0), 0.5)  # after other updates
    rows = read_rows(tmp_path, ["softmax", "lln", "elu", "cosformer"], [1, 2, 3], {"sst2": "accuracy"})
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in table(rows, [1, 2, 3]).splitlines()}
    assert lines["softmax"] == "5.50 (5.00 to 6.00) 75.0 (70.0 to 90.0) 3"
    assert lines["lln"] == "7.25 +1.250 60.0 1"
    assert lines["elu"] == "- - - 0"
    assert lines["cosformer"] == "4.75 (4.00 to 6.25) +0.000 (-0.250 to +0.250) 50.0 (50.0 to 50.0) 3"
    assert lines["(majority"] == "class) - 50.0"
    assert draw(tmp_path / "a.png", rows).read_bytes().startswith(b"\x89PNG")


def test_overrides_reach_their_stage():
    args = compare.parse(["--attentions", "elu", "--updates", "9", "corpus=wikitext103", "glue=sst2,mnli", "run=gpu1",
                          "pretrain:dataset.batch_size=4", "finetune:common.log_interval=3"])  # fmt: skip
    overrides = compare.Overrides(args)
    assert overrides.tasks == ["sst2", "mnli"]
    pretrain = compare.configuration("pretrain", overrides.of_pretraining("elu", 5))
    finetune = compare.configuration("finetune", overrides.of_finetuning("elu", 5, "mnli", args.data))
    assert (pretrain.task.data, pretrain.optimization.max_update) == ("data-bin/wikitext-103", 9)
    assert (pretrain.dataset.batch_size, finetune.dataset.batch_size) == (4, 32)
    assert (pretrain.common.log_interval, finetune.common.log_interval) == (100, 3)
    for config in (pretrain, finetune):
        assert (config.common.seed, config.common.fp16, config.model.attention) == (5, True, "elu")
        assert config.model._name == "lln_roberta_nano"


def test_a_row_may_state_options():
    args = compare.parse(["--attentions", "lln,lln_diag:mix=joint,constants=entropy,lln"])
    assert args.attentions == ["lln", "lln_diag:mix=joint,constants=entropy"]
    overrides = compare.Overrides(args).of_pretraining(args.attentions[1], 1)
    model = compare.configuration("pretrain", overrides).model
    assert (model.attention, model.lln_diag_mix, model.lln_diag_constants) == ("lln_diag", "joint", "entropy")


def test_each_of_several_runs_has_its_share_of_the_machine(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert compare.environment(0, 1) == {}
    assert compare.environment(3, 4) == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "7"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attentions", "softmax,nystrm"], "unknown attention 'nystrm'"),
        (["--attentions", "lln_diag:mix=jont"], "option 'mix' of attention 'lln_diag' is 'jont', choose from"),
        (["--out", "a", "softmax"], "neither an option nor a Hydra override: softmax"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.exhaustive
def test_two_attentions_at_a_time_and_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    corpus, task = make_corpus(tmp_path / "lm"), make_classification(tmp_path / "task")
    arguments = ["--attentions", "lln_diag:mix=joint,elu", "--seeds", "3", "--updates", "4", "--finetune-updates", "2",
                 "--jobs", "2", "--out", str(tmp_path / "out"), *SMALL,
                 f"pretrain:task.data={corpus}", f"finetune:task.data={task}"]  # fmt: skip
    assert compare.main(arguments) == 0
    first = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in first.splitlines() if line}
    assert rows["lln_diag:mix=joint"][-1] == rows["elu"][-1] == "1"
    assert compare.main(arguments) == 0
    again = capsys.readouterr().out
    assert again.count("done before") == 6
    assert again.splitlines()[-1] == first.splitlines()[-1]
    changed = [word.replace("4", "5") if word == "4" else word for word in arguments]
    assert compare.main(changed) == 1
    assert "with other settings: optimization.max_update=4" in capsys.readouterr().err
