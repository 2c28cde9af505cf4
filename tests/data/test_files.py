"""Files are written completely or not at all."""

import errno
import os

import pytest

from lln_fairseq.data import files
from lln_fairseq.data.files import atomic_path, write_bytes


def test_atomic_path_creates_the_file_at_the_end(tmp_path):
    target = tmp_path / "new" / "file"

    with atomic_path(target) as temporary:
        temporary.write_bytes(b"whole")
        assert not target.exists()

    assert target.read_bytes() == b"whole"
    assert os.listdir(target.parent) == ["file"]


def test_atomic_path_keeps_the_old_file_on_failure(tmp_path):
    target = tmp_path / "file"
    target.write_bytes(b"whole")

    def write_half():
        with atomic_path(target) as temporary:
            temporary.write_bytes(b"ha")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert target.read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["file"]


def test_write_bytes_does_not_touch_an_identical_file(tmp_path, monkeypatch):
    write_bytes(tmp_path / "file", b"same")
    monkeypatch.setattr(files, "atomic_path", None)  # calling it would raise

    write_bytes(tmp_path / "file", b"same")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_raises_an_error_with_the_file_name(tmp_path):
    def write_to_full_disk():
        with atomic_path(tmp_path / "file") as temporary:
            temporary.symlink_to("/dev/full")
            with temporary.open("wb") as file:
                file.write(b"x" * 10)

    with pytest.raises(OSError, match=r"No space left.*file'") as error:
        write_to_full_disk()
    assert error.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []
