"""Train on two machines, and compare with other ways to train. Each machine is a torchrun on this one (CPUs, gloo).

    python -m tests.machines

The program prints a line for every comparison, and ends with exit code 1 at the first one that fails. It shows neither
NCCL nor a network between machines.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.fairseq_runs import losses_and_norms, make_corpus, read_log
from tests.workers import free_port

UPDATES = 60
SAVE_INTERVAL = 5
TIMEOUT = 300  # seconds for a run
LONGEST_END = 60  # seconds in which the other machine has to end after one is lost
LOST = re.compile(r"error: another worker of this training has ended or does not answer.*")
OVERRIDES = [
    "train",
    "--config-name=pretrain",
    "model=nano",
    "task.tokens_per_sample=64",
    "task.global_batch=8",
    "task.warmup_fraction=0.1",
    "dataset.batch_size=4",
    f"optimization.max_update={UPDATES}",
    f"checkpoint.save_interval_updates={SAVE_INTERVAL}",
    "common.log_interval=1",
    "common.log_format=json",
    "common.tensorboard_logdir=null",
]
NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0")
# A machine with one device, of which Slurm's variables tell everything else.
SLURM_PROGRAM = """
import sys, torch
torch.cuda.device_count = lambda: 1
from lln_fairseq.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
SLURM_OVERRIDES = [
    "run=slurm",
    "common.cpu=true",
    "common.fp16=false",
    "dataset.num_workers=0",
    "distributed_training.distributed_backend=gloo",
    "distributed_training.ddp_backend=legacy_ddp",
]


class Machine:
    """A process that stands for a machine, with its log file."""

    def __init__(self, log, command, environment=None):
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def output(self):
        return self.log.read_text()

    def has_first_worker(self):
        """Return True if this machine has the first worker, which logs the updates."""
        return bool(read_log(self.output())["train"])

    def last_update(self):
        updates = [int(row["num_updates"]) for row in read_log(self.output())["train"]]
        return max(updates, default=0)

    def kill(self):
        """Kill the process and all its descendants, as if the machine lost its power."""
        processes = descendants(self.process.pid)
        for process in processes:
            os.kill(process, signal.SIGSTOP)  # so that none of them sees another end
        for process in processes:
            os.kill(process, signal.SIGKILL)
        self.process.wait()


def descendants(pid):
    """Return the ids of a process and of its descendants (on Linux)."""
    processes = [pid]
    for process in processes:
        children = Path(f"/proc/{process}/task/{process}/children").read_text()
        processes += [int(child) for child in children.split()]
    return processes


class Cluster:
    """Starts runs on the same data, each in a directory of `folder`."""

    def __init__(self, folder):
        self.folder = folder
        self.data = make_corpus(folder / "data", sizes=(("train", 200), ("valid", 20)))

    def start_torchrun(self, name, machines=2, workers=1, overrides=()):
        """Start a torchrun with `workers` workers for each of the machines of the run `name`."""
        port = free_port()
        launcher = ["-m", "torch.distributed.run", "--nnodes", machines, "--nproc-per-node", workers]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-id", name, "--rdzv-endpoint", f"127.0.0.1:{port}"]
        program = ["-m", "lln_fairseq", *self.options(name), "run=cpu_workers", *overrides]
        return [Machine(self.folder / f"{name}-{number}.log", launcher + program) for number in range(machines)]

    def start_single(self, name, overrides=()):
        """Start a run with one process, without torchrun."""
        return [Machine(self.folder / f"{name}.log", ["-m", "lln_fairseq", *self.options(name), "run=cpu", *overrides])]

    def start_slurm(self, name):
        """Start a run with Slurm's variables of two nodes, and a stub of scontrol, which lists the nodes."""
        scontrol = self.folder / "bin" / "scontrol"
        scontrol.parent.mkdir()
        scontrol.write_text("#!/bin/sh\necho localhost\necho other\n")
        scontrol.chmod(0o755)
        port = f"distributed_training.distributed_port={free_port()}"
        machines = []
        for node in (0, 1):
            environment = {
                "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_NODELIST": "[localhost,other]",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_NNODES": "2",
                "SLURM_NTASKS": "2",
                "SLURM_NODEID": str(node),
                "SLURM_PROCID": str(node),
                "SLURM_LOCALID": "0",
            }
            program = ["-c", SLURM_PROGRAM, *self.options(name), *SLURM_OVERRIDES, port]
            machines.append(Machine(self.folder / f"{name}-{node}.log", program, environment))
        return machines

    def options(self, name):
        return [*OVERRIDES, f"task.data={self.data}", f"checkpoint.save_dir={self.folder / name}"]

    def parameters(self, name):
        """Return the parameters after the last update of the run."""
        checkpoint = torch.load(self.folder / name / "checkpoint_last.pt", weights_only=False)
        updates = checkpoint["optimizer_history"][-1]["num_updates"]
        check(updates == UPDATES, f"{name} has made {updates} updates")
        return checkpoint["model"]


