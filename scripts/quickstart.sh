#!/usr/bin/env bash
# Installs the project in a fresh clone, then pre-trains a tiny LLN+Diag RoBERTa and makes a published encoder linear.
# This takes three to ten minutes; with a CUDA device it runs in fp16. --help lists the options;
# --no-venv uses the active environment instead of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

use_environment "$@"
exec python -m scripts.quickstart ${arguments[@]+"${arguments[@]}"}
