#!/usr/bin/env bash
# One supervisor on each host; the first host has the rendezvous.  A supervisor that cannot be
# reached is started again until the run has ended.
set -euo pipefail
HOSTS=(node0 node1 node2 node3 node4)
LOST=255 # exit status of ssh when the connection fails

train() {
    cd /shared/megatron
    export OMP_NUM_THREADS=1
    export TORCH_FR_BUFFER_SIZE=2000
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

start() {
    local host=$1 code script
    script="$(printf 'ENDPOINT=%q RUN_ID=%q NODE_NAME=%q' "${HOSTS[0]}:29400" "$RUN_ID" "$host")"
    script="$script; $(declare -f train); train"
    while true; do
        code=0
        ssh -o ServerAliveInterval=15 "$host" "bash -c $(printf %q "$script")" || code=$?
        [ "$code" -eq "$LOST" ] || return "$code"
        sleep 10
    done
}

RUN_ID="gpt-$(date +%s)"
PIDS=()
for host in "${HOSTS[@]}"; do
    start "$host" &
    PIDS+=($!)
done
CODE=0
for pid in "${PIDS[@]}"; do
    wait "$pid" || CODE=$?
done
exit "$CODE"
