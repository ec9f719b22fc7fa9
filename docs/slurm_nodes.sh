#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# One run on several nodes as one SLURM job that requeues itself until it is finished: docs/slurm.md.
#
#   sbatch docs/slurm_nodes.sh runs/demo --config recipes/configs/pretrain_causal_lm/tiny-cpu.yaml
#
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
RUN=${1:?"usage: sbatch docs/slurm_nodes.sh RUN_FOLDER [options of the recipe]"}
shift
RECIPE=${RECIPE:-recipes/pretrain_causal_lm.py}
ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-accelerate_configs/ddp_bf16.yaml}
PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-8}
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 20000))}
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RUN RECIPE ACCELERATE_CONFIG PROCESSES_PER_NODE PORT HEAD_NODE

# This script runs on the first node, as rank 0 does: its folder is the one that rank 0 sees.
ask_to_stop() {
  if [ -e "$RUN/run.json" ]; then
    echo "slurm_nodes.sh: the run is asked to stop by $RUN/STOP"
    touch "$RUN/STOP"
  else
    echo "slurm_nodes.sh: nothing was begun"
    kill -TERM "$launchers"
  fi
}

attempts() {
  grep -c '"attempt":' "$RUN/run.json" 2>/dev/null
}

before=$(attempts)
# shellcheck disable=SC2016 # each node reads its own SLURM_NODEID
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file "$ACCELERATE_CONFIG" \
  --num_machines "$SLURM_JOB_NUM_NODES" --machine_rank "$SLURM_NODEID" \
  --num_processes $((SLURM_JOB_NUM_NODES * PROCESSES_PER_NODE)) \
  --main_process_ip "$HEAD_NODE" --main_process_port "$PORT" \
  "$RECIPE" --output_dir "$RUN" "$@"' launch "$@" &
launchers=$!
trap ask_to_stop USR1 TERM
while kill -0 "$launchers" 2>/dev/null; do
  wait "$launchers" # a signal ends it early, after the trap
done

# A launcher says 1 whatever a rank said; the run's own record has the code. A launch that did not
# get as far as a record (a wrong option) must not be repeated for ever.
mprecipes status "$RUN"
code=$?
if [ "$(attempts)" = "$before" ]; then
  echo "slurm_nodes.sh: this launch did not begin an attempt; see above"
  exit 1
fi
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
