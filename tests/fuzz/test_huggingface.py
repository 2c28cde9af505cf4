"""Changed directories of Hugging Face are refused in one line, or converted to a model that runs with its tokenizer."""

import contextlib
import io
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from safetensors.torch import load, save

import tests.conversion.conftest  # noqa: F401  transformers stays off the network
from lln_fairseq.__main__ import main
from lln_fairseq.conversion.convert import CHECKPOINT
from lln_fairseq.data.encode import encode_block
from lln_fairseq.data.reporting import DataError
from lln_fairseq.data.vocabulary import load_vocabulary
from lln_fairseq.inference.loading import load_model
from tests.conversion.sources import TOKENIZERS, make_model
from tests.fuzz.damage import calls, damages, exchanges, saved

WEIGHTS = "model.safetensors"
LINES = ["The plot isn't new", "", "ж <mask> <s>  two  spaces", "a" * 200]
VALUES = [None, -1, 0, 1, 2, 7, 1 << 40, 0.5, float("nan"), "", "x", "roberta", [], {}, ["a", 1], True, {"a": 1},
          "../up", "\ud800"]  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """For each kind the files of a small model."""
    found = {}
    for kind, tokenizer in TOKENIZERS.items():
        folder = tmp_path_factory.mktemp(kind)
        make_model(kind, folder)
        if kind != "xlm-roberta":  # its tokenizer is made of the older files
            tokenizer.from_pretrained(folder).save_pretrained(folder / "new")
            (folder / "new" / "tokenizer.json").rename(folder / "tokenizer.json")
        found[kind] = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    return found


def changed(draws, files, mark):
    """The files of which one is damaged, missing, or holds other values."""
    files = dict(files)
    kind = draws.draw(st.sampled_from(["bytes", "lost", "json", "json", "tensor", "tensor", "pickle", "index"]))
    name = draws.draw(st.sampled_from(list(files)))
    if kind == "bytes":
        files[name] = draws.draw(damages(files[name])).apply(files[name])
    elif kind == "lost":
        del files[name]
    elif kind == "json":
        name = draws.draw(st.sampled_from([name for name in files if name.endswith(".json")]))
        content = json.loads(files[name])
        files[name] = json.dumps(draws.draw(exchanges(content, VALUES)).apply(content)).encode()
    elif kind == "tensor":
        tensors = load(files[WEIGHTS])
        change_tensor(draws, tensors)
        files[WEIGHTS] = save(tensors)
    elif kind == "pickle":
        state = load(files.pop(WEIGHTS))
        exchange = draws.draw(exchanges(state, [*calls(mark), *VALUES]))
        files["pytorch_model.bin"] = saved(exchange.apply(state))
    else:
        part = draws.draw(st.sampled_from(["part.safetensors", "part.bin"]))
        files[part] = files.pop(WEIGHTS)
        listed = draws.draw(st.sampled_from([part, f"../source/{part}", "/etc/passwd", "", ".", "\0", 1, None]))
        weight_map = draws.draw(st.sampled_from([{"x": listed}, [listed], {}, None]))
        files[f"{WEIGHTS}.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files


def change_tensor(draws, tensors):
    """Give one of the tensors another type, shape or name, or remove it."""
    name = draws.draw(st.sampled_from(sorted(tensors)))
    value = tensors.pop(name)
    changes = {
        "half": value.half(), "bfloat16": value.bfloat16(), "long": value.long(), "bool": value.bool(),
        "float8": value.to(torch.float8_e4m3fn), "first": value[0], "one row": value[:1], "unsqueezed": value[None],
        "nan": torch.full_like(value, float("nan")), "empty": torch.empty(0),
    }  # fmt: skip
    change = draws.draw(st.sampled_from(["removed", *changes]))
    if change != "removed":
        tensors[draws.draw(st.sampled_from([name, f"{name}x", f"x.{name}"]))] = changes[change].contiguous()


@given(draws=st.data(), kind=st.sampled_from(list(TOKENIZERS)), attention=st.sampled_from(["softmax", "lln_diag"]))
def test_changed_directory_is_refused_or_converted(sources, draws, kind, attention):
    with tempfile.TemporaryDirectory() as name:
        folder, mark = Path(name), Path(name, "mark")
        (folder / "source").mkdir()
        for file, content in changed(draws, sources[kind], mark).items():
            (folder / "source" / file).write_bytes(content)
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = main(["convert", str(folder / "source"), str(folder / "out"), "--attention", attention])
        assert not mark.exists(), "code of the directory ran"
        if code:
            assert errors.getvalue().count("\n") == 1, f"not one line: {errors.getvalue()}"
            assert [path.name for path in folder.iterdir()] == ["source"], "something is left"
        else:
            event("converted")
            check_converted(folder / "out")


def check_converted(out):
    """The model runs, and its tokenizer, if there is one, gives ids that the model has."""
    model, task = load_model(str(out / CHECKPOINT))
    size = len(task.source_dictionary)
    logits, _ = model(torch.full((1, 5), 4))
    assert logits.shape[-1] == size
    try:
        vocabulary = load_vocabulary(str(out))
        ids, _ = encode_block(vocabulary.tokenizer, vocabulary.table, LINES)
    except DataError:
        return
    assert 0 <= ids.min() <= ids.max() < size
