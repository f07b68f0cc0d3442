#!/usr/bin/env bash
# The projector between CLIP ViT-L (336 pixels) and a Mistral 7B, on 8 GPUs, as LLaVA's first stage.
#
#   bash examples/mimo/scripts/run_vlm_train.sh \
#       DATA TOKENIZER LANGUAGE_MODEL [CHECKPOINT_DIR] [FLAGS...]
#
# DATA are webdataset shards of images with captions.  LANGUAGE_MODEL is a checkpoint that
# tools/checkpoint/convert.py has made.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1

GIVEN=() # paths; flags may follow them
while [[ $# -gt 0 && $1 != --* ]]; do GIVEN+=("$1") && shift; done
DATA_PATH=${GIVEN[0]:-data/llava_pretrain.tar}
TOKENIZER=${GIVEN[1]:-data/mistral}
LANGUAGE_MODEL=${GIVEN[2]:-checkpoints/mistral_7b}
CHECKPOINT_PATH=${GIVEN[3]:-checkpoints/mimo_vlm}

torchrun --nproc_per_node "${GPUS_PER_NODE:-8}" examples/mimo/train.py \
    --model-provider llava_vlm --dataset-provider llava_vlm --data-path "$DATA_PATH" \
    --tokenizer-type MultimodalTokenizer --tokenizer-model "$TOKENIZER" \
    --tokenizer-prompt-format mistral --caption-prompt "Describe the image." \
    --language-model-checkpoint "$LANGUAGE_MODEL" --freeze-LM --freeze-ViT \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \
    --disable-bias-linear --position-embedding-type rope --rotary-base 1000000 \
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    --total-seq-length 1024 --seq-length 1024 --max-position-embeddings 32768 \
    --image-size 336 --patch-dim 14 --image-seq-length 576 --vision-num-layers 23 \
    --vision-hidden-size 1024 --vision-num-attention-heads 16 \
    --tensor-model-parallel-size "${TP_SIZE:-1}" --use-distributed-optimizer --bf16 \
    --micro-batch-size 4 --global-batch-size 256 --train-iters 2200 --lr 1e-3 --min-lr 2e-5 \
    --lr-decay-style cosine --lr-warmup-iters 150 --weight-decay 0 --clip-grad 1.0 \
    --adam-beta2 0.95 --split 949,50,1 --eval-iters 10 --eval-interval 500 --log-interval 10 \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 500 "$@"
