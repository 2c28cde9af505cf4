"""Directories, zip and tar archives read alike, by name, without a file on the disk."""

import gzip
import io
import lzma
import os
import zipfile

import pytest

from data_prep.archives import open_tree, read_members
from data_prep.command import DataError
from tests.data_prep.conftest import tar_gz


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


FILES = {"a/wiki.raw": b"one\ntwo\n", "a/b.tsv": b"b", "c/b.tsv": b"c", "d.raw.xz": lzma.compress(b"d\n")}
FILES["e.raw.gz"] = gzip.compress(b"e\n")


@pytest.fixture(params=["directory", "zip", "tar"])
def packed(request, tmp_path):
    path = tmp_path / {"directory": "folder", "zip": "a.zip", "tar": "a.tar.gz"}[request.param]
    if request.param == "directory":
        for name, content in FILES.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    else:
        path.write_bytes(zipped(FILES) if request.param == "zip" else tar_gz(FILES))
    return path


def test_members_are_found_and_decompressed(packed):
    tree = open_tree(packed)

    def read(name, **where):
        with tree.open(tree.find(name, **where)) as stream:
            return stream.readlines()

    assert read("wiki.raw") == [b"one\n", b"two\n"]
    assert read("d.raw") == [b"d\n"]
    assert read("e.raw") == [b"e\n"]
    assert read("b.tsv", folder="c") == [b"c"]
    assert read("b.tsv", others=["a"]) == [b"c"]
    assert tree.find("b.tsv", folder="x", others=["a", "c"]) is None
    assert tree.find("raw") is None
    with pytest.raises(DataError, match=r"more than one b\.tsv"):
        tree.find("b.tsv")
    assert set(tree.checksums(["a/b.tsv"])) == ({"a/b.tsv"} if packed.is_dir() else {packed.name})


@pytest.mark.parametrize("name", ["../escape", "a/../../escape", "/tmp/absolute", "..\\escape", "C:/escape"])
@pytest.mark.parametrize("pack", [zipped, tar_gz])
def test_names_that_lead_out_are_refused(tmp_path, name, pack):
    path = tmp_path / "archive"
    path.write_bytes(pack({"good": b"1", name: b"2"}))
    with pytest.raises(DataError, match="leads out of the archive"):
        open_tree(path)
    assert os.listdir(tmp_path) == ["archive"]


def read_x(path):
    tree = open_tree(path)
    with tree.open(tree.find("x")) as stream:
        return stream.read()


def test_damaged_archives(tmp_path):
    whole = {"a.zip": zipped({"x": os.urandom(5000)}), "a.tar.gz": tar_gz({"x": os.urandom(5000)})}
    whole["x.xz"] = lzma.compress(os.urandom(5000))
    for name, content in whole.items():
        path = tmp_path / name
        path.write_bytes(content[:2000])
        with pytest.raises(DataError, match=name):
            read_x(path)
        path.write_bytes(b"")
        with pytest.raises(DataError, match="is empty"):
            open_tree(path)
    path = tmp_path / "a.zip"
    damaged = bytearray(whole["a.zip"])
    damaged[2500] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="cannot be read"):
        read_x(path)
    with pytest.raises(DataError, match="No such file"):
        open_tree(tmp_path / "none")


def test_members_are_read_by_exact_name_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = tar_gz({"dir/wanted": b"3", "wanted": b"4"})
    assert read_members(io.BytesIO(content), ["dir/wanted"], "a.tar.gz") == {"dir/wanted": b"3"}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar_gz({"other": b"1"}), "has no member wanted"),
        (tar_gz({"other": b"1"}, links={"wanted": "/etc/passwd"}), "not a plain file"),
        (tar_gz({"wanted": b"1"}, links={"wanted": "other"}), "not a plain file"),
        (tar_gz({"wanted": b"1" * 4000})[:-30], "not a readable tar"),
        (tar_gz({"../escape": b"1", "wanted": b"1"}), "leads out of the archive"),
        (b"", "not a readable tar"),
        (b"plain text", "not a readable tar"),
    ],
)
def test_members_that_cannot_be_trusted_are_refused(content, message):
    with pytest.raises(DataError, match=message):
        read_members(io.BytesIO(content), ["wanted"], "a.tar.gz")
