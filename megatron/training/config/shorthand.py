"""Flags that set several fields at once, or that only the start of a run reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_network = partial(option, group="network size")
_training = partial(option, group="training")
_precision = partial(option, group="mixed precision")
_moe = partial(option, group="moe")
_device = partial(option, group="device and checks")


@dataclass(frozen=True, kw_only=True)
class ShorthandFlags:
    group_query_attention: bool = _network(
        False,
        "Use grouped-query attention with --num-query-groups key/value heads; excludes "
        "--multi-latent-attention.",
    )
    use_rotary_position_embeddings: bool = _network(
        False, "Alias of --position-embedding-type rope."
    )
    openai_gelu: bool = _network(False, "Use the tanh approximation of GELU.")
    relu: bool = _network(False, "Use ReLU in the MLP.")
    squared_relu: bool = _network(False, "Use squared ReLU in the MLP.")
    geglu: bool = _network(
        False,
        "Use a gated GELU in the MLP, with --openai-gelu its tanh approximation; the default "
        "of --ffn-hidden-size does not change.",
    )
    quick_geglu: bool = _network(
        False,
        "Use x * sigmoid(1.702 x) as gate in the MLP; the default of --ffn-hidden-size does "
        "not change.",
    )
    swiglu: bool = _network(
        False,
        "Use a gated SiLU (SwiGLU) in the MLP; the default of --ffn-hidden-size becomes 8/3 "
        "of --hidden-size.",
    )
    recompute_activations: bool = _training(False, "Alias of --recompute-granularity selective.")
    fp16: bool = _precision(
        False, "Train in fp16 with loss scaling and fp32 main parameters; excludes --bf16."
    )
    bf16: bool = _precision(False, "Train in bf16 with fp32 main parameters; excludes --fp16.")
    moe_layer_recompute: bool = _moe(
        False, "Alias of --recompute-granularity selective --recompute-modules moe."
    )
    yaml_cfg: str | None = option(
        None,
        "YAML or JSON file of flags, such as `lr: 1e-5` and `train: sft` (the name of "
        "megatron-train); the command line takes precedence.",
        group="experimental",
        aliases=("--config",),
    )
    check_only: bool = _device(
        False,
        "Validate the flags, print layout, memory, communication and pipeline bubble for "
        "--check-world-size ranks, and exit: status 0 if the run could start, 1 if it could "
        "not or does not fit --check-device-memory-gib. Needs no GPU.",
    )
    check_world_size: int | None = _device(
        None,
        "World size for --check-only; the environment variable WORLD_SIZE, or 1, if not given.",
    )
    check_rank: int = _device(0, "Rank whose pipeline --check-only plans.")
    check_device_memory_gib: float | None = _device(
        None,
        "Device memory in GiB: --check-only refuses a run that needs more and suggests the "
        "cheapest change.",
    )
