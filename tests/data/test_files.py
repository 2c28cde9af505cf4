"""Files appear whole or not at all."""

import errno
import os

import pytest

from lln_fairseq.data import files
from lln_fairseq.data.files import atomic_path, write_bytes


def test_atomic_path_writes_whole_files_and_nothing_on_failure(tmp_path):
    target = tmp_path / "new" / "file"
    with atomic_path(target) as part:
        part.write_bytes(b"whole")
        assert not target.exists()
    assert target.read_bytes() == b"whole"

    def write_half():
        with atomic_path(target) as part:
            part.write_bytes(b"ha")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert target.read_bytes() == b"whole"
    assert os.listdir(target.parent) == ["file"]


def test_write_bytes_leaves_an_equal_file_alone(tmp_path, monkeypatch):
    write_bytes(tmp_path / "file", b"same")
    monkeypatch.setattr(files, "atomic_path", None)  # would raise if used
    write_bytes(tmp_path / "file", b"same")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    def write():
        with atomic_path(tmp_path / "file") as part:
            part.symlink_to("/dev/full")
            with part.open("wb") as file:
                file.write(b"x" * 10)

    with pytest.raises(OSError, match=r"No space left.*file'") as error:
        write()
    assert error.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []
