"""Archives are verified before use, read without touching the disk, and files appear whole or not at all."""

import io
import os
import subprocess
import sys

import pytest

from data_prep import fetch
from data_prep.command import DataError
from data_prep.fetch import Sdist, atomic_path, obtain, read_members, sha256_of, write_bytes
from tests.data_prep.conftest import tar_gz


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
    monkeypatch.setattr(fetch, "atomic_path", None)  # would raise if used
    write_bytes(tmp_path / "file", b"same")


@pytest.mark.parametrize("content", [b"", b"not an archive", None])
def test_wrong_archive_is_refused_and_nothing_is_kept(tmp_path, content):
    given, cache = tmp_path / "given", tmp_path / "cache"
    if content is not None:
        given.write_bytes(content)
    expected = {b"": "is empty", b"not an archive": "sha256", None: "cannot read"}[content]
    with pytest.raises(DataError, match=expected):
        obtain(Sdist("pkg", "1", "pkg-1.tar.gz", "0" * 64), cache, given)
    assert not cache.exists()


def test_archive_is_cached_and_a_damaged_cache_is_replaced(tmp_path, monkeypatch):
    given, cache = tmp_path / "given", tmp_path / "cache"
    given.write_bytes(b"content")
    sdist = Sdist("pkg", "1", "pkg-1.tar.gz", sha256_of(given))
    monkeypatch.setattr(fetch, "pip_download", lambda sdist, folder: given)
    cached = obtain(sdist, cache)
    assert cached.read_bytes() == b"content"
    cached.write_bytes(b"damaged")
    assert obtain(sdist, cache).read_bytes() == b"content"
    monkeypatch.setattr(fetch, "pip_download", None)
    assert obtain(sdist, cache) == cached


def test_pip_failure_shows_its_last_lines_and_pins_the_checksum(tmp_path, monkeypatch):
    seen = {}

    def fake_run(command, **_):
        seen["command"] = command
        seen["requirements"] = (tmp_path / "requirements.txt").read_text()
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="first\n" + "x\n" * 9 + "ERROR: no index\n")

    monkeypatch.setattr(subprocess, "run", fake_run)
    with pytest.raises(DataError, match="ERROR: no index") as error:
        fetch.pip_download(Sdist("pkg", "1", "pkg-1.tar.gz", "ab" * 32), tmp_path)
    assert "first" not in str(error.value)
    assert "--archive" in str(error.value)
    assert seen["command"][:3] == [sys.executable, "-m", "pip"]
    assert seen["requirements"] == "pkg==1 --hash=sha256:" + "ab" * 32 + "\n"


def test_members_are_read_by_exact_name_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = tar_gz({"../escape": b"1", "/absolute": b"2", "dir/wanted": b"3", "wanted": b"4"})
    assert read_members(io.BytesIO(content), ["dir/wanted"], "a.tar.gz") == {"dir/wanted": b"3"}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar_gz({"other": b"1"}), "has no member wanted"),
        (tar_gz({"other": b"1"}, links={"wanted": "/etc/passwd"}), "not a plain file"),
        (tar_gz({"wanted": b"1"}, links={"wanted": "other"}), "not a plain file"),
        (tar_gz({"wanted": b"1" * 4000})[:-30], "not a readable tar"),
        (b"", "not a readable tar"),
        (b"plain text", "not a readable tar"),
    ],
)
def test_members_that_cannot_be_trusted_are_refused(content, message):
    with pytest.raises(DataError, match=message):
        read_members(io.BytesIO(content), ["wanted"], "a.tar.gz")
