#!/usr/bin/env bash
# Installs what is missing, then runs ruff, mypy and pytest; arguments go to pytest. --no-venv uses the active environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

use_environment "$@"
ruff check .
ruff format --check .
mypy
# One thread a process: the tests run on all cores already, and OpenMP threads that wait for each other are slow.
export OMP_NUM_THREADS=1
exec python -m pytest -n auto --dist worksteal ${arguments[@]+"${arguments[@]}"}
