"""Cases of compare_layouts.py: models in whose layouts a kind of silent error would show.

Each error computes plausible losses: no run fails, and a single process is correct.  The cases are
ours; tests/support/planted_errors.py contains the error of each, and tests show that the tool
reports it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tools.lib.layout_commands import ROOT

# Large initial weights: attention is not uniform, so that gradients of queries and keys count.
_TINY = """--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3
--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-workers 0 --init-method-std 0.1"""
# Weights that are larger still: sinks have a share of the gradient norm.
_DENSE = "--qk-layernorm --softmax-type learnable --init-method-std 0.5"
_EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --disable-bias-linear
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01
--moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-bias-update-rate 0.01 --moe-token-dispatcher-type alltoall
--position-embedding-type rope --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16
--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"""
# In rows of 256 tokens, some micro-batches have an end of document, which has no loss.
_AHEAD = """--seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5 --calculate-per-token-loss --eod-mask-loss"""


@dataclass(frozen=True)
class Case:
    """A kind of error, and a run whose layouts differ if it is present."""

    title: str
    layouts: tuple[str, ...]
    flags: str = _DENSE
    script: str = "pretrain_gpt.py"

    def command(self) -> list[str]:
        """Return the command line."""
        return [sys.executable, str(ROOT / self.script), *_TINY.split(), *self.flags.split()]


CASES = {
    "mtp-tokens": Case(
        "MTP loss per token is a mean of each rank's tokens", ("one", "cp2"), _AHEAD
    ),
    "token-counts": Case(
        "loss per token is divided by each rank's number of tokens", ("one", "cp2"), _AHEAD
    ),
    "padding-mask": Case(
        "padding is masked on the first tensor-parallel rank only",
        ("one", "tp2 sp"),
        "--make-vocab-size-divisible-by 1",
        "pretrain_bert.py",
    ),
    "sinks": Case("attention sinks count on one rank in the gradient norm", ("one", "tp2 sp")),
    "norm-copies": Case(
        "copies of norms count on every rank in the gradient norm", ("one", "tp2 sp")
    ),
    "norm-gradients": Case("gradients of norms are not summed over TP", ("one", "tp2 sp")),
    "replicated-weights": Case(
        "gradients of routers and MLA's down projections are not summed over TP",
        ("one", "tp2 sp"),
        _EXPERTS,
    ),
    "expert-norm": Case(
        "experts of other ranks are missing in the gradient norm", ("one", "ep2"), _EXPERTS
    ),
    "expert-gradients": Case(
        "gradients of experts are divided by the wrong number of ranks", ("one", "ep2"), _EXPERTS
    ),
    "balance-counts": Case(
        "the balance loss counts each rank's tokens only", ("one", "cp2"), _EXPERTS
    ),
    "expert-bias": Case(
        "biases of experts follow each rank's tokens only", ("one", "ep2"), _EXPERTS
    ),
    "z-loss": Case("the z-loss is a mean of each rank's tokens", ("one", "cp2"), _EXPERTS),
    "tied-embedding": Case(
        "gradients of the tied embedding are not summed over stages", ("one", "pp2")
    ),
}
