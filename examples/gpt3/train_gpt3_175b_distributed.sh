#!/usr/bin/env bash
# GPT-3 175B on 16 nodes of 8 GPUs: tensor parallel 8, pipeline parallel 16; run it on every node.
#
#   NUM_NODES=16 NODE_RANK=$SLURM_NODEID MASTER_ADDR=node0 \
#       bash examples/gpt3/train_gpt3_175b_distributed.sh \
#       CHECKPOINT_DIR TENSORBOARD_DIR VOCAB_FILE MERGE_FILE DATA_PREFIX [FLAGS...]
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=${NUM_NODES:-16}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/gpt3_175b}
TENSORBOARD_LOGS_PATH=${GIVEN[1]:-tensorboard/gpt3_175b}
VOCAB_FILE=${GIVEN[2]:-data/gpt2-vocab.json}
MERGE_FILE=${GIVEN[3]:-data/gpt2-merges.txt}
DATA_PATH=${GIVEN[4]:-data/my-gpt_text_document}

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NUM_NODES"
    --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-samples 146484375
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-samples 183105
    --lr-decay-samples 126953125
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP_SIZE:-8}"
    --pipeline-model-parallel-size "${PP_SIZE:-16}"
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --split 949,50,1
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    "$@"
