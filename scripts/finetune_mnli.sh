#!/usr/bin/env bash
. "$(dirname "${BASH_SOURCE[0]}")/program.sh" scripts.train_tasks finetune_mnli "$@"
