"""Megatron Core's functions around transformer layers: predicted tokens, Transformer Engine.

Without effect: `set_save_original_input`, since our layers save what backward needs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from megatron.core.parallel.default_groups import default_groups
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.layer_layout import is_last_stage
from megatron.core.transformer.transformer_config import TransformerConfig

HAVE_TE = unsupported_reason() is None
HAVE_FA3 = False  # generation has kernels of its own
TEFusedMLP = None  # as without the package
te_general_gemm = None


# ---- multi-token prediction ----------------------------------------------------------------


def get_mtp_layer_offset(config: TransformerConfig) -> int:
    """Return the number of depths before the last stage, which has all of them."""
    return 0


def get_mtp_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None) -> int:
    """Return the number of depths of multi-token prediction on this stage."""
    return (config.mtp_num_layers or 0) * is_last_stage(config, default_groups().pp, vp_stage)


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
    names = [*kwargs]
    values = (*args, *kwargs.values())

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
