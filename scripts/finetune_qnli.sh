#!/usr/bin/env bash
. "$(dirname "${BASH_SOURCE[0]}")/program.sh" scripts.experiments.finetune finetune_qnli "$@"
