"""Directories, zip and tar archives are read alike, by name, and what is damaged in them is a DataError."""

import gzip
import io
import lzma
import os
import zipfile

import pytest

from lln_fairseq.data.archives import open_tree, read_matching_files
from lln_fairseq.data.reporting import DataError
from tests.data_prep.conftest import tar_gz


def zipped(members, method=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


FILES = {
    "a/wiki.raw": b"one\ntwo\n",
    "a/b.tsv": b"b",
    "c/b.tsv": b"c",
    "d.raw.xz": lzma.compress(b"d\n"),
    "e.raw.gz": gzip.compress(b"e\n"),
}


@pytest.fixture(params=["directory", "zip", "tar"])
def packed(request, tmp_path):
    path = tmp_path / {"directory": "folder", "zip": "a.zip", "tar": "a.tar.gz"}[request.param]
    if request.param == "directory":
        for name, content in FILES.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    elif request.param == "zip":
        path.write_bytes(zipped({"a/": b"", **FILES}))
    else:
        path.write_bytes(tar_gz(FILES, links={"link.raw": "/etc/passwd"}))
    return path


def test_open_tree_finds_and_decompresses_files(packed):
    tree = open_tree(packed)

    def read(name, **where):
        with tree.open(tree.find(name, **where)) as stream:
            return stream.readlines()

    assert read("wiki.raw") == [b"one\n", b"two\n"]
    assert read("d.raw") == [b"d\n"]
    assert read("e.raw") == [b"e\n"]
    assert read("b.tsv", folder="c") == [b"c"]
    assert read("b.tsv", excluded_folders=["a"]) == [b"c"]
    assert tree.find("b.tsv", folder="x", excluded_folders=["a", "c"]) is None
    assert tree.find("raw") is None
    assert tree.find("link.raw") is None
    with pytest.raises(DataError, match=r"more than one b\.tsv"):
        tree.find("b.tsv")
    with pytest.raises(DataError, match="has no none"):
        tree.read("none")
    assert set(tree.checksums(["a/b.tsv"])) == ({"a/b.tsv"} if packed.is_dir() else {packed.name})
    assert packed.parent.joinpath("folder").exists() == packed.is_dir()  # nothing was unpacked


def test_walk_reads_wanted_files(packed):
    found = {
        name.removeprefix("folder/"): file.read()
        for name, file in read_matching_files(packed, lambda name: "tsv" in name)
    }
    assert found == {"a/b.tsv": b"b", "c/b.tsv": b"c"}


def read_all(path):
    tree = open_tree(path)
    return {name: tree.read(name) for name in tree.openers}


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "x.xz"])
def test_damaged_archive_is_refused(tmp_path, name):
    path = tmp_path / name
    noise = os.urandom(5000)
    content = {"a.zip": zipped({"x": noise}), "a.tar.gz": tar_gz({"x": noise}), "x.xz": lzma.compress(noise)}[name]
    flipped = bytearray(content)
    flipped[2500] ^= 1
    for damaged in (content[:2000], bytes(flipped), b"" if name != "x.xz" else b"text"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{name}.*(is not a readable archive|cannot be read)"):
            read_all(path)
    with pytest.raises(FileNotFoundError):
        open_tree(tmp_path / "none")


def test_encrypted_member_is_refused(tmp_path):
    content = bytearray(zipped({"x": b"text"}))
    content[content.index(b"PK\x01\x02") + 8] |= 1
    content[6] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(DataError, match="encrypted"):
        read_all(tmp_path / "a.zip")
