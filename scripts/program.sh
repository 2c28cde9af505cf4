# Sourced by the scripts that start a program of this project, as program.sh MODULE ARGUMENTS. The program replaces the
# shell, so that it receives signals. It runs in the current directory and imports the package of this checkout.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
[ -x "$root/.venv/bin/python" ] && [ -z "${VIRTUAL_ENV:-}" ] && PATH="$root/.venv/bin:$PATH"
exec python -m "$@"
