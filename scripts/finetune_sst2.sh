#!/usr/bin/env bash
# Fine-tunes a pre-trained checkpoint on SST-2 and scores it; the same command goes on after an interruption.
#   scripts/finetune_sst2.sh CHECKPOINT [--seed N] [HYDRA OVERRIDES]
#   scripts/finetune_sst2.sh runs/pretrain_lln_diag/checkpoint_best.pt attention=lln_diag model=base run=gpu1
# Results: glue/sst2/seed1 beside the checkpoint. The data: python -m data_prep.glue --help
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/training.sh"
help_if_asked "$@"
finetune sst2 "$@"
