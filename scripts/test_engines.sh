#!/usr/bin/env bash
# Runs an exported encoder and classifier in Ray Data, datasets and, if there is Java, Spark, on 20,000 texts of which 20 are
# broken. Two workers compute, and one of them is killed. Compares with `lln-fairseq encode` and `predict`.
# The engines are installed into a new environment without fairseq, which is removed at the end; --engines DIRECTORY uses an
# existing one. --no-venv uses the active environment for the project.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

use_environment "$@"
set -- ${arguments[@]+"${arguments[@]}"}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HOME="$folder/cache"
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_TMPDIR="$folder"

engines=(ray datasets spark)
if ! command -v java >/dev/null; then
    echo "Spark is left out: there is no java"
    engines=(ray datasets)
fi
if [ "${1:-}" = --engines ]; then
    environment=$2
else
    environment="$folder/environment"
    "$(find_python)" -m venv "$environment"
    "$environment/bin/pip" install --no-compile --quiet --disable-pip-version-check -c requirements.txt \
        torch transformers sentence-transformers 'ray[data]' datasets pyspark
fi
"$environment/bin/pip" list 2>/dev/null | grep -E '^(ray|datasets|pyspark|torch|transformers|sentence-transformers) '

python -m tests.engines.models "$folder"
for kind in encoder classifier; do
    if [ $kind = encoder ]; then program=encode output=encoder.npy; else program=predict output=classifier.tsv; fi
    start=$(date +%s.%N)
    python -m lln_fairseq $program "$folder/$kind/model.pt" --input "$folder/texts.txt" --output "$folder/$output" \
        --on-error row 2>"$folder/log" || { cat "$folder/log" >&2; exit 1; }
    python -c "print(f'$program: {20000 / ($(date +%s.%N) - $start):.0f} texts/s with start')"
done
"$environment/bin/python" -m tests.engines.check "$folder" "${engines[@]}"
