"""Options of recomputation, offloading, fused kernels and CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.config import flag_messages
from megatron.core.config.option import option
from megatron.core.model_parallel_config import as_tuple

_training = partial(option, group="training")
_network = partial(option, group="network size")
OFFLOAD_MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
)


@dataclass(kw_only=True)
class RecomputeConfig:
    """Options of activation recomputation, activation offloading and loss chunks."""

    recompute_granularity: str | None = _training(
        None,
        "Activation recomputation: complete layers (full, or its old name adaptive) or "
        "--recompute-modules (selective).",
        choices=("full", "selective", "adaptive"),
    )
    distribute_saved_activations: bool = _training(
        None,
        "Shard saved layer inputs over tensor-parallel ranks; needs --recompute-granularity "
        "full, excludes --sequence-parallel.",
        default=False,
    )
    recompute_method: str | None = _training(
        None,
        "Layers of full recomputation: uniform (chunks of all layers) or block (the first "
        "layers of each stage).",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = _training(
        None, "Layers per chunk (uniform) or recomputed layers per stage (block).", at_least=1
    )
    recompute_modules: Sequence[str] | None = _training(
        None,
        "Modules of a layer to recompute with --recompute-granularity selective, such as "
        "core_attn, mlp and layernorm.",
        nargs="*",
    )
    mhc_recompute_layer_num: int | None = _training(
        None,
        "Layers per chunk in which the residual streams of --enable-mhc-connections are freed "
        "after forward and recomputed in backward from the outputs of attention and MLP; streams "
        "are saved if not given.",
        at_least=1,
    )

    fine_grained_activation_offloading: bool = _network(
        False,
        "Offload what --offload-modules save for backward to host memory, in all layers of a "
        "stage but the last.",
    )
    offload_modules: tuple[str, ...] = _network(
        (),
        "Modules of a layer for --fine-grained-activation-offloading.",
        choices=OFFLOAD_MODULES,
        nargs="+",
    )
    activation_offload_fraction: float = _network(
        1.0, "Fraction of the layers in which --offload-modules are offloaded, from the first on."
    )
    min_offloaded_tensor_size: int = _network(
        1024 * 1024,
        "Fewest values of a tensor that --fine-grained-activation-offloading offloads.",
        at_least=1,
    )
    delay_offload_until_cuda_graph: bool = _network(
        False,
        "Start to offload where a CUDA graph is replayed.",
        ignored="offloading of activations excludes CUDA graphs",
    )
    fine_grained_offloading_max_inflight_offloads: int | None = _network(
        None,
        "Limit of copies to the host at a time.",
        ignored="the device frees what a layer saved after the next layer's forward pass",
    )
    delta_offload_bytes_across_pp_ranks: int = _network(
        0,
        "Bytes that a pipeline stage offloads less than the stage before.",
        ignored="each stage offloads the same modules",
    )
    loss_chunk_size: int | None = _training(
        None,
        "Tokens per chunk of logits in the loss; backward recomputes them. 0: one chunk. If "
        "not given, chunks are used when the logits exceed a tenth of device memory.",
    )

    @property
    def modules_to_recompute(self) -> tuple[str, ...]:
        """Modules that selective recomputation covers; empty with any other granularity."""
        if self.recompute_granularity != "selective":
            return ()
        return ("core_attn",) if self.recompute_modules is None else (*self.recompute_modules,)


@dataclass(kw_only=True)
class FusionConfig:
    """Options that select fused kernels."""

    compile: str = _training(
        "none",
        "Regions for torch.compile: none, layer or model.",
        choices=("none", "layer", "model"),
        ignored="the kernels of this program took less time than compiled layers where both were "
        "measured",
        harmless=("none",),
    )
    batch_invariant_mode: bool = _training(
        False,
        "Compute values of training by the kernels of generation: the log-probabilities of the "
        "engine are those of training, bit for bit, whatever the batches and layouts; slower.",
    )
    masked_softmax_fusion: bool = _training(
        False,
        "Do not fuse scaling, masking and softmax.",
        default=True,
    )
    bias_gelu_fusion: bool = _training(
        True,
        "Do not fuse bias and GELU; the fused kernel uses the tanh approximation, the "
        "unfused one exact GELU.",
    )
    bias_swiglu_fusion: bool = _training(True, "Do not fuse bias and SwiGLU.")
    use_fused_weighted_squared_relu: bool = _training(
        False, "Fuse the router's weight with squared ReLU.", ignored=flag_messages.NO_KERNEL
    )
    bias_dropout_fusion: bool = _training(
        False,
        "Do not fuse bias, dropout and residual; they are fused on GPUs only.",
        default=True,
    )
    apply_rope_fusion: bool = _training(
        False,
        "Do not fuse the rotary embedding of queries and keys.",
        flag="--no-rope-fusion",
        default=True,
    )
    persist_layer_norm: bool = _training(
        False,
        "Do not use the persistent layer norm kernel.",
        inverted=True,
        dest="no_persist_layer_norm",
        ignored=flag_messages.NO_KERNEL,
        default=True,
    )


_inference = partial(option, group="inference")


@dataclass(kw_only=True)
class CudaGraphConfig:
    """CUDA graph options."""

    enable_cuda_graph: bool = _inference(
        False,
        "Capture layers as CUDA graphs and replay them, forward and backward; excludes "
        "--external-cuda-graph.",
    )
    cuda_graph_warmup_steps: int = _inference(3, "Eager steps before CUDA graph capture.")
    external_cuda_graph: bool = _inference(
        False,
        "Alias of --enable-cuda-graph; does not need Transformer Engine.",
    )
    cuda_graph_impl: str = _inference(
        "none",
        "CUDA graphs: none, of layers (local or transformer_engine, both as --enable-cuda-graph), "
        "or of a step (full_iteration).",
        choices=("none", "local", "transformer_engine", "full_iteration"),
    )
    cuda_graph_modules: tuple[str, ...] = _inference(
        (),
        "Parts of a layer to capture: with attn its attention, else the layer; only attention in "
        "layers with experts. Graphs do not change results.",
        choices=("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "full_iteration"),
        nargs="+",
    )
    cuda_graph_scope: str | Sequence[Any] = _inference(
        "full",
        "Scope of CUDA graph capture: each layer (full), its attention (attn), or all "
        "micro-batches of a step (full_iteration).",
        choices=("full", "attn", "full_iteration"),
        parse=str,
    )

    @property
    def uses_graphs(self) -> bool:
        """Whether CUDA graphs are captured."""
        is_asked = self.enable_cuda_graph or self.external_cuda_graph
        return is_asked or self.cuda_graph_impl != "none"

    @property
    def graph_scope(self) -> str:
        """What a graph contains: full (a layer), attn or full_iteration.

        A list of `CudaGraphScope` without the last two means complete layers.
        """
        names = [getattr(scope, "name", scope) for scope in as_tuple(self.cuda_graph_scope)]
        return next((name for name in ("full_iteration", "attn") if name in names), "full")

    @property
    def captures_layers(self) -> bool:
        """Whether each layer is captured on its own, not the complete iteration."""
        return self.uses_graphs and self.graph_scope != "full_iteration"
