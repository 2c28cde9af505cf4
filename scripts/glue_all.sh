#!/usr/bin/env bash
# Fine-tunes a pre-trained checkpoint on MNLI, QNLI, QQP and SST-2 with several seeds, then prints Table 1.
#   scripts/glue_all.sh CHECKPOINT [--seeds "1 2 3 4 5"] [--tasks "mnli qnli qqp sst2"] [HYDRA OVERRIDES]
# What is finished is not done again; what was interrupted goes on. Results: glue/ beside the checkpoint.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/training.sh"
help_if_asked "$@"
checkpoint=${1:-}
[ -n "$checkpoint" ] && shift
seeds="1 2 3 4 5" tasks="mnli qnli qqp sst2"
while :; do
    case "${1:-}" in
        --seeds) seeds=${2:?--seeds needs numbers}; shift 2 ;;
        --tasks) tasks=${2:?--tasks needs names}; shift 2 ;;
        *) break ;;
    esac
done
case " $*" in
    *" checkpoint.save_dir="*) fail "checkpoint.save_dir is not for glue_all.sh: every task and seed has its own directory" ;;
esac
for task in $tasks; do
    for seed in $seeds; do finetune "$task" "$checkpoint" --seed "$seed" "$@"; done
done
python -m scripts.glue_table "$(dirname "$(dirname "$checkpoint")")"
