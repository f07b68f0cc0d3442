#!/usr/bin/env bash
# LoRA: train adapters on a frozen model, write them for PEFT, merge them, generate text.
#
#   bash examples/post_training/lora.sh [FOLDER]     everything is written under FOLDER, else lora/
#
# A model that writes "7*3" learns to write "7times3".  Takes a minute on a CPU; PYTHON=... uses
# that environment as it is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/common.sh"
prepare lora "$@"

say "problems with random answers, and the same with operators as words"
once problems "$python" -m examples.post_training.countdown --output "$out/base.jsonl" \
    --count 20000
sed 's/+/plus/g; s/-/minus/g; s/\*/times/g' "$out/base.jsonl" > "$out/words.jsonl"
cat "$out/base.jsonl" "$out/words.jsonl" > "$out/both.jsonl"
once tokenizer "$python" tools/train_tokenizer.py --input "$out/both.jsonl" \
    --output-dir "$out/tokenizer" --vocab-size 300
tokenizer=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$out/tokenizer/vocab.json"
    --merge-file "$out/tokenizer/merges.txt"
)
for name in base words; do
    once "$name" "$python" tools/preprocess_data.py --input "$out/$name.jsonl" \
        --output-prefix "$out/$name" "${tokenizer[@]}" --append-eod --workers "$workers"
done

training=(
    --split 99,1,0
    --reset-attention-mask
    --reset-position-ids
    --micro-batch-size 32
    --global-batch-size 32
    --lr 3e-3
    --lr-decay-style constant
    --eval-iters 1
    --eval-interval 1000
    --log-interval 50
    --device auto
)

say "the base: in practice a Hugging Face folder in --load"
"$python" pretrain_gpt.py "${training[@]}" "${tokenizer[@]}" \
    --num-layers 2 \
    --hidden-size 64 \
    --num-attention-heads 4 \
    --seq-length 32 \
    --max-position-embeddings 32 \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --swiglu \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --attention-dropout 0 \
    --hidden-dropout 0 \
    --data-path "$out/base_text_document" \
    --train-iters "${BASE_ITERS:-200}" \
    --load "$out/base" \
    --save "$out/base"

say "adapters: the flags of the model come from its checkpoint"
"$python" pretrain_gpt.py "${training[@]}" "${tokenizer[@]}" \
    --use-checkpoint-args \
    --load "$out/base" \
    --lora-rank 8 \
    --lora-alpha 16 \
    --lora-target-modules all-linear output_layer \
    --data-path "$out/words_text_document" \
    --train-iters "${TRAIN_ITERS:-100}" \
    --save "$out/adapters" \
    --save-interval 50

say "the adapters for PEFT, and the merged model"
once peft "$python" tools/checkpoint/convert.py --from "$out/adapters" --to "$out/peft" \
    --format peft
once merged "$python" tools/checkpoint/convert.py --from "$out/adapters" --to "$out/merged"

say "text of the base, of the base with adapters, and of the merged model"
for name in base adapters merged; do
    "$python" tools/text_generation_cli.py --load "$out/$name" --num-tokens 12 --temperature 0 \
        --prompt "7 3 = 21:"
done

say "done in $((SECONDS - started_at_s)) s"
