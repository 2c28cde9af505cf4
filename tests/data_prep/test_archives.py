"""Directories, zip archives and tar archives are read alike, by name; damage in them raises UserError."""

import gzip
import io
import lzma
import os
import zipfile

import pytest

from data_prep.archives import open_tree, read_matching_files
from lln_fairseq.errors import UserError
from tests.data_prep.conftest import tar_gz


def zip_bytes(members):
    """Return the content of a zip archive with these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
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


@pytest.fixture(params=["directory", "zip", "tar", "tar of ."])
def packed_files(request, tmp_path):
    """Return the path of a directory or an archive that holds FILES."""
    if request.param == "directory":
        path = tmp_path / "directory"
        for name, content in FILES.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    elif request.param == "zip":
        path = tmp_path / "a.zip"
        path.write_bytes(zip_bytes({"a/": b"", **FILES}))
    elif request.param == "tar of .":
        path = tmp_path / "a.tar.gz"
        path.write_bytes(tar_gz({f"./{name}": content for name, content in FILES.items()}))
    else:
        path = tmp_path / "a.tar.gz"
        path.write_bytes(tar_gz(FILES, links={"link.raw": "/etc/passwd"}))
    return path


def test_open_tree_finds_and_decompresses_files(packed_files):
    tree = open_tree(packed_files)

    def read_lines(name, **options):
        with tree.open(tree.find(name, **options)) as stream:
            return stream.readlines()

    assert read_lines("wiki.raw") == [b"one\n", b"two\n"]
    assert read_lines("d.raw") == [b"d\n"]
    assert read_lines("e.raw") == [b"e\n"]
    assert read_lines("b.tsv", directory="c") == [b"c"]
    assert read_lines("b.tsv", excluded_directories=["a"]) == [b"c"]
    assert tree.find("b.tsv", directory="x", excluded_directories=["a", "c"]) is None
    assert tree.find("raw") is None
    assert tree.find("link.raw") is None
    with pytest.raises(UserError, match=r"more than one b\.tsv"):
        tree.find("b.tsv")
    with pytest.raises(UserError, match="has no none"):
        tree.read("none")


def test_open_tree_unpacks_nothing(packed_files):
    open_tree(packed_files).read("a/b.tsv")

    assert os.listdir(packed_files.parent) == [packed_files.name]


def test_checksums_are_of_the_archive_or_of_the_files(packed_files):
    names = set(open_tree(packed_files).checksums(["a/b.tsv"]))

    if packed_files.is_dir():
        assert names == {"a/b.tsv"}
    else:
        assert names == {packed_files.name}


def test_read_matching_files(packed_files):
    contents = {}
    for name, file in read_matching_files(packed_files, lambda name: "tsv" in name):
        contents[name.removeprefix("directory/")] = file.read()

    assert contents == {"a/b.tsv": b"b", "c/b.tsv": b"c"}


def read_all_files(path):
    tree = open_tree(path)
    return {name: tree.read(name) for name in tree.openers}


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "x.xz"])
def test_damaged_archive_raises(tmp_path, name):
    path = tmp_path / name
    noise = os.urandom(5000)
    content = {"a.zip": zip_bytes({"x": noise}), "a.tar.gz": tar_gz({"x": noise}), "x.xz": lzma.compress(noise)}[name]
    truncated = content[:2000]
    flipped = bytearray(content)
    flipped[2500] ^= 1
    no_archive = b"text" if name == "x.xz" else b""

    for damaged in (truncated, bytes(flipped), no_archive):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{name}.*(is not a readable archive|cannot be read)"):
            read_all_files(path)


def test_encrypted_member_raises(tmp_path):
    content = bytearray(zip_bytes({"x": b"text"}))
    content[content.index(b"PK\x01\x02") + 8] |= 1  # the flag "encrypted" in the directory and in the member's header
    content[6] |= 1
    (tmp_path / "a.zip").write_bytes(content)

    with pytest.raises(UserError, match="encrypted"):
        read_all_files(tmp_path / "a.zip")
