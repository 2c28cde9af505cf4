"""Directories, zip and tar archives read alike, by name, without a file on the disk."""

import gzip
import io
import lzma
import os
import tarfile
import tracemalloc
import zipfile

import pytest

from data_prep import streams
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


@pytest.mark.parametrize("name", ["../escape", "a/../../escape", "/absolute", "..\\escape", "C:/escape"])
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
    ids=lambda value: None if isinstance(value, str) else "archive",  # gzip has the time in it
)
def test_members_that_cannot_be_trusted_are_refused(content, message):
    with pytest.raises(DataError, match=message):
        read_members(io.BytesIO(content), ["wanted"], "a.tar.gz")


def one_member(path):
    tree = open_tree(path)
    return tree.read(next(iter(tree.members)))


def zip_with(tmp_path, name="x", data=b"text\n" * 100, method=zipfile.ZIP_DEFLATED, **fields):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo(name)
        for field, value in fields.items():
            setattr(info, field, value)
        archive.writestr(info, data, method)
    return path


def patch_zip(path, offset, value):
    """Other bytes at `offset` of the member's record in the list, and where the member begins if it has the field."""
    content = bytearray(path.read_bytes())
    start = content.index(b"PK\x01\x02")
    content[start + offset : start + offset + len(value)] = value
    content[offset - 2 : offset - 2 + len(value)] = value
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(8, b"\x01\x00", "encrypted"), (10, b"\x63\x00", "compression"), (8, b"\x20\x00", "patched")],
)
def test_members_that_zipfile_cannot_read_are_refused_when_asked_for(tmp_path, offset, value, message):
    path = zip_with(tmp_path)
    patch_zip(path, offset, value)
    with pytest.raises(DataError, match=rf"a\.zip: member x cannot be read: .*{message}"):
        one_member(path)


def test_names_that_are_none(tmp_path):
    with pytest.raises(DataError, match="a member without a name"):
        open_tree(zip_with(tmp_path, name=""))
    path = zip_with(tmp_path, name="é")
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xff"))
    with pytest.raises(DataError, match="is a damaged archive: 'utf-8' codec"):
        open_tree(path)


def test_a_link_in_a_zip_is_no_file(tmp_path):
    with pytest.raises(DataError, match="not a plain file"):
        one_member(zip_with(tmp_path, external_attr=0o120777 << 16))


def test_a_zip_without_its_whole_list_is_refused(tmp_path):
    content = zipped({"a": b"1", "b": b"2"})
    second = content.rindex(b"PK\x01\x02")
    comment = content.index(b"PK\x01\x02") + 32  # the first record swallows the second as its comment
    path = tmp_path / "a.zip"
    swallowed = content.rindex(b"PK\x05\x06") - second
    path.write_bytes(content[:comment] + swallowed.to_bytes(2, "little") + content[comment + 2 :])
    with pytest.raises(DataError, match="list of members is not complete"):
        open_tree(path)


def tar_with(tmp_path, form=tarfile.PAX_FORMAT, mode="w", kind=tarfile.REGTYPE, **headers):
    path = tmp_path / "a.tar"
    with tarfile.open(path, mode, format=form) as archive:
        info = tarfile.TarInfo("x")
        info.size, info.type, info.pax_headers = 1000, kind, headers
        archive.addfile(info, io.BytesIO(bytes(1000)))
    return path


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"size": "-2048"}, "the size of x is negative"),
        ({"size": "99999999999"}, "not a readable tar archive"),
        ({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, "not a readable tar archive"),
        ({"GNU.sparse.map": "0,x"}, "not a readable tar archive"),
        ({"GNU.sparse.map": "0,8000000000", "GNU.sparse.size": "8000000000"}, "x cannot be read: it is sparse"),
        ({"comment": "x" * (2 << 20)}, "a header declares more than 1024 KiB"),
    ],
)
def test_tar_headers_that_lie(tmp_path, headers, message):
    with pytest.raises(DataError, match=message):
        one_member(tar_with(tmp_path, **headers))


def test_a_header_of_8_gb_is_not_read(tmp_path):
    path = tar_with(tmp_path, form=tarfile.GNU_FORMAT, kind=tarfile.GNUTYPE_LONGNAME)
    content = bytearray(path.read_bytes())
    content[124:136] = b"77777777777\0"
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(DataError, match="a header declares more than 1024 KiB"):
        open_tree(path)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


def test_a_tar_archive_that_stops_at_a_member_is_cut_off(tmp_path):
    path = tmp_path / "a.tar"
    content = gzip.decompress(tar_gz({"x": b"1" * 512, "y": b"2" * 512}))
    path.write_bytes(content[:1024])
    with pytest.raises(DataError, match="no mark of its end"):
        open_tree(path)
    path.write_bytes(content[:1024] + bytes([1]) + content[1025:])  # tarfile takes the damaged header for the end
    with pytest.raises(DataError, match="no mark of its end"):
        open_tree(path)


def test_the_checksum_at_the_end_of_a_tar_gz_counts(tmp_path):
    path = tmp_path / "a.tar.gz"
    content = bytearray(tar_gz({"x": b"1"}))
    content[-8] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="CRC check failed"):
        open_tree(path)


@pytest.mark.parametrize("pack", [zipped, tar_gz], ids=["zip", "tar"])
def test_a_member_that_is_there_twice_is_refused_by_every_reader(tmp_path, pack):
    path = tmp_path / "archive"
    path.write_bytes(pack({"x": b"1", "./x": b"2", "y": b"3"}))
    tree = open_tree(path)
    assert tree.read("y") == b"3"
    with pytest.raises(DataError, match="x cannot be read: it is not a plain file that occurs once"):
        tree.read("x")
    if pack is tar_gz:
        with pytest.raises(DataError, match="not a plain file that occurs once"):
            read_members(io.BytesIO(path.read_bytes()), ["x"], "a.tar.gz")


@pytest.mark.parametrize("kind", ["deflated", "bzip2", "tar", "xz", "xz in a zip"])
def test_what_grows_too_much_is_refused(tmp_path, kind):
    zeros, path = bytes(70 << 20), tmp_path / "x.xz"
    packed = {
        "deflated": lambda: zip_with(tmp_path, data=zeros),
        "bzip2": lambda: zip_with(tmp_path, data=zeros, method=zipfile.ZIP_BZIP2),
        "tar": lambda: path.write_bytes(gzip.compress(gzip.decompress(tar_gz({"x": zeros})), 1)) and path,
        "xz": lambda: path.write_bytes(lzma.compress(zeros, preset=0)) and path,
        "xz in a zip": lambda: zip_with(tmp_path, "x.xz", lzma.compress(zeros, preset=0), zipfile.ZIP_STORED),
    }[kind]()
    with pytest.raises(DataError, match="more than 64 MiB come out of a small file"):
        one_member(packed)


def test_text_that_is_held_in_memory_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "IN_MEMORY", 400)
    with pytest.raises(DataError, match="x has more than 0 MiB, too many to be held in memory"):
        one_member(zip_with(tmp_path))
