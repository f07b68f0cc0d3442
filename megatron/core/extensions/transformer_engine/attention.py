"""Attention core that uses Transformer Engine for the calls that it supports."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.enums import AttnBackend, AttnMaskType
from megatron.core.extensions.transformer_engine import engine
from megatron.core.packed_seq_params import AttentionMask, PackedSeqParams
from megatron.core.tensor_parallel.random import fork_if
from megatron.core.transformer.context_parallel import ContextParallelComm
from megatron.core.transformer.dot_product_attention import CAUSAL, DotProductAttention

# Environment variables, read by the package in each call, that allow its three kinds of kernels.
_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_SWITCHES = {AttnBackend.flash: "100", AttnBackend.fused: "010"}
_BACKENDS = (AttnBackend.auto, *_SWITCHES)


class TEDotProductAttention(DotProductAttention):
    """`DotProductAttention` that runs in Transformer Engine if no mask but the causal one is given.

    The package does the context-parallel communication itself.  The base class computes everything
    that it does not support: masks, biases, soft caps, query-key layer scaling, unfused attention,
    and windows or sinks with context parallelism.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        # Created in the first call; in a list, so that it is not a registered submodule.
        self._module: list[nn.Module] = []
        backend = self.config.attention_backend
        has_many_ranks = self.cp_comm is not None
        trading = None if self.cp_comm is None else self.cp_comm.heads
        self._ranks_of_heads = 1 if trading is None else trading.size()
        self._may_compute = (
            backend in _BACKENDS
            and engine.unsupported_reason() is None
            and self.softcap is None
            and self.depth_scale == 1
            and not (has_many_ranks and (self.window or self.config.softmax_type != "vanilla"))
        )
        self.takes_narrow_values = not self._may_compute
        if self._may_compute and backend in _SWITCHES:
            _choose_kernels(backend)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionMask | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """See `DotProductAttention.forward`."""
        is_causal = (attn_mask_type or self.attn_mask_type) in CAUSAL
        fits = (
            self._may_compute
            and query.dim() == 4
            and attention_mask is None
            and attention_bias is None
            and query.dtype in engine.DTYPES
            and (len(query) == len(key) or not is_causal)  # causal: no KV cache
            and key.shape[2] % self._ranks_of_heads == 0
        )
        if not fits:
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
        kind = "causal" if is_causal else "no_mask"
        more: dict[str, object] = {}
        if packed_seq_params is not None:
            query, key, value = (x.squeeze(1) for x in (query, key, value))  # [t, n, d]
            kind = "padding_causal" if is_causal else "padding"
            names = ["cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"]
            names += ["max_seqlen_q", "max_seqlen_kv"]
            more = {"qkv_format": "thd", **{n: getattr(packed_seq_params, n) for n in names}}
        if self.window is not None:
            more["window_size"] = (self.window[0], 0) if is_causal else self.window
        module = self._module_for(query, key)
        with fork_if(self._dropout() > 0):
            out: Tensor = module(query, key, value, attn_mask_type=kind, **more)
        return out if packed_seq_params is None else out.unsqueeze(1)

    def _module_for(self, query: Tensor, key: Tensor) -> nn.Module:
        """Return the package's module for this rank's heads, in training or evaluation mode."""
        if not self._module:
            softmax = self.config.softmax_type
            more = {} if softmax == "vanilla" else {"softmax_type": softmax}
            module = engine.package().DotProductAttention(
                num_attention_heads=query.shape[-2],
                kv_channels=query.shape[-1],
                num_gqa_groups=key.shape[-2],
                attention_dropout=self.dropout,
                softmax_scale=self.softmax_scale,
                attention_type=self.attention_type,
                layer_number=1,  # only query-key layer scaling, not used here, would read it
                **more,
                **({} if self.cp_comm is None else _comm_arguments(self.cp_comm)),
            )
            self._module.append(module)
        (module,) = self._module
        if self.softmax_offset is not None:
            module._parameters["softmax_offset"] = self.softmax_offset
        return module.train(self.training)


def _comm_arguments(comm: ContextParallelComm) -> dict[str, object]:
    """Return the package's arguments for context-parallel communication."""
    heads = comm.heads
    ring = comm.ring
    group: object = comm.cp
    kind = "p2p" if ring is not None else "all_gather"
    if heads is not None:
        kind = "a2a"
        if ring is not None:
            kind = "a2a+p2p"
            group = [heads, ring]
    return {
        "cp_group": group,
        "cp_global_ranks": dist.get_process_group_ranks(comm.cp),
        "cp_stream": _second_stream(device.current()),
        "cp_comm_type": kind,
    }


@cache
def _second_stream(where: torch.device) -> device.Stream | None:
    """Return the stream on which the package computes every other step of a ring.

    All layers share it: torch's allocator reuses memory on the stream that it was allocated for,
    so each further stream would hold the buffers of a layer for itself.
    """
    del where  # a process may choose its device after a CPU run
    return device.side_stream()


def _choose_kernels(backend: AttnBackend) -> None:
    """Set the package's environment variables for --attention-backend.

    Raises ConfigError if one of them is set to another value already.
    """
    for name, value in zip(_VARIABLES, _SWITCHES[backend], strict=True):
        if os.environ.setdefault(name, value) != value:
            raise ConfigError(
                f"--attention-backend {backend.name} and {name}={os.environ[name]} in the "
                f"environment contradict each other: unset it, or use --attention-backend auto"
            )
