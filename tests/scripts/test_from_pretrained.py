"""Test the commands of scripts/quickstart.sh --from-pretrained; with real weights they take minutes and a download."""

import argparse
import json
from pathlib import Path

import pytest

from lln_fairseq.linearize import linearize
from scripts.research import quickstart
from scripts.research.quickstart import bag_of_words_accuracies
from scripts.research.training import compose_config


def write_rows(directory, splits):
    (directory / "raw/SST-2").mkdir(parents=True)
    for name, rows in splits.items():
        lines = "".join(f"{text}\t{label}\n" for text, label in rows)
        (directory / f"raw/SST-2/{name}.tsv").write_text(f"sentence\tlabel\n{lines}")


def write_scores(command):
    """Write the checkpoint's scores as `lln-fairseq evaluate` would."""
    (splits,) = [word.removeprefix("--split=") for word in command if word.startswith("--split=")]
    template = command[command.index("--json") + 1]
    for split in splits.split(","):
        path = Path(template.replace("{split}", split))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"accuracy": 0.875}))


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Return the commands of all steps by name; none is run, but the files that the experiment reads are written."""
    commands = {}
    log = tmp_path / "out" / "from_minilm" / "logs" / "linearize.log"

    def run(name, command, *args):
        commands[name] = command
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("step 1\nheld-out texts of 128 tokens: cosine 0.9\nheld-out texts of 512 tokens")
        if "--json" in command:
            write_scores(command)

    monkeypatch.setattr(quickstart, "call_logged", run)
    monkeypatch.setattr(quickstart, "call", lambda command: None)
    write_rows(tmp_path / "data-minilm", {split: [("good", "1"), ("bad", "0")] for split in ("train", "dev", "test")})
    return commands


def run_experiment(tmp_path, updates, seed):
    args = argparse.Namespace(data=str(tmp_path / "data"), archive=None, updates=updates, seed=seed)
    quickstart.FromPretrained(args, tmp_path / "out" / "from_minilm").run_all()


def test_bag_of_words_learns_words(tmp_path):
    rows = [('a "good film', "1"), ("a bad film", "0"), ("good story", "1"), ("bad story", "0")] * 5
    write_rows(tmp_path, {"train": rows, "dev": rows[:2], "test": [("good", "1"), ("bad", "1")]})

    assert bag_of_words_accuracies(tmp_path) == [1.0, 0.5]


@pytest.mark.parametrize(("updates", "seed"), [(None, 1), (3, 2)])
def test_finetuning_commands_configure_three_models(updates, seed, commands, tmp_path, capsys):
    run_experiment(tmp_path, updates, seed)

    configs = {
        name: compose_config("finetune", command[4:]) for name, command in commands.items() if "fine-tune" in name
    }
    assert [config.model.attention for config in configs.values()] == ["softmax", "lln_diag", "lln_diag"]
    assert all(name.endswith("_seed2") == (seed == 2) for name in configs)
    for config in configs.values():
        assert config.common.seed == seed
        assert config.optimization.max_update == (updates or 160)
        assert config.model.encoder_embed_dim == 384
    swapped = configs["fine-tune swapped" + ("_seed2" if seed == 2 else "")].model
    assert (swapped.lln_diag_mix, swapped.lln_diag_gain, swapped.lln_diag_block_size) == ("joint_offset", "learned", 32)
    printed = capsys.readouterr().out
    assert "cosine 0.9" in printed
    assert printed.count("87.5") == 6


def test_linearize_command_parses(commands, tmp_path, monkeypatch):
    run_experiment(tmp_path, updates=None, seed=1)
    parsed = []
    monkeypatch.setattr(linearize, "linearize", parsed.append)

    linearize.main(commands["linearize"][2:])

    assert parsed[0].option == {"mix": "joint_offset", "gain": "learned", "block_size": 32}
