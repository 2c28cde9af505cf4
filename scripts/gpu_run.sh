#!/usr/bin/env bash
# Runs the GPU checks of scripts/benchmarks/gpu.py. PYTHON=... selects a Python with torch, triton, pytest and
# pytest-xdist.
#   scripts/gpu_run.sh kernels attention --minutes 10       runs some steps; without arguments it runs all of them
#   scripts/gpu_run.sh --rehearse                           runs tiny sizes on a CPU
#   scripts/gpu_run.sh --pack carry                         copies the checkout, the data and the wheels of this Python
#                                                           to the folder carry, for a machine without network and
#                                                           fairseq; run `cd carry && scripts/gpu_run.sh` there
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -x "$root/.venv/bin/python" ] && [ -z "${VIRTUAL_ENV:-}" ] && PATH="$root/.venv/bin:$PATH"
python="${PYTHON:-python3}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [ "${1:-}" = --pack ]; then
    folder="${2:?--pack needs a folder: scripts/gpu_run.sh --pack FOLDER}"
    mkdir "$folder" # fails if the folder exists
    (cd "$root" && git ls-files -z | tar --null --files-from - --create) | tar --extract --directory "$folder"
    cp --parents -r data-bin/wikitext-103 data-bin/glue/SST-2 "$folder"
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" --constraint "$root/requirements.txt" \
        ve-fairseq hydra-core omegaconf antlr4-python3-runtime==4.9.3 bitarray sacrebleu portalocker tabulate \
        sentencepiece tiktoken
    du -sh "$folder"
    exit
fi
if [ -d "$root/wheels" ]; then
    packages="$root/wheels/installed"
    if [ ! -d "$packages" ]; then
        "$python" -m pip install --quiet --no-index --no-deps --target "$packages.part" "$root"/wheels/*.whl
        mv "$packages.part" "$packages"
    fi
    export PYTHONPATH="$PYTHONPATH:$packages" # last, so that packages of the machine have precedence
fi
exec "$python" -m scripts.benchmarks.gpu "$@"
