#!/usr/bin/env bash
# Installs the project in a fresh clone, then pre-trains and fine-tunes an LLN+Diag RoBERTa on real text. This takes less
# than ten minutes on two CPU cores; with a CUDA device it runs in fp16. --help lists the options; --no-venv uses the
# active environment instead of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

use_environment "$@"
exec python -m scripts.research.quickstart ${arguments[@]+"${arguments[@]}"}
