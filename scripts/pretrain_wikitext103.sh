#!/usr/bin/env bash
# Pre-trains RoBERTa on WikiText-103 with the paper's recipe; the same command goes on after an interruption.
#   scripts/pretrain_wikitext103.sh [HYDRA OVERRIDES]
#   scripts/pretrain_wikitext103.sh attention=lln_diag model=base run=gpu8 dataset.batch_size=32
# The checkpoints are in runs/pretrain_lln_diag (checkpoint.save_dir). The data: python -m data_prep.wikitext103 --help
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
. "$(dirname "${BASH_SOURCE[0]}")/program.sh" lln_fairseq train --config-name pretrain corpus=wikitext103 "$@"
