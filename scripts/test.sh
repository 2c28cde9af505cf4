#!/usr/bin/env bash
# Installs missing packages, then runs ruff, mypy and pytest without the tests that are marked as exhaustive.
#   --all       runs the exhaustive tests too, as .ci/run does
#   --no-venv   uses the active environment instead of .venv
# Other arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

use_environment "$@"
selection=(-m "not exhaustive")
pytest_arguments=()
for argument in ${arguments[@]+"${arguments[@]}"}; do
    if [ "$argument" = --all ]; then selection=(); else pytest_arguments+=("$argument"); fi
done
ruff check .
ruff format --check .
mypy
# One thread per process: the tests use all cores already, and OpenMP threads that wait for each other are slow.
export OMP_NUM_THREADS=1
exec python -m pytest -n auto --dist worksteal \
    ${selection[@]+"${selection[@]}"} ${pytest_arguments[@]+"${pytest_arguments[@]}"}
