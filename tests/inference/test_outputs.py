"""The files that a user names for outputs: links stay links, and nothing of the user's is lost."""

import os

import pytest

from lln_fairseq.errors import UserError
from lln_fairseq.inference import outputs
from lln_fairseq.inference.outputs import check_output_path, output_path, reject_input_as_output


def write(path, text):
    with output_path(path) as out:
        out.write_text(text)


def test_link_stays_a_link_to_the_new_content(tmp_path):
    target = tmp_path / "real" / "out"
    target.parent.mkdir()
    (tmp_path / "link").symlink_to(target)

    for text in ("new", "newer"):  # the target is missing, then it exists
        write(tmp_path / "link", text)

        assert (tmp_path / "link").is_symlink()
        assert target.read_text() == text


def test_pipe_is_written_and_stays_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)

    write(tmp_path / "pipe", "scores")

    assert os.read(reader, 100) == b"scores"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_file_is_kept_if_the_writing_fails(tmp_path):
    (tmp_path / "out").write_text("old")

    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "out", "half of it \ud800")

    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "old")]


@pytest.mark.parametrize(("name", "message"), [(".", "is a directory"), ("no/a", "no such directory")])
def test_name_that_cannot_be_written_is_an_error(name, message, tmp_path):
    with pytest.raises(UserError, match=f"cannot write .*{message}"):
        check_output_path(tmp_path / name)


def test_redirected_input_is_not_the_output(tmp_path, monkeypatch):
    (tmp_path / "in").write_text("good\n")
    with (tmp_path / "in").open() as stream:
        monkeypatch.setattr(outputs, "STANDARD_INPUT", stream.fileno())
        with pytest.raises(UserError, match="--output would replace the texts"):
            reject_input_as_output("-", tmp_path / "in")
        reject_input_as_output("-", tmp_path / "out")
