#!/usr/bin/env bash
# Serves the curves of all runs below a directory (default: runs) at http://localhost:6006.
#   scripts/tensorboard.sh [DIRECTORY] [OPTIONS OF TENSORBOARD]
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
directory=runs
case "${1:-}" in "" | -*) ;; *) directory=$1; shift ;; esac
[ -d "$directory" ] || { echo "error: no such directory: $directory" >&2; exit 1; }
. "$(dirname "${BASH_SOURCE[0]}")/program.sh" tensorboard.main --logdir "$directory" "$@"
