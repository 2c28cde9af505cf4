"""Workers of torch.distributed on this machine (gloo). Each is a process that runs a function of a test module."""

import os
import socket
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.shortcuts import install_shortcuts

MINUTES = 5  # the timeout of a collective, and of each worker
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


def _run_worker(rank, function, workers, port, results, arguments):
    """Join the default group, and put (rank, result, traceback) into the queue; one of the last two is None."""
    torch.set_num_threads(1)
    install_shortcuts()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=workers,
        rank=rank,
        timeout=timedelta(minutes=MINUTES),
    )
    try:
        results.put((rank, function(rank, *arguments), None))
    except Exception:
        results.put((rank, None, traceback.format_exc()))


def run_workers(workers, function, *arguments):
    """Call function(rank, *arguments) in this many processes, and return their results in the order of ranks.

    The function must be one of a module, since new processes import it. A worker that ended without a result has None.
    An exception in a worker fails the test. All processes have ended when this returns.
    """
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    port = free_port()
    processes = []
    for rank in range(workers):
        process = context.Process(target=_run_worker, args=(rank, function, workers, port, queue, arguments))
        processes.append(process)
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60 * MINUTES)
    finally:
        for process in processes:
            process.kill()
    results = [None] * workers
    while not queue.empty():
        rank, result, error = queue.get()
        assert error is None, f"worker {rank}:\n{error}"
        results[rank] = result
    return results
