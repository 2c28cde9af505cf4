# Sourced by the scripts that start a program of this project: program.sh MODULE ARGUMENTS becomes that program, so that
# signals reach it. Paths stay relative to where you are; the package is the one beside this file.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
[ -x "$root/.venv/bin/python" ] && [ -z "${VIRTUAL_ENV:-}" ] && PATH="$root/.venv/bin:$PATH"
exec python -m "$@"
