# What sft.sh and dpo.sh share: from a model of Hugging Face and back; each says how it is trained.
#
# They set `model`, source this, and call `prepare` of quickstart/common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"

# from_hugging_face: converts `model` to "$out/base".
from_hugging_face() {
    say "from Hugging Face"
    local stored=(--bf16)
    if [[ ${PRECISION:-bf16} == fp32 ]]; then
        stored=(--dtype float32)
    fi
    once base "$python" tools/checkpoint/convert.py --from "$model" --to "$out/base" "${stored[@]}"
}

# tune DEFAULT_LR FLAGS: trains "$out/base" with these flags and those below, and saves "$out/tuned".
# If a run was killed, the same command continues "$out/tuned".
tune() {
    train_iters=${TRAIN_ITERS:-100}
    ranks=${RANKS:-1}
    precision=(--bf16)
    if [[ ${PRECISION:-bf16} == fp32 ]]; then
        precision=()
    fi
    flags=(
        "${precision[@]}"
        --use-checkpoint-args
        --load "$out/base"
        --finetune
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "$model"
        ${CHAT_TEMPLATE:+--chat-template "$CHAT_TEMPLATE"}
        --split 95,5,0
        --data-cache-path "$out/cache"
        --seq-length "${SEQ_LENGTH:-2048}"
        --micro-batch-size 1
        --global-batch-size "${BATCH:-16}"
        --train-iters "$train_iters"
        --lr "${LR:-$1}"
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
        --save-interval $((train_iters < 10 ? 1 : train_iters / 10))
        "${@:2}"
    )
    if ((ranks > 1)); then
        "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
            pretrain_gpt.py "${flags[@]}"
    else
        "$python" pretrain_gpt.py "${flags[@]}"
    fi
}

# evaluate: runs lm-eval with the flags in LM_EVAL, if there are any.
evaluate() {
    [[ -n ${LM_EVAL:-} ]] || return 0
    say "evaluation by lm-eval"
    read -ra asked <<< "$LM_EVAL"
    "$python" tools/run_lm_eval.py --model megatron --model_args "load=$out/tuned" "${asked[@]}"
}

# to_hugging_face: converts "$out/tuned" to "$out/hf".
to_hugging_face() {
    say "to Hugging Face"
    once hf "$python" tools/checkpoint/convert.py --from "$out/tuned" --to "$out/hf" --format hf
}
