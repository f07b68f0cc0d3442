#!/usr/bin/env bash
# Train a model of Hugging Face on pairs of answers, and write it for Hugging Face again.
#
#   bash examples/post_training/dpo.sh MODEL PAIRS [FOLDER]
#
# MODEL is a Hugging Face folder, whose tokenizer has a chat template (else CHAT_TEMPLATE=file) if
# pairs are messages; PAIRS is a jsonl or parquet file with prompt, chosen and rejected.  Everything
# is written under FOLDER, else under dpo/.  REWARD=1 trains a reward model instead.
# RANKS=8 TP=2 PP=1 use eight devices; SEQ_LENGTH, TRAIN_ITERS, BATCH, LR and BETA are settings of the
# run.  LM_EVAL="--tasks hellaswag" evaluates the trained model with these flags of lm-eval.
# PYTHON=... uses that environment as it is.
set -euo pipefail
model=$(realpath "$1")
pairs=$(realpath "$2")
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"
prepare dpo "${@:3}"
train_iters=${TRAIN_ITERS:-100}
ranks=${RANKS:-1}
objective=(--dpo-beta "${BETA:-0.1}")
if [[ ${REWARD:-0} == 1 ]]; then
    objective=(--reward-model)
fi

say "from Hugging Face"
"$python" tools/checkpoint/convert.py --from "$model" --to "$out/base"

say "training on pairs"
flags=(
    --use-checkpoint-args
    --load "$out/base"
    --finetune
    "${objective[@]}"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$model"
    ${CHAT_TEMPLATE:+--chat-template "$CHAT_TEMPLATE"}
    --data-path "$pairs"
    --split 95,5,0
    --data-cache-path "$out/cache"
    --seq-length "${SEQ_LENGTH:-2048}"
    --micro-batch-size 1
    --global-batch-size "${BATCH:-16}"
    --train-iters "$train_iters"
    --lr "${LR:-1e-6}"
    --lr-decay-style cosine
    --lr-warmup-iters $((train_iters / 20))
    --weight-decay 0
    --clip-grad 1.0
    --attention-dropout 0
    --hidden-dropout 0
    --tensor-model-parallel-size "${TP:-1}"
    --pipeline-model-parallel-size "${PP:-1}"
    --use-distributed-optimizer
    --log-interval $((train_iters < 20 ? 1 : train_iters / 20))
    --eval-interval $((train_iters < 4 ? 1 : train_iters / 4))
    --eval-iters 2
    --metrics-file "$out/metrics.jsonl"
    --save "$out/tuned"
)
if ((ranks > 1)); then
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        pretrain_gpt.py "${flags[@]}"
else
    "$python" pretrain_gpt.py "${flags[@]}"
fi

if [[ -n ${LM_EVAL:-} && ${REWARD:-0} != 1 ]]; then
    say "evaluation by lm-eval"
    read -ra asked <<< "$LM_EVAL"
    "$python" tools/run_lm_eval.py --model megatron --model_args "load=$out/tuned" "${asked[@]}"
fi

say "to Hugging Face"
"$python" tools/checkpoint/convert.py --from "$out/tuned" --to "$out/hf" --format hf

say "done in $((SECONDS - started_at_s)) s: the trained model is in $out/hf"
