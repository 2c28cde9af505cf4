#!/usr/bin/env bash
# Installs what is missing, then runs ruff, mypy and pytest. Tests that are marked as exhaustive are left out.
#   --all       runs them too, as .ci/run does
#   --no-venv   uses the active environment
# Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

use_environment "$@"
selection=(-m "not exhaustive")
given=()
for argument in ${arguments[@]+"${arguments[@]}"}; do
    if [ "$argument" = --all ]; then selection=(); else given+=("$argument"); fi
done
ruff check .
ruff format --check .
mypy
# One thread a process: the tests run on all cores already, and OpenMP threads that wait for each other are slow.
export OMP_NUM_THREADS=1
exec python -m pytest -n auto --dist worksteal ${selection[@]+"${selection[@]}"} ${given[@]+"${given[@]}"}
