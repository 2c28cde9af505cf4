#!/usr/bin/env bash
# Runs tests/conversion with the oldest and with the newest transformers that setup.py allows, in two new environments
# that are removed at the end. Arguments are passed to pytest:
#   scripts/test_transformers.sh tests/conversion/test_loading.py    only the check of exported models (a few minutes)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

if [ $# = 0 ]; then set -- tests/conversion; fi
python=$(find_python)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1
for requirement in 'transformers==4.57.*' 'transformers>=5'; do
    environment="$folder/${requirement//[^0-9]/}"
    "$python" -m venv "$environment"
    "$environment/bin/pip" install --no-compile --quiet --disable-pip-version-check -e '.[test]' "$requirement"
    # fairseq installs torchaudio, which transformers 5 imports. Its CUDA build cannot be loaded beside torch for CPUs.
    "$environment/bin/python" -c 'import torchaudio' 2>/dev/null || "$environment/bin/pip" uninstall --quiet --yes torchaudio
    "$environment/bin/pip" list 2>/dev/null | grep -E '^(sentence-)?transformers |^tokenizers |^torch '
    "$environment/bin/python" -m pytest -q -m 'not exhaustive' "$@"
done
