#!/usr/bin/env bash
# 5 nodes, of which 1 spare.  Before the time limit, and when the job
# is preempted, the ranks save; the job is queued again until exit.json says that the run is done
# or cannot go on.
#SBATCH --job-name=gpt
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=gpt-%j.log
#SBATCH --signal=B:USR1@300
set -euo pipefail
cd /shared/megatron
export OMP_NUM_THREADS=1
export TORCH_FR_BUFFER_SIZE=2000

train() {
    NODE_NAME=$(hostname)
    exec python tools/launch.py \
        --nnodes 3:4 --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint "$ENDPOINT" --rdzv-id "$RUN_ID" --node-name "$NODE_NAME" --check-node \
        --exit-report-dir /shared/checkpoints/gpt/reports --shutdown-timeout 240 \
        pretrain_gpt.py \
        --num-layers 24 \
        --hidden-size 2048 \
        --num-attention-heads 16 \
        --seq-length 2048 \
        --max-position-embeddings 2048 \
        --tensor-model-parallel-size 2 \
        --micro-batch-size 2 \
        --global-batch-size 768 \
        --train-iters 100000 \
        --lr 2.0e-4 \
        --min-lr 2.0e-5 \
        --lr-decay-style cosine \
        --bf16 \
        --use-distributed-optimizer \
        --data-path /shared/data/my-gpt_text_document \
        --vocab-file /shared/data/gpt2-vocab.json \
        --merge-file /shared/data/gpt2-merges.txt \
        --save /shared/checkpoints/gpt \
        --load /shared/checkpoints/gpt \
        --load-newest-valid \
        --save-interval 500 \
        --async-save \
        --exit-signal-handler \
        --calc-ft-timeouts \
        --enable-ft-package \
        --check-weight-hash-across-dp-replicas-interval 500
}
export -f train
export RUN_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
ENDPOINT="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29400"
export ENDPOINT

# The signals reach this shell: send them to the supervisors, which save and end.
srun --kill-on-bad-exit=0 bash -c train &
STEP=$!
trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM

while kill -0 "$STEP" 2>/dev/null; do # a trap interrupts wait
    wait "$STEP" || true
done
CODE=0
wait "$STEP" || CODE=$? # its status, not that of an interrupted wait

REPORT=/shared/checkpoints/gpt/reports/exit.json
if grep -q '"kind": "stopped"' "$REPORT" && grep -q '"resumable": true' "$REPORT"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
