#!/usr/bin/env bash
# Fine-tunes a pre-trained checkpoint on MNLI and scores it; the same command goes on after an interruption.
#   scripts/finetune_mnli.sh CHECKPOINT [--seed N] [HYDRA OVERRIDES]
#   scripts/finetune_mnli.sh runs/pretrain_lln_diag/checkpoint_best.pt attention=lln_diag model=base run=gpu1
# Results: glue/mnli/seed1 beside the checkpoint. The data: python -m data_prep.glue --help
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/training.sh"
help_if_asked "$@"
finetune mnli "$@"
