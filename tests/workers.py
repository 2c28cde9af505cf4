"""Workers of torch.distributed on this machine (gloo). Each is a training in a process of its own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

FAIRSEQ_TRAIN = "import lln_fairseq; lln_fairseq.register(); from fairseq_cli.train import cli_main; cli_main()"
DISTRIBUTED = ("--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")


def free_port():
    """Return a TCP port of this machine that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_training(*arguments):
    """Start fairseq-train in a process of its own, whose output is a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", FAIRSEQ_TRAIN, *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
