# Sourced by the scripts that train. Paths stay relative to where you are; the package is the one beside this file.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
[ -x "$ROOT/.venv/bin/python" ] && [ -z "${VIRTUAL_ENV:-}" ] && PATH="$ROOT/.venv/bin:$PATH"

fail() { echo "error: $*" >&2; exit 1; }

# Prints the comment at the top of the running script for -h and --help.
help_if_asked() {
    case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
}

# train pretrain|finetune OVERRIDES
train() {
    local config=$1
    shift
    python -m lln_fairseq.train --config-dir "$ROOT/configs" --config-name "$config" "$@"
}

# finetune TASK CHECKPOINT [--seed N] OVERRIDES: trains, then scores the best checkpoint on every labelled split.
# Everything goes to CHECKPOINT's directory, glue/TASK/seedN, unless the overrides name a checkpoint.save_dir; what is
# finished is not done again.
finetune() {
    local task=$1 checkpoint=${2:-} seed=1 out split override
    [ -n "$checkpoint" ] || fail "which checkpoint? for example runs/pretrain_lln_diag/checkpoint_best.pt (see --help)"
    [ -f "$checkpoint" ] || fail "no such checkpoint: $checkpoint"
    [ -f "$ROOT/configs/glue/$task.yaml" ] || fail "no such task: $task (known: $(cd "$ROOT/configs/glue" && echo *.yaml))"
    shift 2
    if [ "${1:-}" = --seed ]; then seed=${2:?--seed needs a number}; shift 2; fi
    out=$(dirname "$checkpoint")/glue/$task/seed$seed
    for override in "$@"; do
        case "$override" in checkpoint.save_dir=*) out=${override#*=} ;; esac
    done
    if [ -f "$out/valid.json" ]; then echo "$task, seed $seed: done before, see $out"; return; fi
    train finetune "glue=$task" "common.seed=$seed" "checkpoint.finetune_from_model=$checkpoint" \
        "checkpoint.save_dir=$out" "$@"
    for split in $([ "$task" = mnli ] && echo valid1) valid; do # valid comes last: it means finished
        python -m lln_fairseq.evaluate "$out/checkpoint_best.pt" --split "$split" --json "$out/$split.json"
    done
}
