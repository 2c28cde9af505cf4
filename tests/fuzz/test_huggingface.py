"""Changed directories of Hugging Face are rejected in one line, or converted to a model that runs."""

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

import tests.conversion.conftest  # noqa: F401  it keeps transformers off the network
from lln_fairseq.__main__ import main
from lln_fairseq.conversion.convert import CHECKPOINT
from lln_fairseq.errors import UserError
from lln_fairseq.inference.loading import load_model
from lln_fairseq.text.parallel_encoder import encode_block
from lln_fairseq.text.vocabulary import load_vocabulary
from tests.conversion.sources import TOKENIZERS, make_model
from tests.fuzz.damage import damages, malicious_objects, replacements, torch_bytes

WEIGHTS = "model.safetensors"
LINES = ["The plot isn't new", "", "ж <mask> <s>  two  spaces", "a" * 200]
NUMBERS = [-1, 0, 1, 2, 7, 1 << 40, 0.5, float("nan")]
VALUES = [None, True, *NUMBERS, "", "x", "roberta", "../up", "\ud800", [], {}, ["a", 1], {"a": 1}]
PATHS = ["../source/part.bin", "../source/part.safetensors", "/etc/passwd", "", ".", "\0", 1, None]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return the contents of the files of a small model, by kind of model and by name."""
    contents = {}
    for kind, tokenizer in TOKENIZERS.items():
        folder = tmp_path_factory.mktemp(kind)
        make_model(kind, folder)
        if kind in ("roberta", "bert"):  # for the others, convert reads the older files of the tokenizer
            tokenizer.from_pretrained(folder).save_pretrained(folder / "new")
            (folder / "new" / "tokenizer.json").rename(folder / "tokenizer.json")
        contents[kind] = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    return contents


def draw_changed_files(data, files, mark):
    """Draw the files with one of them damaged, missing, or with other values; a pickle may try to create `mark`."""
    files = dict(files)
    kind = data.draw(st.sampled_from(["bytes", "lost", "json", "json", "tensor", "tensor", "pickle", "index"]))
    name = data.draw(st.sampled_from(list(files)))
    if kind == "bytes":
        files[name] = data.draw(damages(files[name])).apply(files[name])
    elif kind == "lost":
        del files[name]
    elif kind == "json":
        name = data.draw(st.sampled_from([name for name in files if name.endswith(".json")]))
        content = json.loads(files[name])
        files[name] = json.dumps(data.draw(replacements(content, VALUES)).apply(content)).encode()
    elif kind == "tensor":
        tensors = load(files[WEIGHTS])
        change_tensor(data, tensors)
        files[WEIGHTS] = save(tensors)
    elif kind == "pickle":
        state = load(files.pop(WEIGHTS))
        replacement = data.draw(replacements(state, [*malicious_objects(mark), *VALUES]))
        files["pytorch_model.bin"] = torch_bytes(replacement.apply(state))
    else:
        part = data.draw(st.sampled_from(["part.safetensors", "part.bin"]))
        files[part] = files.pop(WEIGHTS)
        listed_path = data.draw(st.sampled_from([part, *PATHS]))
        weight_map = data.draw(st.sampled_from([{"x": listed_path}, [listed_path], {}, None]))
        files[f"{WEIGHTS}.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files


def change_tensor(data, tensors):
    """Give one of the tensors, in place, another type, shape, content or name, or remove it."""
    name = data.draw(st.sampled_from(sorted(tensors)))
    value = tensors.pop(name)
    changed_values = {
        "half": value.half(),
        "bfloat16": value.bfloat16(),
        "long": value.long(),
        "bool": value.bool(),
        "float8": value.to(torch.float8_e4m3fn),
        "first row": value[0],
        "one row": value[:1],
        "unsqueezed": value[None],
        "nan": torch.full_like(value, float("nan")),
        "empty": torch.empty(0),
    }
    change = data.draw(st.sampled_from(["removed", *changed_values]))
    if change != "removed":
        new_name = data.draw(st.sampled_from([name, f"{name}x", f"x.{name}"]))
        tensors[new_name] = changed_values[change].contiguous()


@given(data=st.data(), kind=st.sampled_from(list(TOKENIZERS)), attention=st.sampled_from(["softmax", "lln_diag"]))
def test_changed_directory_is_rejected_or_converted(sources, data, kind, attention):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mark = folder / "mark"
        (folder / "source").mkdir()
        for file, content in draw_changed_files(data, sources[kind], mark).items():
            (folder / "source" / file).write_bytes(content)
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = main(["convert", str(folder / "source"), str(folder / "out"), "--attention", attention])

        assert not mark.exists(), "code of the directory ran"
        if code:
            assert errors.getvalue().count("\n") == 1, f"not one line: {errors.getvalue()}"
            assert [path.name for path in folder.iterdir()] == ["source"], "files were left behind"
        else:
            event("converted")
            assert_model_runs(folder / "out")


def assert_model_runs(out):
    """Assert that the model runs, and that its tokenizer, if there is one, gives ids that the model has."""
    model, task = load_model(str(out / CHECKPOINT))
    size = len(task.source_dictionary)
    logits, _ = model(torch.full((1, 5), 4))
    assert logits.shape[-1] == size
    try:
        vocabulary = load_vocabulary(str(out))
        ids, _ = encode_block(vocabulary, LINES)
    except UserError:
        return
    assert 0 <= ids.min() <= ids.max() < size
