# What sft.sh and dpo.sh share: from a model of Hugging Face to another one.
#
# They set `model`, source this, and call `prepare` of quickstart/common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"

# tune DEFAULT_LR FLAGS: trains `model` with these flags and those below, saves "$out/tuned", and
# writes "$out/hf" at the end.  If a run was killed, the same command continues "$out/tuned".
tune() {
    train_iters=${TRAIN_ITERS:-100}
    ranks=${RANKS:-1}
    precision=(--bf16)
    if [[ ${PRECISION:-bf16} == fp32 ]]; then
        precision=()
    fi
    flags=(
        "${precision[@]}"
        --load "$model"
        --save-hf "$out/hf"
        ${CHAT_TEMPLATE:+--chat-template "$CHAT_TEMPLATE"}
        --data-cache-path "$out/cache"
        --seq-length "${SEQ_LENGTH:-2048}"
        --global-batch-size "${BATCH:-16}"
        --train-iters "$train_iters"
        --lr "${LR:-$1}"
        --lr-decay-style cosine
        --lr-warmup-iters $((train_iters / 20))
        --weight-decay 0
        --tensor-model-parallel-size "${TP:-1}"
        --pipeline-model-parallel-size "${PP:-1}"
        --use-distributed-optimizer
        --log-interval $((train_iters < 20 ? 1 : train_iters / 20))
        --eval-interval $((train_iters < 4 ? 1 : train_iters / 4))
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
    "$python" tools/run_lm_eval.py --model megatron --model_args "load=$out/hf" "${asked[@]}"
}
