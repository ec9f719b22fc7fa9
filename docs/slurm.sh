#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# One run as one SLURM job that requeues itself until the run is finished. See docs/slurm.md.
#
#   sbatch docs/slurm.sh runs/demo --config recipes/configs/pretrain_causal_lm/tiny-cpu.yaml
#
#SBATCH --job-name=pretrain
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
RUN=${1:?"usage: sbatch docs/slurm.sh RUN_FOLDER [options of the recipe]"}
shift
RECIPE=${RECIPE:-recipes/pretrain_causal_lm.py}
ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-accelerate_configs/ddp_bf16.yaml}

# SIGUSR1 must reach a rank; the launcher would die of it. One rank is enough: they agree.
ask_to_stop() {
  local rank
  rank=$(sed -n 's/.*"pid": *\([0-9][0-9]*\).*/\1/p' "$RUN/lease.json" 2>/dev/null)
  if [ -n "$rank" ] && [ "$(ps -o ppid= -p "$rank" | tr -d ' ')" = "$launcher" ]; then
    echo "slurm.sh: SIGUSR1 to rank 0, process $rank"
    kill -USR1 "$rank"
  elif [ -e "$RUN/run.json" ]; then
    echo "slurm.sh: the run is still starting; it will see $RUN/STOP"
    touch "$RUN/STOP"
  else
    echo "slurm.sh: nothing was begun"
    kill -TERM "$launcher"
  fi
}

attempts() {
  grep -c '"attempt":' "$RUN/run.json" 2>/dev/null
}

before=$(attempts)
accelerate launch --config_file "$ACCELERATE_CONFIG" ${NUM_PROCESSES:+--num_processes "$NUM_PROCESSES"} \
  "$RECIPE" --output_dir "$RUN" "$@" &
launcher=$!
trap ask_to_stop USR1 TERM
while kill -0 "$launcher" 2>/dev/null; do
  wait "$launcher" # a signal ends it early, after the trap
done

# The launcher says 1 whatever a rank said; the run's own record has the code. A launch that did
# not get as far as a record (a wrong option) must not be repeated for ever.
mprecipes status "$RUN"
code=$?
if [ "$(attempts)" = "$before" ]; then
  echo "slurm.sh: this launch did not begin an attempt; see above"
  exit 1
fi
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
