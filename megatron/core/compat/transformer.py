"""Megatron Core's functions around transformer layers: specs, predicted tokens, Transformer Engine.

Without effect: `set_save_original_input`, since our layers save what backward needs once, and the
arguments ``fp8``, ``moe_use_legacy_grouped_gemm`` and ``use_te_op_fuser`` of specs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn
from typing import Optional as Optional
from typing import Tuple as Tuple  # noqa: UP035
from typing import Union as Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.module_state import make_tp_sharded_tensor_for_checkpoint
from megatron.core.extensions.transformer_engine.engine import unsupported_reason
from megatron.core.fusions.rope import RotaryTable, apply_rotary
from megatron.core.models.gpt.gpt_layer_specs import (
    ENGINE,
    LOCAL,
    LayerParts,
    experts_of,
    get_gpt_mtp_block_spec,
    mtp_layer_of,
)
from megatron.core.packed_seq_params import position_in_sequence
from megatron.core.parallel.context_parallel_partition import held_tokens
from megatron.core.parallel.default_groups import default_groups
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.layer_layout import is_last_stage
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, Slot
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

HAVE_TE = unsupported_reason() is None
HAVE_FA3 = False  # generation has kernels of its own
TEFusedMLP = None  # as without the package
te_general_gemm = None


def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether flash-attn has this version: our kernels take its place."""
    return False


# ---- specs ---------------------------------------------------------------------------------


class BackendSpecProvider:
    """Chooses the classes of a spec: from ``parts``, or others in derived classes."""

    parts = LOCAL

    def column_parallel_linear(self) -> Slot:
        """Return the class of linear layers with sharded outputs."""
        return self.parts.column

    def row_parallel_linear(self) -> Slot:
        """Return the class of linear layers with sharded inputs."""
        return self.parts.row

    def linear(self) -> Slot:
        """Return the class of linear layers that every rank computes in full."""
        return self.parts.replicated

    def fuse_layernorm_and_linear(self) -> bool:
        """Return whether one module has a norm and the linear layer behind it."""
        return self.parts.column_behind_norm is not None

    def column_parallel_layer_norm_linear(self) -> Slot | None:
        """Return the class of such a module."""
        return self.parts.column_behind_norm

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> Slot:
        """Return the class of norms; the config says which norm it is."""
        return self.parts.norm

    def core_attention(self) -> Slot:
        """Return the class of attention cores."""
        return self.parts.core_attention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[Any, MLPSubmodules | None]:
        """Return the class of a rank's experts, and their linear layers."""
        experts = experts_of(self.parts, moe_use_grouped_gemm).submodules.experts
        return experts.module, experts.submodules


class LocalSpecProvider(BackendSpecProvider):
    """The classes of `LOCAL`."""


class TESpecProvider(BackendSpecProvider):
    """The classes of `ENGINE`."""

    parts = ENGINE


def _parts_of(backend: BackendSpecProvider) -> LayerParts:
    return replace(
        LOCAL,
        column=backend.column_parallel_linear(),
        row=backend.row_parallel_linear(),
        replicated=backend.column_parallel_linear(),
        norm=backend.layer_norm(),
        core_attention=backend.core_attention(),
        column_behind_norm=backend.column_parallel_layer_norm_linear(),
    )


def _backend(use_te: bool | None) -> BackendSpecProvider:
    return TESpecProvider() if use_te else LocalSpecProvider()


def get_mlp_module_spec(
    use_te: bool | None = True,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool = False,
    use_te_op_fuser: bool = False,
) -> ModuleSpec:
    """Return the spec of an MLP, or of experts."""
    return get_mlp_module_spec_for_backend(_backend(use_te), num_experts, moe_grouped_gemm)


def get_mlp_module_spec_for_backend(
    backend: BackendSpecProvider,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    moe_use_legacy_grouped_gemm: bool = False,
    use_te_op_fuser: bool = False,
) -> ModuleSpec:
    """Return the spec of an MLP, or of experts, with the classes of ``backend``."""
    if num_experts is not None:
        return get_moe_module_spec_for_backend(backend, num_experts, moe_grouped_gemm)
    column = backend.column_parallel_layer_norm_linear() or backend.column_parallel_linear()
    return ModuleSpec(MLP, submodules=MLPSubmodules(column, backend.row_parallel_linear()))


def get_moe_module_spec(
    use_te: bool | None = True,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    moe_use_legacy_grouped_gemm: bool = False,
) -> ModuleSpec:
    """Return the spec of experts."""
    return get_moe_module_spec_for_backend(_backend(use_te), num_experts, moe_grouped_gemm)


def get_moe_module_spec_for_backend(
    backend: BackendSpecProvider,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    moe_use_legacy_grouped_gemm: bool = False,
) -> ModuleSpec:
    """Return the spec of experts with the classes of ``backend``."""
    assert num_experts is not None, "experts need their number"
    spec = experts_of(_parts_of(backend), moe_grouped_gemm)
    kind, matrices = backend.grouped_mlp_modules(moe_grouped_gemm, moe_use_legacy_grouped_gemm)
    spec.submodules.experts = ModuleSpec(kind, submodules=matrices)
    return spec


def get_mtp_layer_spec(transformer_layer_spec: Slot, use_transformer_engine: bool) -> ModuleSpec:
    """Return the spec of one depth of multi-token prediction."""
    return get_mtp_layer_spec_for_backend(transformer_layer_spec, _backend(use_transformer_engine))


def get_mtp_layer_spec_for_backend(
    transformer_layer_spec: Slot, backend: BackendSpecProvider
) -> ModuleSpec:
    """Return the spec of one depth of multi-token prediction with the classes of ``backend``."""
    return mtp_layer_of(_parts_of(backend), transformer_layer_spec)


