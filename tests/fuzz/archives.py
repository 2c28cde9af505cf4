"""Zip and tar archives: damaged, forged, with names, sizes and members that no honest program writes."""

import gzip
import io
import lzma
import random
import tarfile
import warnings
import zipfile
from functools import cache
from pathlib import Path

from data_prep.archives import open_tree, read_nested_members
from data_prep.command import DataError
from tests.fuzz._damage import damaged

ZIP = {
    "stored": zipfile.ZIP_STORED,
    "deflated": zipfile.ZIP_DEFLATED,
    "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}
TAR = ("", "gz", "bz2", "xz")
FORMATS = (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
NAMES = ("a.txt", "b.tsv", "dir/a.txt", "dir/sub/c", "ünï/çödé", "x" * 120, "n/" * 60 + "deep", "d.xz", "e.gz")
BAD_NAMES = ("../up", "/abs", "C:/win", "a/../../b", "..\\up", "", ".", "a\x00b", "./a.txt", "dir//a.txt", "\udcff")

Members = list[tuple[str, bytes]]


def attack(rng: random.Random, folder: Path) -> str:
    """One archive, read member by member."""
    if rng.random() < 0.003:
        return bomb(rng, folder)
    members = [(name, content(rng, name)) for name in rng.sample(NAMES, rng.randint(1, 5))]
    path = folder / rng.choice(("a.zip", "a.tar.gz", "a.tar", "archive"))
    return rng.choice((broken, broken, forged, unusual, nested))(rng, path, members)


def content(rng: random.Random, name: str) -> bytes:
    plain = rng.choice((b"", b"text\n" * rng.randint(1, 2000), rng.randbytes(rng.randint(1, 3000))))
    return {"d.xz": lzma.compress, "e.gz": gzip.compress}.get(name, bytes)(plain)


def zipped(members: Members, kind: str) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(buffer, "w") as archive:  # of duplicates
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, ZIP[kind])
    return buffer.getvalue()


def tarred(members: Members, kind: str, form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{kind}", format=form, errors="surrogateescape") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def read(path: Path) -> dict[str, bytes] | None:
    """Everything in the archive; None where something of it is refused."""
    try:
        tree = open_tree(path)
        found = {name: tree.read(name) for name in tree.members}
    except DataError:
        return None
    finally:
        assert [file.name for file in path.parent.iterdir()] == [path.name], "something was written"
    return {path.name: b"not an archive"} if tree.archive is None else found


def plain(members: Members) -> dict[str, bytes]:
    opener = {".xz": lzma.decompress, ".gz": gzip.decompress}
    return {name: opener.get(Path(name).suffix, bytes)(data) for name, data in members}


def broken(rng: random.Random, path: Path, members: Members) -> str:
    """Whatever vouches for its content with a checksum is what it was, or refused."""
    kind = rng.choice((*ZIP, *TAR))
    data = zipped(members, kind) if kind in ZIP else tarred(members, kind, rng.choice(FORMATS))
    if rng.random() < 0.1:
        path.write_bytes(data)
        assert read(path) == plain(members), "a sound archive is not read"
        return "read"
    path.write_bytes(damaged(rng, data) or b"-")
    found = read(path)
    if found is None:
        return "refused"
    if found == {path.name: b"not an archive"}:
        return "not an archive"
    if kind != "":  # a plain tar archive has checksums of its headers alone
        assert found == plain(members), f"{kind}: other members or contents"
    return "same"


def forged(rng: random.Random, path: Path, members: Members) -> str:
    """Headers that are consistent in themselves and lie."""
    return rng.choice((forged_tar, forged_zip))(rng, path, members)


def forged_tar(rng: random.Random, path: Path, members: Members) -> str:
    data = bytearray(tarred(members, "", rng.choice(FORMATS)))
    blocks = [start for start in range(0, len(data) - 512, 512) if data[start + 257 : start + 262] == b"ustar"]
    start = rng.choice(blocks)
    sizes = (b"77777777777\0", b"-0000000001\0", b"\x80" + bytes(7) + b"\x7f" * 4, b"\xff" * 12, b"abcdefghijk\0")
    where, field = rng.choice(
        (
            (124, rng.choice(sizes)),
            (156, rng.choice((b"S", b"x", b"g", b"L", b"K", b"1", b"2", b"3", b"5", b"7", b"X", b"\0"))),
            (0, rng.choice(("../up", "/abs", "", "\0", "a\\..\\..\\b")).encode().ljust(100, b"\0")),
            (386, rng.randbytes(97)),  # the map of a sparse member
            (345, b"..".ljust(155, b"\0")),
        )
    )
    data[start + where : start + where + len(field)] = field
    if rng.random() < 0.3:
        data[start + 156 : start + 157] = b"S"
    data[start + 148 : start + 156] = b" " * 8
    data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    packed = {"gz": gzip.compress, "": bytes}[rng.choice(("", "gz"))](bytes(data))
    path.write_bytes(packed)
    return verdict(read(path))


def forged_zip(rng: random.Random, path: Path, members: Members) -> str:
    data = bytearray(zipped(members, rng.choice(list(ZIP))))
    fields = ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (42, 4))
    signature = rng.choice((b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"))
    start = data.index(signature)
    offset, size = rng.choice(fields)
    number = rng.choice((bytes(size), b"\xff" * size, b"\x01" + bytes(size - 1), rng.randbytes(size)))
    data[start + offset : start + offset + size] = number
    path.write_bytes(data)
    found = read(path)
    names = {name for name, _ in members}
    assert found is None or tree_name(found, path) or set(found) <= names, "a member that was never there"
    return verdict(found)


def tree_name(found: dict[str, bytes], path: Path) -> bool:
    return list(found) == [path.name]


def unusual(rng: random.Random, path: Path, members: Members) -> str:
    """What is well formed, but not to be trusted: names that lead out, duplicates, links, pax headers that lie."""
    rng.choice((bad_name, twice, link, pax))(rng, path, members)
    found = read(path)
    assert found is None or not {"../up", "/abs", "C:/win", "a/../../b"} & set(found)
    return verdict(found)


def bad_name(rng: random.Random, path: Path, members: Members) -> None:
    members = [*members, (rng.choice(BAD_NAMES), b"bad")]
    pack_as_zip = rng.random() < 0.5 and "\udcff" not in members[-1][0]  # zipfile does not write that
    path.write_bytes(zipped(members, "deflated") if pack_as_zip else tarred(members, "gz", tarfile.GNU_FORMAT))


def twice(rng: random.Random, path: Path, members: Members) -> None:
    members = [*members, (members[0][0], b"another")]
    rng.shuffle(members)
    path.write_bytes(zipped(members, "stored") if rng.random() < 0.5 else tarred(members, rng.choice(TAR)))
    assert read(path) is None, "a member that is there twice is read"


def link(rng: random.Random, path: Path, members: Members) -> None:
    with tarfile.open(path, rng.choice(("w:gz", "w"))) as archive:
        info = tarfile.TarInfo(rng.choice(("link", "a.txt")))
        info.type = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE))
        info.linkname = rng.choice(("/etc/passwd", "../..", "b.tsv", info.name))
        archive.addfile(info)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    assert read(path) is None, "a link is read"


PAX = (
    ("size", "-512"), ("size", "99999999999"), ("size", "x"), ("size", "0"), ("path", "../up"), ("path", ""),
    ("hdrcharset", "BINARY"), ("hdrcharset", "?"), ("GNU.sparse.major", "1"), ("GNU.sparse.map", "0,1,x"),
    ("GNU.sparse.size", "8000000000"), ("GNU.sparse.map", "0,8000000000"), ("GNU.sparse.numblocks", "9999999999"),
    ("mtime", "nan"), ("uid", "-1"), ("path", "\x00"), ("comment", "x" * 3_000_000),
)  # fmt: skip


def pax(rng: random.Random, path: Path, members: Members) -> None:
    headers = dict(rng.sample(PAX, rng.randint(1, 3)))
    if rng.random() < 0.5 and "GNU.sparse.major" in headers:
        headers["GNU.sparse.minor"] = "0"
    with tarfile.open(path, rng.choice(("w:gz", "w")), format=tarfile.PAX_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(data), headers
            archive.addfile(info, io.BytesIO(data))


def nested(rng: random.Random, path: Path, members: Members) -> str:
    """An archive in an archive, damaged inside or outside."""
    inner = tarred(members, rng.choice(TAR[1:]))
    spoilt = damaged(rng, inner) if rng.random() < 0.7 else inner
    outer = tarred([("pkg/inner.tar.gz", spoilt)], "gz")
    path.write_bytes(outer if spoilt != inner else damaged(rng, outer))
    try:
        found = read_nested_members(path, "pkg/inner.tar.gz", [name for name, _ in members])
    except DataError:
        return "refused"
    assert found == dict(members), "other contents"
    return "same"


@cache
def bomb_of(kind: str) -> bytes:
    zeros = bytes(80 << 20)
    if kind == "xz in a zip":
        return zipped([("a.txt.xz", lzma.compress(zeros, preset=0))], "stored")
    return zipped([("a.txt", zeros)], kind) if kind in ZIP else tarred([("a.txt", zeros)], kind)


def bomb(rng: random.Random, folder: Path) -> str:
    path = folder / "bomb"
    path.write_bytes(bomb_of(rng.choice(("deflated", "bzip2", "gz", "xz in a zip"))))
    assert read(path) is None, "a bomb is read"
    return "bomb refused"


def verdict(found: dict[str, bytes] | None) -> str:
    return "refused" if found is None else "read"
