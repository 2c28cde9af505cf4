#!/usr/bin/env bash
# From a fresh clone to a pre-trained and fine-tuned LLN+Diag RoBERTa on real text, in less than ten minutes on two CPU
# cores; with a CUDA device the same in fp16. --help lists the options; --no-venv uses the active environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

use_environment "$@"
exec python -m scripts.experiments.quickstart ${arguments[@]+"${arguments[@]}"}