def get_gpt_mtp_block_spec_for_backend(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    backend: BackendSpecProvider,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return `get_gpt_mtp_block_spec` with the classes of ``backend``."""
    block = get_gpt_mtp_block_spec(config, spec, vp_stage=vp_stage)
    for layer in [] if block is None else block.layer_specs or ():
        slots = layer.submodules  # type: ignore[union-attr]
        vars(slots).update(
            vars(mtp_layer_of(_parts_of(backend), slots.transformer_layer).submodules)
        )
    return block


def get_mtp_layer_offset(config: TransformerConfig) -> int:
    """Return the number of depths before the last stage, which has all of them."""
    return 0


def get_mtp_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None) -> int:
    """Return the number of depths of multi-token prediction on this stage."""
    return (config.mtp_num_layers or 0) * is_last_stage(config, default_groups().pp, vp_stage)


# ---- multi-token prediction ----------------------------------------------------------------


def tie_word_embeddings_state_dict(
    sharded_state_dict: ShardedStateDict, word_emb_weight: Tensor, word_emb_weight_key: str
) -> None:
    """Mark the embedding of the last stage as a copy of the first stage's."""
    assert word_emb_weight_key in sharded_state_dict, f"{word_emb_weight_key} is not there"
    sharded_state_dict[word_emb_weight_key] = make_tp_sharded_tensor_for_checkpoint(
        word_emb_weight,
        word_emb_weight_key,
        replica_id=(1, 0, default_groups().dp_cp.rank()),
        allow_shape_mismatch=True,
    )


def tie_output_layer_state_dict(
    sharded_state_dict: ShardedStateDict, output_layer_weight: Tensor, output_layer_weight_key: str
) -> None:
    """Mark the output layer of a stage as a copy of the last stage's."""
    tie_word_embeddings_state_dict(sharded_state_dict, output_layer_weight, output_layer_weight_key)


# ---- Transformer Engine --------------------------------------------------------------------


def te_checkpoint(
    forward_func: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_state_tracker: object,
    tp_group: ProcessGroup | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return ``forward_func(*args, **kwargs)`` and recompute it in backward."""
    names, values = [*kwargs], (*args, *kwargs.values())

    def run(*values: Any) -> Any:
        rest = dict(zip(names, values[len(args) :], strict=True))
        return forward_func(*values[: len(args)], **rest)

    return checkpoint(run, distribute_saved_activations, *values, tp_group=tp_group)


def get_cpu_offload_context(
    enabled: bool, *settings: object, **more: object
) -> tuple[AbstractContextManager[None], None]:
    """Return a context without effect.  Raises ConfigError if offloading is asked for."""
    if enabled:
        raise ConfigError("the blocks of this program offload activations: set cpu_offloading")
    return nullcontext(), None


def set_save_original_input(module: nn.Module) -> None:
    """Do nothing; see the head of the file."""


def _get_extra_te_kwargs(config: TransformerConfig) -> dict[str, Any]:
    """Return what a module of the package needs besides sizes."""
    return {"params_dtype": config.params_dtype, "device": device.current()}


class Fp8Padding(nn.Module):
    """Appends zero rows to those of each expert, so that their number suits fp8 kernels."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.align_size = align_size or 16

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return the padded rows [m', h] and their numbers."""
        more = [-count % self.align_size for count in m_splits]
        parts = zip(inp.split([*m_splits]), more, strict=True)
        padded = torch.cat([F.pad(rows, (0, 0, 0, extra)) for rows, extra in parts])
        return padded, [count + extra for count, extra in zip(m_splits, more, strict=True)]


class Fp8Unpadding(Fp8Padding):
    """Undoes `Fp8Padding`."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:  # type: ignore[override]
        """Return the rows without padding; ``m_splits`` are their numbers."""
        wide = [count + -count % self.align_size for count in m_splits]
        return torch.cat([x[:n] for x, n in zip(inp.split(wide), m_splits, strict=True)])


def fused_apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    transpose_output_memory: bool = False,
    interleaved: bool = False,
    start_positions: Tensor | None = None,
) -> Tensor:
    """Rotate [s, b, n, d] by the angles of channels [s, 1, 1, r]."""
    if start_positions is not None:
        raise ConfigError("start_positions: pass the angles of each sequence")
    pairs = freqs[..., ::2] if interleaved else freqs[..., : freqs.shape[-1] // 2]
    pairs = pairs[: len(t)]
    return apply_rotary(t, RotaryTable(pairs.cos().to(t), pairs.sin().to(t), interleaved))


def fused_apply_rotary_pos_emb_thd(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0
) -> Tensor:
    """Rotate the tokens [t, n, d] of packed sequences by the angles of positions [s, 1, 1, r]."""
    lengths = tuple(cu_seqlens.diff().tolist())
    held = held_tokens(lengths, cp_rank, cp_size, t.device)
    places = position_in_sequence(cu_seqlens, sum(lengths))[held]
    return fused_apply_rotary_pos_emb(t.unsqueeze(1), freqs[places]).squeeze(1)


# ---- CUDA graphs ---------------------------------------------------------------------------


class CudaGraphManager:
    """Captures a layer.  Raises ConfigError: blocks capture their layers themselves."""

    def __init__(self, *args: object, **kwargs: object) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__}: the blocks of this program capture their layers themselves; "
            "set enable_cuda_graph in the config"
        )


class TECudaGraphHelper(CudaGraphManager):
    """Captures the layers of a model; see `CudaGraphManager`."""
