"""What scripts/quickstart.sh --from-pretrained starts; with real weights it takes minutes and a download."""

import argparse
import json
from pathlib import Path

import pytest

from lln_fairseq.linearize import linearize
from scripts.compare_attentions import compose_config
from scripts.experiments import from_pretrained
from scripts.experiments.bag_of_words import bag_of_words
from scripts.experiments.steps import Steps


def write_rows(folder, splits):
    (folder / "raw/SST-2").mkdir(parents=True)
    for name, rows in splits.items():
        lines = "".join(f"{text}\t{label}\n" for text, label in rows)
        (folder / f"raw/SST-2/{name}.tsv").write_text(f"sentence\tlabel\n{lines}")


def test_a_bag_of_words_learns_words(tmp_path):
    rows = [('a "good film', "1"), ("a bad film", "0"), ("good story", "1"), ("bad story", "0")] * 5
    write_rows(tmp_path, {"train": rows, "dev": rows[:2], "test": [("good", "1"), ("bad", "1")]})
    assert bag_of_words(tmp_path) == {"valid": 1.0, "test": 0.5}


@pytest.mark.parametrize(("updates", "seed"), [(None, 1), (3, 2)])
def test_every_command_is_understood(updates, seed, tmp_path, monkeypatch, capsys):
    commands, out = {}, tmp_path / "out"

    def run(self, name, command, *args, **kwargs):
        commands[name] = command
        log = out / "from_minilm" / "logs" / "linearize.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("step 1\nheld-out texts of 128 tokens: cosine 0.9\nheld-out texts of 512 tokens")
        if "--json" in command:
            for split in next(word for word in command if word.startswith("--split=")).partition("=")[2].split(","):
                path = Path(command[command.index("--json") + 1].replace("{split}", split))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"accuracy": 0.875}))

    monkeypatch.setattr(Steps, "run", run)
    monkeypatch.setattr(from_pretrained, "call", lambda command: None)
    write_rows(tmp_path / "data-minilm", {split: [("good", "1"), ("bad", "0")] for split in ("train", "dev", "test")})
    args = argparse.Namespace(out=str(out), data=str(tmp_path / "data"), archive=None, updates=updates, seed=seed)
    from_pretrained.FromPretrained(args).all()
    said = capsys.readouterr().out
    assert "cosine 0.9" in said
    assert said.count("87.5") == 6
    tuned = {name: compose_config("finetune", command[6:]) for name, command in commands.items() if "fine-tune" in name}
    assert [config.model.attention for config in tuned.values()] == ["softmax", "lln_diag", "lln_diag"]
    assert all(name.endswith("_seed2") == (seed == 2) for name in tuned)
    for config in tuned.values():
        assert config.common.seed == seed
        assert config.optimization.max_update == (updates or 160)
        assert config.model.encoder_embed_dim == 384
    swapped = tuned["fine-tune swapped" + from_pretrained.seed_suffix(seed)].model
    assert (swapped.lln_diag_mix, swapped.lln_diag_gain, swapped.lln_diag_block_size) == ("joint_offset", "learned", 32)
    found = []
    monkeypatch.setattr(linearize, "linearize", found.append)
    linearize.main(commands["linearize"][4:])
    assert found[0].option == {"mix": "joint_offset", "gain": "learned", "block_size": 32}
