#!/usr/bin/env bash
# Llama 3 8B on one machine of 8 GPUs, or on more of them, in bf16 (FP8=1: the matmuls in fp8).
#
#   bash examples/llama/train_llama3_8b_h100.sh \
#       CHECKPOINT_DIR TENSORBOARD_DIR TOKENIZER DATA_PREFIX [FLAGS...]
#
# TOKENIZER is a Hugging Face tokenizer's name or folder.  Without TOKENIZER and DATA_PREFIX the
# run is on mock data, to see that it fits and how fast it is.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/llama3_8b}
TENSORBOARD_LOGS_PATH=${GIVEN[1]:-tensorboard/llama3_8b}
TOKENIZER=${GIVEN[2]:-MOCK}
DATA_PREFIX=${GIVEN[3]:-MOCK}

DISTRIBUTED_ARGS=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "${NUM_NODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length "${SEQ_LENGTH:-8192}"
    --max-position-embeddings "${SEQ_LENGTH:-8192}"
    --position-embedding-type rope
    --rotary-base 500000
    --rotary-percent 1.0
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.0134
    --attention-backend fused
    --apply-layernorm-1p
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size "${GLOBAL_BATCH_SIZE:-128}"
    --train-samples 1953125000
    --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252
    --lr 1.5e-4
    --min-lr 1.0e-5
    --decoupled-lr 5.0e-4
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --manual-gc
    --empty-unused-memory-level 1
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size "${TP_SIZE:-1}"
    --context-parallel-size "${CP_SIZE:-1}"
    --pipeline-model-parallel-size "${PP_SIZE:-1}"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
if ((${TP_SIZE:-1} > 1)); then
    PARALLEL_ARGS+=(--sequence-parallel)
fi

FP8_ARGS=()
if [[ "${FP8:-0}" == 1 ]]; then
    FP8_ARGS+=(
        --fp8-format hybrid
        --fp8-amax-history-len 1024
        --fp8-amax-compute-algo max
        --fp8-param-gather
    )
fi

if [[ $TOKENIZER == MOCK || $DATA_PREFIX == MOCK ]]; then
    DATA_ARGS=(
        --mock-data
        --tokenizer-type NullTokenizer
        --vocab-size 128256
        --tiktoken-pattern v2
    )
else
    DATA_ARGS=(
        --data-path "$DATA_PREFIX"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "$TOKENIZER"
        --data-cache-path "${DATA_CACHE_PATH:-cache/llama3_8b}"
    )
fi
DATA_ARGS+=(
    --split 99,1,0
    --num-workers 1
    --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files
)

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --eval-interval 100
    --eval-iters 32
    --save-interval 1000
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
    --exit-duration-in-mins 235
    --distributed-timeout-minutes 60
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${FP8_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" \
    "$@"
