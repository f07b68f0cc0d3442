#!/usr/bin/env bash
# gpt-oss 20B on one machine of 8 GPUs: its experts over all of them, the rest by data parallelism.
#
#   bash examples/gpt_oss/train_gpt_oss_20b.sh \
#       CHECKPOINT_DIR TENSORBOARD_DIR TOKENIZER DATA_PREFIX [FLAGS...]
#
# To go on from its published weights, convert them first (docs/conversion.md) into CHECKPOINT_DIR.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
CHECKPOINT_PATH=${GIVEN[0]:-checkpoints/gpt_oss_20b}
TENSORBOARD_LOGS_PATH=${GIVEN[1]:-tensorboard/gpt_oss_20b}
TOKENIZER=${GIVEN[2]:-openai/gpt-oss-20b}
DATA_PREFIX=${GIVEN[3]:-data/gpt_oss_text_document}

torchrun --standalone --nproc_per_node "${GPUS_PER_NODE:-8}" pretrain_gpt.py \
    --expert-model-parallel-size "${EP_SIZE:-8}" \
    --moe-token-dispatcher-type alltoall \
    --moe-grouped-gemm \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --recompute-granularity selective \
    --recompute-modules core_attn moe_act \
    --num-layers 24 \
    --hidden-size 2880 \
    --num-attention-heads 64 \
    --group-query-attention \
    --num-query-groups 8 \
    --kv-channels 64 \
    --softmax-type learnable \
    --window-size 127,0 \
    --window-attn-skip-freq 2 \
    --num-experts 32 \
    --moe-router-topk 4 \
    --moe-router-load-balancing-type aux_loss \
    --moe-aux-loss-coeff 1e-3 \
    --moe-router-dtype fp32 \
    --ffn-hidden-size 2880 \
    --moe-ffn-hidden-size 2880 \
    --quick-geglu \
    --activation-func-clamp-value 7.0 \
    --glu-linear-offset 1.0 \
    --seq-length 4096 \
    --max-position-embeddings 131072 \
    --position-embedding-type rope \
    --rotary-base 150000 \
    --rope-type yarn \
    --rotary-scaling-factor 32 \
    --yarn-original-max-position-embeddings 4096 \
    --yarn-beta-fast 32 \
    --yarn-beta-slow 1 \
    --no-yarn-correction-range-round-to-int \
    --normalization RMSNorm \
    --norm-epsilon 1e-5 \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --micro-batch-size 1 \
    --global-batch-size 256 \
    --train-iters 10000 \
    --lr 1.0e-5 \
    --min-lr 1.0e-6 \
    --lr-decay-style cosine \
    --lr-warmup-iters 100 \
    --weight-decay 0.1 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --clip-grad 1.0 \
    --bf16 \
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model "$TOKENIZER" \
    --data-path "$DATA_PREFIX" \
    --split 99,1,0 \
    --log-interval 10 \
    --save-interval 1000 \
    --eval-interval 500 \
    --eval-iters 10 \
    --save "$CHECKPOINT_PATH" \
    --load "$CHECKPOINT_PATH" \
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH" \
    "$@"
