#!/usr/bin/env bash
# From a clone to a trained model: environment, corpus, tokenizer, training, resuming, text.
#
#   bash examples/quickstart.sh [FOLDER]     everything is written under FOLDER, else quickstart/
#
# On a GPU when there is one, else on the CPU; PYTHON=... uses that environment as it is.
set -euo pipefail
out=${1:+$(realpath -m "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${out:-quickstart}

train_iters=${TRAIN_ITERS:-400}
workers=$(($(nproc) < 8 ? $(nproc) : 8))

say() { printf '\n== %s\n' "$*"; }

say "environment"
python=$(tools/env.sh)
started_at_s=$SECONDS
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$workers}
# Threads that wait sleep instead of spinning: five times faster where the cores are shared.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

if [[ -e $out && ! -e $out/.quickstart ]]; then
    echo "$out exists and was not made by this script: name another folder" >&2
    exit 1
fi
rm -rf "$out"
mkdir -p "$out"
touch "$out/.quickstart"

say "corpus: the text of the installed Python standard library"
"$python" examples/quickstart/corpus.py "$out"

say "tokenizer: byte-level BPE of 4096 ids"
"$python" tools/train_tokenizer.py --input "$out/train.jsonl" --output-dir "$out/tokenizer" \
    --vocab-size 4096

say "token files"
tokenizer=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$out/tokenizer/vocab.json"
    --merge-file "$out/tokenizer/merges.txt"
)
for part in train valid; do
    "$python" tools/preprocess_data.py --input "$out/$part.jsonl" --output-prefix "$out/$part" \
        "${tokenizer[@]}" --append-eod --workers "$workers"
done

train() {
    "$python" pretrain_gpt.py \
        --transformer-impl local \
        --num-layers 4 \
        --hidden-size 192 \
        --num-attention-heads 6 \
        --seq-length 256 \
        --max-position-embeddings 256 \
        --position-embedding-type rope \
        --normalization RMSNorm \
        --swiglu \
        --disable-bias-linear \
        --attention-dropout 0 \
        --hidden-dropout 0 \
        --micro-batch-size 8 \
        --global-batch-size 8 \
        --train-iters "$train_iters" \
        --lr 3e-3 \
        --min-lr 3e-4 \
        --lr-decay-style cosine \
        --lr-warmup-iters 20 \
        --weight-decay 0.1 \
        --adam-beta2 0.95 \
        --clip-grad 1.0 \
        "${tokenizer[@]}" \
        --train-data-path "$out/train_text_document" \
        --valid-data-path "$out/valid_text_document" \
        --data-cache-path "$out/cache" \
        --num-workers 1 \
        --no-create-attention-mask-in-dataloader \
        --log-interval 20 \
        --log-throughput \
        --eval-interval $((train_iters / 4)) \
        --eval-iters 10 \
        --save "$out/checkpoints" \
        --load "$out/checkpoints" \
        --save-interval "$train_iters" \
        --tensorboard-dir "$out/tensorboard" \
        --log-validation-ppl-to-tensorboard \
        "$@" 2>&1 | tee -a "$out/train.log" |
        sed -u '/-- arguments --/,/-- end of arguments --/d'
}

say "training, first half: it stops and saves at iteration $((train_iters / 2))"
train --exit-interval $((train_iters / 2))

say "training, second half: it goes on from the checkpoint"
train

say "loss"
"$python" examples/quickstart/unigram.py "$out/train_text_document" "$out/valid_text_document" \
    "$out/train.log"

say "text"
"$python" tools/text_generation_cli.py --load "$out/checkpoints" --num-tokens 80 \
    --temperature 0.8 --top-k 40 --seed 1 --prompt "def "

say "done in $((SECONDS - started_at_s)) s; the curves: tensorboard --logdir $out/tensorboard"
