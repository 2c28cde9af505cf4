#!/usr/bin/env bash
# Installs what is missing, then runs ruff, mypy and pytest; arguments go to pytest. --no-venv uses the active environment.
# --fast leaves out the tests that take longer than about five seconds, and the trainings: for the inner loop.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

use_environment "$@"
[[ " $* " != *" --fast "* ]] || arguments=("${arguments[@]/#--fast/-mnot slow}")
ruff check .
ruff format --check .
mypy
# One thread a process: the tests run on all cores already, and OpenMP threads that wait for each other are slow.
export OMP_NUM_THREADS=1
exec python -m pytest -n auto --dist worksteal ${arguments[@]+"${arguments[@]}"}
