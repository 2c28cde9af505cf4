#!/usr/bin/env bash
# Runs the tests with another torch and the triton that it brings, in a new environment that is removed at the end.
#   scripts/test_torch.sh 2.14.0               all tests that are not exhaustive
#   scripts/test_torch.sh 2.11.0 tests/ops     only the kernels, which are also compiled ahead of time
# PYTHON=python3.12 selects another Python. Arguments after the version are passed to pytest.
set -euo pipefail
case "${1:-}" in "" | -*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

version=$1
shift
if [ $# = 0 ]; then set -- -m 'not exhaustive'; fi
python=${PYTHON:-$(find_python)}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1
"$python" -m venv "$folder"
# fairseq needs torchaudio, whose newest release, 2.11, can be loaded beside torch 2.11 and later.
requirements=("torch==$version" "torchaudio<=$version")
# The interpreter of Triton 3.6 fails with newer versions of numpy. Its compiler does not.
case "$version" in 2.11.*) requirements+=('numpy<2.4') ;; esac
"$folder/bin/pip" install --no-compile --quiet --disable-pip-version-check -e '.[test]' "${requirements[@]}"
"$folder/bin/python" -c 'import torchaudio' 2>/dev/null || "$folder/bin/pip" uninstall --quiet --yes torchaudio
"$folder/bin/pip" list 2>/dev/null | grep -E '^(numpy|torch|torchaudio|triton) '
"$folder/bin/python" -m pytest -q "$@"
