"""What is killed: each subject does its work in a folder, as its program would, and reads the result from there."""

import contextlib
import functools
import io
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Protocol

import fairseq_cli.train
import pytest
import torch

from data_prep.demo import build
from lln_fairseq.__main__ import main
from lln_fairseq.data.download import obtain
from lln_fairseq.data.files import sha256_bytes
from lln_fairseq.data.published_files import Published
from lln_fairseq.linearize import linearize
from lln_fairseq.ops.lln import lln_attention
from tests.data_prep.conftest import MOVIES, VOCAB_SIZE, fake_rows, snippet_file, tree, write_archive
from tests.fairseq_runs import LLN, MASKED_LM, TRAINING, make_corpus, read_log, train


@functools.cache
def shared() -> Path:
    """A directory for what all runs read; it goes with the process."""
    shared.folder = tempfile.TemporaryDirectory(prefix="kill-")
    return Path(shared.folder.name)


class Subject(Protocol):
    """What every run reads is made before the first fork, by the constructor."""

    def vary(self, rng: random.Random) -> None:
        """Chooses what may differ from case to case without a difference in the result."""

    def work(self, folder: Path) -> None:
        """The command; runs in a process of its own."""

    def result(self, folder: Path) -> Any:
        """What must be equal to an undisturbed run's; `==` compares it."""

    def check_output(self, text: str, undisturbed: str) -> None:
        """AssertionError where what all runs of a case printed does not fit to the undisturbed one."""


class Simple:
    """A subject that has one way to run and prints nothing that counts."""

    def vary(self, rng: random.Random) -> None:
        pass

    def check_output(self, text: str, undisturbed: str) -> None:
        pass


class Data(Simple):
    """data_prep.demo: tokenizer, corpus, labels, manifest."""

    def __init__(self) -> None:
        files = {"movies.txt": snippet_file(MOVIES)}
        files |= {f"{name}.txt": snippet_file(fake_rows(300, seed)) for seed, name in enumerate(("a", "b", "c"), 2)}
        self.archive = shared() / "archive.tar.gz"
        self.source = write_archive(self.archive, files)

    def work(self, folder: Path) -> None:
        build(folder / "out", self.archive, VOCAB_SIZE, source=self.source)

    def result(self, folder: Path) -> dict[str, bytes]:
        return tree(folder / "out")


class Training:
    """fairseq-train with a checkpoint every third update; parameters, optimizer's state, all logged losses."""

    options: ClassVar[tuple] = ("--max-update", 12, "--save-interval-updates", 3)
    workers = 0

    def __init__(self) -> None:
        self.corpus = make_corpus(shared() / "corpus")

    def vary(self, rng: random.Random) -> None:
        self.workers = int(rng.random() < 0.2)  # a loader process outlives its parent by up to five seconds

    def work(self, folder: Path) -> None:
        arguments = (self.corpus, *TRAINING, *MASKED_LM, *LLN, "--save-dir", folder / "run", "--max-epoch", 99,
                     "--keep-interval-updates", 2, *self.options, "--num-workers", self.workers)  # fmt: skip
        sys.argv = ["fairseq-train", *map(str, arguments)]
        fairseq_cli.train.cli_main()

    def result(self, folder: Path) -> Any:
        state = torch.load(folder / "run" / "checkpoint_last.pt")
        kept = [state["model"], state["last_optimizer_state"], state["extra_state"]["val_loss"]]
        return [*map(comparable, kept), sorted(path.name for path in (folder / "run").glob("*.pt"))]

    def check_output(self, text: str, undisturbed: str) -> None:
        expected = losses(undisturbed)
        for update, loss in losses(text).items():
            assert loss == expected[update], f"update {update}: loss {loss}, undisturbed {expected[update]}"


class Saving(Training):
    """The same with a larger model and a checkpoint at every update: most of the time goes into writing them."""

    options = ("--max-update", 4, "--save-interval-updates", 1, "--encoder-embed-dim", 256)


class Fetching(Simple):
    """Download from a server of a few MB/s."""

    content: ClassVar[bytes] = random.Random(0).randbytes(1 << 20)

    def __init__(self) -> None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/file"
        self.file = Published("file", sha256_bytes(self.content), urls=(url,))

    def work(self, folder: Path) -> None:
        os.environ["LLN_DATA_CACHE"] = str(folder)
        obtain(self.file)

    def result(self, folder: Path) -> list[tuple[str, bytes]]:
        return [(path.name, path.read_bytes()) for path in sorted(folder.iterdir()) if path.name != ".lock"]


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(Fetching.content)))
        self.end_headers()
        for position in range(0, len(Fetching.content), 1 << 15):
            try:
                self.wfile.write(Fetching.content[position : position + (1 << 15)])
            except ConnectionError:  # the reader was killed
                return
            time.sleep(0.01)

    def log_message(self, *_: Any) -> None:
        pass


class Compiling(Simple):
    """The C kernels at their first use."""

    def work(self, folder: Path) -> None:
        os.environ["LLN_KERNEL_CACHE"] = str(folder / "kernels")
        q, k, v = torch.linspace(-1, 1, 3 * 2 * 70 * 16).view(3, 1, 2, 70, 16)
        (folder / "out").write_bytes(lln_attention(q, k, v, 1.0, 1.0, backend="cpu").numpy().tobytes())

    def result(self, folder: Path) -> tuple[bytes, list[str]]:
        return (folder / "out").read_bytes(), sorted(path.name for path in (folder / "kernels").glob("*.so"))


class Linearizing(Simple):
    """lln-fairseq linearize with both of its stages, saved every few steps."""

    def __init__(self) -> None:
        self.corpus = make_corpus(shared() / "long", sizes=(("train", 60), ("valid", 40)))
        options = (*MASKED_LM, *LLN, "--attention", "softmax", "--max-positions", 64, "--max-update", 1)
        with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()):
            train(monkeypatch, shared() / "log", self.corpus, shared() / "teacher", *options)
        self.teacher = shared() / "teacher" / "checkpoint_last.pt"

    def work(self, folder: Path) -> None:
        linearize.LOG_INTERVAL = linearize.SAVE_INTERVAL = 5
        options = ("--steps", 40, "--distill", 20, "--tokens", 64, "--length", 32)
        raise SystemExit(main(["linearize", *map(str, (self.teacher, self.corpus, folder / "out", *options))]))

    def result(self, folder: Path) -> Any:
        files = sorted(path.name for path in (folder / "out").iterdir() if path.is_file())
        return comparable(torch.load(folder / "out" / "model.pt")["model"]), files


def losses(log: str) -> dict[str, str]:
    """The logged loss by update, of training and validation."""
    rows = read_log(log)
    found = {row["num_updates"]: row["loss"] for row in rows["train"]}
    return found | {f"{row['valid_num_updates']}, valid": row["valid_loss"] for row in rows["valid"]}


def comparable(value: Any) -> Any:
    """Nested containers with tensors, such that == compares every number."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return [comparable(item) for item in value] if isinstance(value, list | tuple) else value


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "data": Data,
    "training": Training,
    "saving": Saving,
    "fetching": Fetching,
    "compiling": Compiling,
    "linearizing": Linearizing,
}
