#!/usr/bin/env bash
# Tests the Triton kernels on a GPU, times attentions and training updates, and writes runs/gpu/report.txt.
#   scripts/gpu_run.sh                 at most half an hour
#   scripts/gpu_run.sh --pack FOLDER   copies the project and wheels to a new folder
#
# It needs a Python with torch, triton, pytest and pytest-xdist; PYTHON=python3.12 selects another one. For a machine
# without network and fairseq, make a folder with --pack on a machine with the same Python version, copy it there, and
# run `cd FOLDER && scripts/gpu_run.sh`.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -x "$root/.venv/bin/python" ] && [ -z "${VIRTUAL_ENV:-}" ] && PATH="$root/.venv/bin:$PATH"
python="${PYTHON:-python3}"

if [ "${1:-}" = --pack ]; then
    folder="${2:?name a folder that does not exist: scripts/gpu_run.sh --pack FOLDER}"
    mkdir "$folder"
    (cd "$root" && git ls-files -z | tar --null --files-from - --create) | tar --extract --directory "$folder"
    # The copy has no git: lln_fairseq/provenance.py reads this file.
    git -C "$root" rev-parse HEAD >"$folder/COMMIT"
    git -C "$root" status --porcelain -- . ':!docs' ':!tests' >>"$folder/COMMIT"
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" --constraint "$root/requirements.txt" \
        ve-fairseq hydra-core omegaconf antlr4-python3-runtime==4.9.3 bitarray sacrebleu portalocker tabulate \
        sentencepiece tiktoken pyyaml tqdm regex
    du -sh "$folder"
    exit
fi

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -d "$root/wheels" ]; then
    packages="$root/wheels/installed"
    if [ ! -d "$packages" ]; then
        "$python" -m pip install --quiet --no-index --no-deps --target "$packages.part" "$root"/wheels/*.whl
        mv "$packages.part" "$packages"
    fi
    export PYTHONPATH="$PYTHONPATH:$packages" # the packages that the machine already has take precedence
fi

out=runs/gpu
failed=0
mkdir -p "$out"
header=$("$python" -c 'import sys, torch, triton
from lln_fairseq.provenance import read_commit
if not torch.cuda.is_available(): sys.exit("error: torch finds no CUDA device")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6): sys.exit(f"error: the kernels need Triton 3.6, which torch 2.11 brings, got {triton.__version__}")
print(torch.cuda.get_device_name(), "CUDA", torch.version.cuda, "torch", torch.__version__, "triton", triton.__version__)
print("commit {}, changed files: {}".format(*read_commit()))
')
echo "$header" | tee "$out/report.txt" # a report from before stays if there is no GPU

# Runs a module in at most ten minutes, and adds the end of its output to the report. The next one runs in any case.
measure() {
    local name=$1 state=complete
    shift
    echo "$name: output in $out/$name.log"
    timeout 600 "$python" -m "$@" >"$out/$name.log" 2>&1 || { state=FAILED; failed=1; }
    { echo; echo "== $name: $state"; tail -n 60 "$out/$name.log"; } >>"$out/report.txt"
}

attentions=(lln lln_diag lln_diag:mix=joint_offset block_diag window:block_size=64)
measure kernels pytest -q -p no:cacheprovider -n 8 "$root"/tests/ops/{test_backends,test_global_tokens,test_window,backends/test_triton}.py
measure attention scripts.benchmarks.attention --dtype float16 --tokens 32768 --attentions "${attentions[@]}" \
    --lengths 512 1024 2048 4096 8192 16384 32768 --json "$out/attention.json"
measure update scripts.benchmarks.model --preset base --json "$out/update.json" \
    --attentions softmax_matrix softmax nystrom:conv_kernel=33 "${attentions[@]}" local_global
cat "$out/report.txt"
exit $failed
