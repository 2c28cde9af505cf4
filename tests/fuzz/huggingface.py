"""Directories of Hugging Face: files damaged, values of their JSON exchanged, other tensors, pickles that call."""

import contextlib
import io
import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

import tests.conversion.conftest  # noqa: F401  transformers stays off the network
from lln_fairseq.__main__ import main
from lln_fairseq.conversion.convert import CHECKPOINT
from lln_fairseq.data.encode import encode_block
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.vocabulary import load_vocabulary
from lln_fairseq.inference.loading import load_model
from tests.conversion.sources import TOKENIZERS, make_model
from tests.fuzz._damage import damaged
from tests.fuzz.checkpoints import Call, saved

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LINES = ["The plot isn't new", "", "ж <mask> <s>  two  spaces", "a" * 200]
VALUES: tuple[Any, ...] = (None, -1, 0, 1, 2, 7, 1 << 40, 0.5, float("nan"), "", "x", "roberta", [], {}, ["a", 1], True,
                           {"a": 1}, "../up", "\ud800")  # fmt: skip


@cache
def sound() -> dict[str, dict[str, bytes]]:
    """The files of a small model of each kind."""
    with tempfile.TemporaryDirectory() as name:
        for kind in TOKENIZERS:
            folder = Path(name, kind)
            make_model(kind, folder)
            if kind != "xlm-roberta":  # theirs is made of the older files
                TOKENIZERS[kind].from_pretrained(folder).save_pretrained(folder / "new")
                (folder / "new" / "tokenizer.json").rename(folder / "tokenizer.json")
        return {
            kind: {path.name: path.read_bytes() for path in Path(name, kind).iterdir() if path.is_file()}
            for kind in TOKENIZERS
        }


def attack(rng: random.Random, folder: Path) -> str:
    """It is refused in one line and nothing is left, or its model runs and its tokenizer gives ids of the model."""
    source, out, mark = folder / "source", folder / "out", folder / "mark"
    files = dict(sound()[rng.choice(list(TOKENIZERS))])
    if rng.random() < 0.5 and "tokenizer.json" in files:
        del files[rng.choice(["tokenizer.json", *{"vocab.txt", "vocab.json"} & files.keys()])]
    for _ in range(rng.randint(1, 2)):
        rng.choice((damage, lose, exchange, exchange, tensors, tensors, pickled, index))(rng, files, mark)
    source.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(["convert", str(source), str(out), "--attention", rng.choice(("softmax", "lln_diag"))])
    assert not mark.exists(), "code of the directory ran"
    if code:
        assert said.getvalue().count("\n") == 1, f"not one line: {said.getvalue()}"
        assert sorted(path.name for path in folder.iterdir()) == ["source"], "something is left"
        return "refused"
    model, task = load_model(str(out / CHECKPOINT))
    logits, _ = model(torch.full((1, 5), 4))
    assert logits.shape[-1] == len(task.source_dictionary)
    try:
        vocabulary = load_vocabulary(str(out))
        ids, _ = encode_block(vocabulary.tokenizer, vocabulary.table, LINES)
    except DataError:
        return "converted, without its tokenizer"
    assert 0 <= ids.min() <= ids.max() < len(task.source_dictionary), "an id that the model does not have"
    return "converted"


def damage(rng: random.Random, files: dict[str, bytes], mark: Path) -> None:
    name = rng.choice(list(files))
    files[name] = damaged(rng, files[name] or b"-")


def lose(rng: random.Random, files: dict[str, bytes], mark: Path) -> None:
    del files[rng.choice(list(files))]


def exchange(rng: random.Random, files: dict[str, bytes], mark: Path) -> None:
    """One value of a JSON file is another, or gone."""
    if not (names := [name for name in files if name.endswith(".json")]):
        return
    name = rng.choice(names)
    with contextlib.suppress(ValueError):  # damaged before
        content = group = json.loads(files[name])
        while isinstance(group, dict | list) and group:
            key = rng.choice(list(group) if isinstance(group, dict) else range(len(group)))
            if not isinstance(group[key], dict | list) or not group[key] or rng.random() < 0.15:
                if rng.random() < 0.2:
                    del group[key]
                else:
                    group[key] = rng.choice(VALUES)
                break
            group = group[key]
        files[name] = json.dumps(content).encode()


def tensors(rng: random.Random, files: dict[str, bytes], mark: Path) -> None:
    """One tensor is of another kind, shape or name, or gone."""
    with contextlib.suppress(Exception):  # damaged or lost before
        found = load(files[WEIGHTS])
        name = rng.choice(list(found))
        value = found[name]
        others = (value.half(), value.bfloat16(), value.long(), value.bool(), value[:1], value[None], value[0],
                  torch.full_like(value, float("nan")), torch.empty(0), value.to(torch.float8_e4m3fn))  # fmt: skip
        del found[name]
        if rng.random() < 0.8:
            found[rng.choice((name, name, name + "x", "x." + name))] = rng.choice(others).contiguous()
        files[WEIGHTS] = save(found)


def pickled(rng: random.Random, files: dict[str, bytes], mark: Path) -> None:
    """The weights as a pickle, of tensors and something else."""
    with contextlib.suppress(Exception):
        state: Any = load(files.pop(WEIGHTS))
        state[rng.choice((*state, "x"))] = rng.choice((Call(open, str(mark), "w"), *VALUES))
        content = saved(rng.choice((state, state, [state], rng.choice(VALUES))))
        files["pytorch_model.bin"] = rng.choice((content, damaged(rng, content)))


def index(rng: random.Random, files: dict[str, bytes], mark: Path) -> None:
    """The weights in parts that an index lists."""
    if weights := files.pop(WEIGHTS, None):
        part = rng.choice(("part.safetensors", "part.bin"))
        files[part] = weights
        listed = rng.choice((part, part, "../source/" + part, "/etc/passwd", "", ".", "\0", 1, None))
        files[INDEX] = json.dumps({"weight_map": rng.choice(({"x": listed}, [listed], {}, None))}).encode()
