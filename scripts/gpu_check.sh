#!/usr/bin/env bash
# Kernel tests on the GPU, then the attention benchmark. Needs a CUDA device, torch, triton, pytest and numpy; no fairseq.
#   scripts/gpu_check.sh [options of scripts.benchmarks.gpu]        PYTHON=python3.12 scripts/gpu_check.sh --tokens 65536
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh
python="${PYTHON:-python3}"
unset TRITON_INTERPRET

"$python" - <<'PYTHON'
import sys

try:
    import pytest  # noqa: F401
    import torch
    import triton
except ImportError as missing:
    sys.exit(f"gpu_check.sh: {missing}; it needs torch, triton and pytest")
if not torch.cuda.is_available():
    sys.exit("gpu_check.sh: no CUDA device: torch.cuda.is_available() is False")
name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
if capability < (8, 0):
    sys.exit(f"gpu_check.sh: {name} has compute capability {capability}; the kernels need 8.0")
print(f"{name}, compute capability {capability}, torch {torch.__version__}, triton {triton.__version__}")
PYTHON

# Both parts always run; a failure of either is the exit status.
status=0
run "$python" -m pytest -q -p no:cacheprovider tests/ops/backends/test_triton.py tests/ops/backends/test_triton_joint.py || status=1
run "$python" -m scripts.benchmarks.gpu "$@" || status=1
exit $status
