"""The device: name, versions, and the two ceilings that every time is measured against.

python -m scripts.gpu.device runs/gpu/device.json
"""

import argparse
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from lln_fairseq.command import run_main
from lln_fairseq.data.files import write_bytes
from scripts.benchmarks.gpu import cache_of, copy_bandwidth, milliseconds

PACKAGES = ("torch", "triton", "ve-fairseq", "numpy", "hydra-core", "omegaconf")


def facts(device: str) -> dict[str, Any]:
    """What the device is, and what it does: a copy in bytes/s (read and written), a matrix product in FLOP/s."""
    on_gpu = device == "cuda"
    cache = cache_of(device)
    size = 8192 if on_gpu else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.float16 if on_gpu else torch.float32) for _ in range(2))
    seconds = milliseconds(lambda: a @ b, 10, cache) * 1e-3
    found = {"device": "CPU", "bandwidth": copy_bandwidth(cache)}
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "capability": list(torch.cuda.get_device_capability()),
                  "memory": properties.total_memory, "multiprocessors": properties.multi_processor_count,
                  "cuda": torch.version.cuda}  # fmt: skip
    return found | {"flops": 2 * size**3 / seconds, "python": platform.python_version(), "versions": versions()}


def versions() -> dict[str, str | None]:
    """None for a package that is not there."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def measure(file: Path, device: str) -> None:
    found = facts(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, (json.dumps(found, indent=1) + "\n").encode())
    print(f"{found['device']}: a copy moves {found['bandwidth'] / 1e12:.2f} TB/s (read + written), a matrix product "
          f"makes {found['flops'] / 1e12:.0f} TFLOP/s; Python {found['python']}, "
          f"{', '.join(f'{name} {version}' for name, version in found['versions'].items())}")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu.device", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("json", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args(argv)
    return run_main(lambda: measure(args.json, args.device))


if __name__ == "__main__":
    sys.exit(main())
