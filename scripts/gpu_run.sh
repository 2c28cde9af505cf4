#!/usr/bin/env bash
# All that a GPU is to show, in half an hour and without a network: see scripts/gpu/run.py.
#   scripts/gpu_run.sh --pack carry       here: a folder to take along       cd carry && scripts/gpu_run.sh       there
# Uses the Python that has torch (PYTHON=...), and adds to it what the folder's wheels bring, without changing it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -x "$root/.venv/bin/python" ] && [ -z "${VIRTUAL_ENV:-}" ] && PATH="$root/.venv/bin:$PATH"
python="${PYTHON:-python3}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [ "${1:-}" = --pack ]; then
    exec "$python" -m scripts.gpu.pack "${@:2}"
fi
if [ -d "$root/wheels" ]; then
    packages="$root/wheels/installed"
    if [ ! -d "$packages" ]; then
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$packages.part" "$root"/wheels/*.whl
        mv "$packages.part" "$packages"
    fi
    export PYTHONPATH="$PYTHONPATH:$packages"
fi
exec "$python" -m scripts.gpu.run "$@"
