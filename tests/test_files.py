"""Files are written completely or not at all."""

import errno
import fcntl
import os
import stat
import subprocess
import sys

import pytest

from lln_fairseq import files
from lln_fairseq.files import atomic_path, write_bytes


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


def test_two_writers_of_one_file_do_not_mix_their_work(tmp_path):
    target = tmp_path / "file"

    with atomic_path(target) as first, first.open("wb") as first_file:
        first_file.write(b"first")
        with atomic_path(target) as second:
            second.write_bytes(b"second one")
        assert target.read_bytes() == b"second one"

    assert target.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def test_failed_writer_keeps_the_work_of_another_one(tmp_path):
    target = tmp_path / "file"

    with atomic_path(target) as first:
        first.write_bytes(b"first")
        with pytest.raises(KeyboardInterrupt), atomic_path(target):
            raise KeyboardInterrupt

    assert target.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    target = tmp_path / "file"
    kill = "import os, signal, sys, pathlib; from lln_fairseq.files import atomic_path\n"
    kill += "with atomic_path(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "file.other.part").touch()

    with atomic_path(target) as alive:
        for _ in range(3):
            subprocess.run([sys.executable, "-c", kill, target])
        assert sorted(os.listdir(tmp_path))[-1] == "file.other.part"
        assert len(os.listdir(tmp_path)) == 3  # one of them is what the last kill left
        alive.write_bytes(b"whole")
    with atomic_path(target):
        pass

    assert sorted(os.listdir(tmp_path)) == ["file", "file.other.part"]


def test_temporary_files_stay_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)

    with atomic_path(tmp_path / "file") as first:
        first.write_bytes(b"first")
        with atomic_path(tmp_path / "file") as second:
            second.write_bytes(b"second")

    assert (tmp_path / "file").read_bytes() == b"first"


def test_file_that_was_removed_before_it_was_locked_is_created_again(tmp_path, monkeypatch):
    lock_file = files.lock_file
    removed = []

    def lock_too_late(handle):
        if not removed:
            (path,) = tmp_path.iterdir()
            path.unlink()
            removed.append(path)
        return lock_file(handle)

    monkeypatch.setattr(files, "lock_file", lock_too_late)

    with atomic_path(tmp_path / "file") as temporary:
        temporary.write_bytes(b"whole")

    assert len(removed) == 1
    assert removed[0] != temporary
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_file_gets_the_permissions_of_the_umask(tmp_path):
    umask = os.umask(0o027)
    try:
        write_bytes(tmp_path / "file", b"whole")
    finally:
        os.umask(umask)

    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_write_bytes_does_not_touch_an_identical_file(tmp_path, monkeypatch):
    write_bytes(tmp_path / "file", b"same")
    monkeypatch.setattr(files, "atomic_path", None)  # calling it would raise

    write_bytes(tmp_path / "file", b"same")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_raises_an_error_with_the_file_name(tmp_path):
    def write_to_full_disk():
        with atomic_path(tmp_path / "file") as temporary:
            temporary.unlink()
            temporary.symlink_to("/dev/full")
            with temporary.open("wb") as file:
                file.write(b"x" * 10)

    with pytest.raises(OSError, match=r"No space left.*/file'") as error:
        write_to_full_disk()
    assert error.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []
