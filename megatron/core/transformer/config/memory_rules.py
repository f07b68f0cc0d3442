"""Rules about recomputation and offloading of activations."""

from __future__ import annotations

from megatron.core.config.rule import given, rules, where

OFFLOADS = "--cpu-offloading --fine-grained-activation-offloading"

_MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")
_MODULE_NEEDS = {
    "moe": "--num-experts",
    "moe_act": "--num-experts",
    "shared_experts": "--moe-shared-expert-intermediate-size",
    "mla_up_proj": "--multi-latent-attention",
}

_RECOMPUTATION = rules(
    where(
        "--recompute-granularity full",
        {
            "--recompute-granularity full needs --recompute-method uniform or block": lambda c: (
                c.recompute_method is None
            ),
            "--recompute-granularity full needs --recompute-num-layers": None,
        },
    ),
    where(
        "--recompute-granularity selective",
        {"{found} needs --recompute-granularity full": "--recompute-num-layers"},
    ),
    {
        "--recompute-modules {found[0]} needs {found[1]}: add it; core_attn and layernorm are in "
        "every transformer layer": lambda c: [
            (module, flag)
            for module, flag in _MODULE_NEEDS.items()
            if module in c.modules_to_recompute and not given(flag)(c)
        ],
        f"--recompute-modules {{found}}: use {', '.join(_MODULES)}": lambda c: " ".join(
            name for name in c.modules_to_recompute if name not in _MODULES
        ),
        "--distribute-saved-activations and --sequence-parallel exclude each other: keep "
        "--sequence-parallel, which already shards hidden states over the same ranks": None,
        # the chunks of the logits are freed before that gradient would be computed
        "{--loss-chunk-size} and --defer-embedding-wgrad-compute exclude each other: keep the "
        "first to save the memory of the logits, the second to defer the output layer's weight "
        "gradient into "
        "the pipeline bubble": lambda c: c.loss_chunk_size and c.defer_embedding_wgrad_compute,
    },
)

# Modules that recomputation covers without freeing memory that offloading copies.
_COVERED = {
    "core_attn": ("core_attn",),
    "mlp": (),
    "moe": ("expert_fc1", "moe_act"),
    "shared_experts": (),
}

_OFFLOADING = rules(
    where(
        "--cpu-offloading",
        {
            # backward needs the last layers right away
            "{--cpu-offloading-num-layers} of {--num-layers}: with --cpu-offloading use 1 or more, "
            "but not all layers": lambda c: (
                not 0 < c.cpu_offloading_num_layers < max(2, c.num_layers)
            ),
            "--cpu-offloading and {--recompute-granularity} exclude each other: keep the first to "
            "move activations to host memory, the second to compute them again in backward": (
                "--recompute-granularity"
            ),
            "--cpu-offloading and --fine-grained-activation-offloading exclude each other: keep "
            "the first to offload layers, the second to offload modules": None,
        },
    ),
    where(
        "--fine-grained-activation-offloading",
        {
            "--fine-grained-activation-offloading needs --offload-modules": lambda c: (
                not c.offload_modules
            ),
            "--offload-modules {found} needs --num-experts: leave it out": lambda c: " ".join(
                name
                for name in c.offload_modules
                if name in _COVERED["moe"] and c.num_moe_experts is None
            ),
            "{found}: a number from 0 to 1 is needed": given(
                "--activation-offload-fraction", lambda share: not 0 <= share <= 1
            ),
            "--fine-grained-activation-offloading and --recompute-granularity full exclude each "
            "other: keep the first to move activations to host memory, the second to compute them "
            "again in backward": "--recompute-granularity full",
            "--recompute-modules {found} and --offload-modules exclude each other: it recomputes "
            "what they save; leave it out": lambda c: " ".join(
                name
                for name in c.modules_to_recompute
                if name not in _COVERED or {*_COVERED[name]} & {*c.offload_modules}
            ),
        },
    ),
    where(
        given(OFFLOADS),
        {
            "{found} and --enable-cuda-graph exclude each other: keep the first to move "
            "activations to host memory, the second to reduce launch overhead": lambda c: (
                c.uses_graphs and given(OFFLOADS)(c)
            ),
            "{found} and --overlap-moe-expert-parallel-comm exclude each other: keep the first to "
            "move activations to host memory, the second to overlap the experts' "
            "all-to-all": lambda c: c.overlap_moe_expert_parallel_comm and given(OFFLOADS)(c),
        },
    ),
)

MEMORY_RULES = rules(_RECOMPUTATION, _OFFLOADING)
