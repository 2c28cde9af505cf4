"""Workers of torch.distributed on this machine (gloo), each a process that runs a function of a test."""

import socket
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.shortcuts import install_shortcuts

MINUTES = 5


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run(rank, function, workers, port, results, arguments):
    torch.set_num_threads(1)
    install_shortcuts()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=workers, rank=rank,
                            timeout=timedelta(minutes=MINUTES))  # fmt: skip
    try:
        results.put((rank, function(rank, *arguments), None))
    except Exception:
        results.put((rank, None, traceback.format_exc()))


def run_workers(workers, function, *arguments):
    """[function(rank, *arguments) of rank 0, 1, ...]; the function must be one of a module."""
    context = torch.multiprocessing.get_context("spawn")
    results, port = context.SimpleQueue(), free_port()
    processes = [context.Process(target=_run, args=(rank, function, workers, port, results, arguments))
                 for rank in range(workers)]  # fmt: skip
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60 * MINUTES)
    finally:
        for process in processes:
            process.kill()
    found = {}
    while not results.empty():
        rank, result, error = results.get()
        assert error is None, f"worker {rank}:\n{error}"
        found[rank] = result
    return [found.get(rank) for rank in range(workers)]