def check(holds, statement):
    """Print what was compared, and end the program if it does not hold."""
    print(f"{'ok' if holds else 'FAILED'}: {statement}", flush=True)
    if not holds:
        sys.exit(1)


def wait(machines):
    """Wait until all machines have ended with exit code 0, and return the logged losses and gradient norms."""
    for machine in machines:
        machine.process.wait(timeout=TIMEOUT)
    codes = [machine.process.returncode for machine in machines]
    if any(codes):
        print("\n".join(machine.output()[-3000:] for machine in machines))
        check(False, f"exit codes {codes}")
    return losses_and_norms(read_log("".join(machine.output() for machine in machines)))


def largest_difference(parameters, others):
    """Return the largest difference of two models' parameters, relative to the largest parameter."""
    differences = [(value - others[name]).abs().max() for name, value in parameters.items() if "version" not in name]
    largest = [value.abs().max() for value in parameters.values()]
    return float(max(differences) / max(largest))


def equal_to_the_bit(parameters, others):
    return all(torch.equal(value, others[name]) for name, value in parameters.items())


def largest_loss_difference(losses, others):
    """Return the largest difference between the logged losses of two runs, which have three decimals."""
    return max(abs(float(losses[update][0]) - float(others[update][0])) for update in losses)


def lose_machine(machines, loses_first):
    """Kill a machine after two more saved updates, and check that the other one ends with one line.

    The killed machine is that of the first worker, which saves the checkpoints, or the other one.
    """
    deadline = time.monotonic() + TIMEOUT
    started_at = 0
    while True:
        check_alive(machines, deadline)
        first = [machine for machine in machines if machine.has_first_worker()]
        if first and not started_at:
            started_at = first[0].last_update()
        if first and first[0].last_update() >= started_at + 2 * SAVE_INTERVAL + 1:
            break
        time.sleep(0.05)
    lost = first[0]
    if not loses_first:
        (lost,) = [machine for machine in machines if machine is not first[0]]
    (survivor,) = [machine for machine in machines if machine is not lost]
    update = first[0].last_update()
    lost.kill()
    begin = time.monotonic()
    survivor.process.wait(timeout=TIMEOUT)
    seconds = time.monotonic() - begin
    lines = LOST.findall(survivor.output())
    name = "of the first worker" if loses_first else "without the first worker"
    reported = len(lines) == 1 and seconds < LONGEST_END and survivor.process.returncode != 0
    check(reported, f"the machine {name} was killed at update {update}; the other one ended after {seconds:.1f} s")
    print(f"    {lines[0]}")


def check_alive(machines, deadline):
    if any(machine.process.poll() is not None for machine in machines) or time.monotonic() > deadline:
        print("\n".join(machine.output()[-3000:] for machine in machines))
        check(False, "both machines train until one is killed")


def main():
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster(Path(name))

        losses = wait(cluster.start_torchrun("two-machines"))
        two_machines = cluster.parameters("two-machines")
        same_losses = wait(cluster.start_torchrun("one-machine", machines=1, workers=2)) == losses
        same = same_losses and equal_to_the_bit(two_machines, cluster.parameters("one-machine"))
        check(same, f"losses of {len(losses)} updates and parameters of 2 machines = those of 1 machine with 2 workers")

        losses = wait(cluster.start_torchrun("two-machines-no-dropout", overrides=NO_DROPOUT))
        one_process = wait(cluster.start_single("one-process", NO_DROPOUT))
        difference = largest_difference(
            cluster.parameters("two-machines-no-dropout"), cluster.parameters("one-process")
        )
        loss_difference = largest_loss_difference(losses, one_process)
        check(
            difference < 1e-5 and loss_difference < 0.0015,
            f"2 machines and 1 process with the same global batch: losses differ by at most {loss_difference:.3f}, "
            f"parameters by {difference:.1e}",
        )

        lose_machine(cluster.start_torchrun("lost"), loses_first=False)
        lose_machine(cluster.start_torchrun("lost"), loses_first=True)
        wait(cluster.start_torchrun("lost"))
        same = equal_to_the_bit(two_machines, cluster.parameters("lost"))
        check(same, "after both losses, the resumed run has the parameters of the uninterrupted one, to the bit")

        wait(cluster.start_slurm("slurm"))
        same = equal_to_the_bit(two_machines, cluster.parameters("slurm"))
        check(same, "run=slurm with the variables of 2 nodes has the parameters of torchrun, to the bit")


if __name__ == "__main__":
    main()
