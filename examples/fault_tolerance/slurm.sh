#!/usr/bin/env bash
# Slurm: 16 nodes and one spare.  Before the time limit, and when the job is preempted, the ranks
# save; the job is requeued until exit.json says that the run is done or cannot go on.
#
#   sbatch examples/fault_tolerance/slurm.sh
#SBATCH --job-name=gpt
#SBATCH --nodes=17
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=gpt-%j.log
#SBATCH --signal=B:USR1@300
set -euo pipefail

export CHECKPOINTS=${CHECKPOINTS:-checkpoints/gpt}
export NODES=16 SHUTDOWN_TIMEOUT=240
export RUN_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
ENDPOINT="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29400"
export ENDPOINT

# The signals reach this shell: send them to the supervisors, which save and end.
srun --kill-on-bad-exit=0 bash examples/fault_tolerance/train.sh &
STEP=$!
trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM

while kill -0 "$STEP" 2>/dev/null; do # a trap interrupts wait
    wait "$STEP" || true
done
CODE=0
wait "$STEP" || CODE=$? # its status, not that of an interrupted wait

REPORT="$CHECKPOINTS/reports/exit.json"
if grep -q '"kind": "stopped"' "$REPORT" && grep -q '"resumable": true' "$REPORT"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
