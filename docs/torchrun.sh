#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# One run on several machines by torchrun's own rendezvous; the same command on each of them.
# See docs/engines.md, "Several machines".
#
#   bash docs/torchrun.sh node0.cluster:29500 runs/demo --max_steps 300
#
set -u
RENDEZVOUS=${1:?"usage: bash docs/torchrun.sh HOST:PORT RUN_FOLDER [options of the recipe]"}
RUN=${2:?"the run folder comes second"}
shift 2
exec torchrun --nnodes "${NODES:-2}" --nproc_per_node "${PROCESSES_PER_NODE:-8}" \
  --rdzv_backend c10d --rdzv_endpoint "$RENDEZVOUS" --rdzv_id "${JOB_ID:-$(basename "$RUN")}" \
  "${RECIPE:-recipes/pretrain_causal_lm.py}" --output_dir "$RUN" "$@"
