#!/usr/bin/env bash
# Pre-trains and fine-tunes a list of attentions on the same data and budget, with several seeds: a table and a plot.
# --help says how.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/training.sh"
exec python -m scripts.compare_attentions "$@"
