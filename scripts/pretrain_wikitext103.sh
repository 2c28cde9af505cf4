#!/usr/bin/env bash
# Pre-trains RoBERTa on WikiText-103 with the paper's recipe. Run the same command again to resume after an interruption.
#   scripts/pretrain_wikitext103.sh [HYDRA OVERRIDES]
#   scripts/pretrain_wikitext103.sh attention=lln_diag model=base run=gpu8 dataset.batch_size=32
# Checkpoints are written to runs/pretrain_lln_diag (checkpoint.save_dir). To prepare the data, see
# python -m data_prep.wikitext103 --help
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
. "$(dirname "${BASH_SOURCE[0]}")/program.sh" lln_fairseq train --config-name pretrain corpus=wikitext103 "$@"
