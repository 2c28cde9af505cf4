#!/usr/bin/env bash
# Run scripts/benchmarks/gpu.py: check and time everything on a GPU, step by step, and write a report.
#   scripts/gpu_run.sh                                 all steps
#   scripts/gpu_run.sh kernels attention --minutes 10  some steps
#   scripts/gpu_run.sh --rehearse                      tiny sizes on a CPU
#   scripts/gpu_run.sh --pack FOLDER                   copy the project, the data and wheels to a new folder
#
# It needs a Python with torch, triton, pytest and pytest-xdist; PYTHON=python3.12 selects another one. For a machine
# without network and fairseq, make a folder with --pack on a machine with the same Python version, copy it there, and
# run `cd FOLDER && scripts/gpu_run.sh`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -x "$root/.venv/bin/python" ] && [ -z "${VIRTUAL_ENV:-}" ]; then
    PATH="$root/.venv/bin:$PATH"
fi
python="${PYTHON:-python3}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [ "${1:-}" = --pack ]; then
    folder="${2:?name a folder that does not exist: scripts/gpu_run.sh --pack FOLDER}"
    mkdir "$folder"
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
    # The packages that the machine already has take precedence.
    export PYTHONPATH="$PYTHONPATH:$packages"
fi
exec "$python" -m scripts.benchmarks.gpu "$@"
