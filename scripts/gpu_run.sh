#!/usr/bin/env bash
# Runs scripts/benchmarks/gpu.py with the Python that has torch, triton, pytest and pytest-xdist (PYTHON=...).
#   scripts/gpu_run.sh kernels attention --minutes 10       some steps; all of them without arguments
#   scripts/gpu_run.sh --rehearse                           tiny sizes on a CPU
#   scripts/gpu_run.sh --pack carry                         makes a folder for a machine without network and fairseq:
#   cd carry && scripts/gpu_run.sh                          it brings both the data and the wheels of this Python
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -x "$root/.venv/bin/python" ] && [ -z "${VIRTUAL_ENV:-}" ] && PATH="$root/.venv/bin:$PATH"
python="${PYTHON:-python3}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [ "${1:-}" = --pack ]; then
    folder="${2:?which folder? scripts/gpu_run.sh --pack FOLDER}"
    mkdir "$folder" # which must not exist
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
    export PYTHONPATH="$PYTHONPATH:$packages" # after what the machine has
fi
exec "$python" -m scripts.benchmarks.gpu "$@"
