#!/usr/bin/env bash
# Shows the curves of all runs below a directory at http://localhost:6006.
#   scripts/tensorboard.sh [DIRECTORY (runs)] [OPTIONS OF TENSORBOARD]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/training.sh"
help_if_asked "$@"
directory=runs
case "${1:-}" in "" | -*) ;; *) directory=$1; shift ;; esac
[ -d "$directory" ] || fail "no such directory: $directory"
exec python -m tensorboard.main --logdir "$directory" "$@"
