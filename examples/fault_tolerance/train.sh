#!/usr/bin/env bash
# One node of a run that recovers by itself: the supervisor with its ranks.  The other scripts of
# this folder start it on each node.
#
#   CHECKPOINTS   folder that all nodes share; also for exit.json and the exit reports
#   ENDPOINT      host:port of the rendezvous, the same on all nodes
#   RUN_ID        the same on all nodes, another one for each run
#   NODES         N, or MIN:MAX: with fewer nodes the data-parallel size becomes smaller
set -euo pipefail

CHECKPOINTS=${CHECKPOINTS:-checkpoints/gpt}
DATA_PATH=${DATA_PATH:-data/my-gpt_text_document}

LAUNCH_ARGS=(
    --nnodes "${NODES:-1}"
    --nproc-per-node "${GPUS_PER_NODE:-8}"
    --rdzv-backend c10d
    --rdzv-endpoint "${ENDPOINT:-localhost:29400}"
    --rdzv-id "${RUN_ID:-gpt}"
    --exit-report-dir "$CHECKPOINTS/reports"
    --shutdown-timeout "${SHUTDOWN_TIMEOUT:-240}"
    --node-name "${NODE_NAME:-$(hostname)}"
    --check-node
)

TRAIN_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --tensor-model-parallel-size "${TP_SIZE:-2}"
    --micro-batch-size 2
    --global-batch-size 512
    --train-iters 100000
    --lr 2.0e-4
    --min-lr 2.0e-5
    --lr-decay-style cosine
    --bf16
    --use-distributed-optimizer
    --data-path "$DATA_PATH"
    --vocab-file "${VOCAB_FILE:-data/gpt2-vocab.json}"
    --merge-file "${MERGE_FILE:-data/gpt2-merges.txt}"
    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --load-newest-valid
    --save-interval 500
    --async-save
    --exit-signal-handler
    --calc-ft-timeouts
    --enable-ft-package
    --check-weight-hash-across-dp-replicas-interval 500
)

exec "${PYTHON:-python}" tools/launch.py "${LAUNCH_ARGS[@]}" pretrain_gpt.py "${TRAIN_ARGS[@]}" "$@"
