"""Selection of the attention implementation, with the reason why each of the others cannot run.

``flash``, ``fused`` (cuDNN) and ``efficient`` are kernels of torch's scaled_dot_product_attention;
``blocks`` is causal attention in blocks of queries, for training on a CPU; ``plain`` is the formula
in torch operations, which supports every request.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch.backends import cuda

from megatron.core import device
from megatron.core.enums import AttnBackend
from megatron.core.transformer import attention_blocks

# Of each of torch's implementations: whether it is enabled, and the function that sets it.
_SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "fused": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "plain": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
}
FLASH = "flash"
FUSED = "fused"
BLOCKS = "blocks"
PLAIN = "plain"
NAMES = (BLOCKS, *_SWITCHES)
_BLOCK_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_FEW_TOKENS = 128
_HOPPER = (9, 0)
NARROW_WIDTHS = (192, 128)  # of keys and values; cuDNN documents these kernels for Hopper
_CANDIDATES = {
    AttnBackend.auto: NAMES,
    AttnBackend.flash: (FLASH,),
    AttnBackend.fused: (FUSED, "efficient"),
    AttnBackend.unfused: (PLAIN,),
    AttnBackend.local: (PLAIN,),
}


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """The properties of an attention call that decide which implementations support it."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int = 0  # of values narrower than keys; 0: as wide as keys
    is_cuda: bool = field(default_factory=device.is_cuda)  # this process's device
    has_mask: bool = False  # a mask that neither causality nor a band describes
    # A sliding window, packed sequences, or fewer causal queries than keys: arguments of a GPU's
    # flash kernel, a mask for the other implementations.
    has_band: bool = False
    has_bias: bool = False
    has_dropout: bool = False
    has_softcap: bool = False
    causal_tokens: int = 0  # sequence length of causal training; 0 for any other call
    # Ring attention or attention with a sink: only ``plain`` supports a mask or bias then.
    by_blocks: bool = False
    is_deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    # Of the GPU; (0, 0) on a CPU, and for a simulated GPU, which is assumed to be a Hopper.
    capability: tuple[int, int] = field(default_factory=lambda: device.capability(device.current()))

    @property
    def needs_mask(self) -> bool:
        """Whether an implementation that knows only the causal mask needs another one."""
        return self.has_mask or self.has_band


@lru_cache
def refusal(name: str, request: AttentionRequest) -> str | None:
    """Return why implementation ``name`` does not support ``request``; None if it does."""
    if name == PLAIN:
        return None
    if request.has_softcap:
        return "it does not support soft-capped scores"
    if name == BLOCKS:
        return _refusal_of_blocks(request)
    if request.by_blocks and (why := _refusal_by_blocks(name, request)):
        return why
    if not request.is_cuda:
        if name != FLASH:
            return "it needs a GPU"
        return "it does not support dropout on the CPU" if request.has_dropout else None
    if name in (FLASH, FUSED):
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"it has no kernel for {str(request.dtype).removeprefix('torch.')}"
        if request.value_dim and name == FUSED:
            return _refusal_of_narrow_values(request)
        if request.head_dim > (256 if name == FLASH else 128):
            return f"it does not support head dimension {request.head_dim}"
        if request.by_blocks and name == FUSED:
            return attention_blocks.cudnn_failure(request.head_dim, request.head_dim, request.dtype)
    if name == FLASH and (request.has_mask or request.has_bias):
        return "it supports only causal masks, windows and packed sequences, without bias"
    if name == FLASH and request.has_band:
        if request.has_dropout:
            return "it does not support dropout with windows or packed sequences"
        if request.head_dim % 8:  # otherwise torch pads the heads
            return f"the head dimension {request.head_dim} is not a multiple of 8"
    return None


def _refusal_of_narrow_values(request: AttentionRequest) -> str | None:
    has_more = request.needs_mask or request.has_bias or request.has_dropout
    if has_more or not request.causal_tokens:
        return "with values narrower than keys it is used only for causal attention in training"
    if request.is_deterministic:
        return "its backward pass is not deterministic"
    widths = request.head_dim, request.value_dim
    is_simulated = request.capability == (0, 0)
    if widths != NARROW_WIDTHS or (request.capability < _HOPPER and not is_simulated):
        return f"it takes narrower values from Hopper on, in the widths {NARROW_WIDTHS}"
    return None if is_simulated else attention_blocks.cudnn_failure(*widths, request.dtype)


def _refusal_by_blocks(name: str, request: AttentionRequest) -> str | None:
    if name == "efficient" and request.is_cuda:
        return "ring attention and attention with a sink do not use it"
    if name == FUSED and (request.has_dropout or request.is_deterministic):
        return "in rings it supports neither dropout nor deterministic gradients"
    takes_bands = name == FLASH and request.is_cuda
    if request.has_mask or request.has_bias or (request.has_band and not takes_bands):
        return "in ring attention or with a sink it supports only the causal mask"
    if request.is_cuda and request.head_dim % 8:
        return f"the head dimension {request.head_dim} is not a multiple of 8"
    if name == FUSED and request.is_cuda and request.capability < _HOPPER:
        return "rings use it on GPUs from Hopper on, where it is faster than flash attention"
    return None


def _refusal_of_blocks(request: AttentionRequest) -> str | None:
    if request.is_cuda:
        return "it runs on CPUs only"
    if request.dtype not in _BLOCK_DTYPES:
        return f"it has no fast matmul for {str(request.dtype).removeprefix('torch.')}"
    if request.needs_mask or request.has_bias or not request.causal_tokens:
        return "it supports only causal attention in training"
    if request.dtype != torch.bfloat16 and request.causal_tokens < _FEW_TOKENS:
        return f"a kernel is faster for {request.causal_tokens} tokens"
    # Up to this length its saved probabilities are below half of a layer's other activations.
    if request.causal_tokens > 16 * request.head_dim:
        return f"it would save the probabilities of {request.causal_tokens} tokens"
    return None


@lru_cache
def choose(wanted: AttnBackend, request: AttentionRequest) -> tuple[str, ...]:
    """Return the implementations to use: one or more kernels (torch selects), or one of the others.

    If ``wanted`` allows none that supports the request, they are those of ``auto``: the choice is
    about speed, so `fallback_warning` reports it and the run goes on.  For values narrower than
    keys the choice is ``fused``, or else one that takes padded values.
    """
    if request.value_dim:
        takes_narrow = FUSED in _CANDIDATES[wanted] and refusal(FUSED, request) is None
        return (FUSED,) if takes_narrow else choose(wanted, replace(request, value_dim=0))
    able = tuple(name for name in _CANDIDATES[wanted] if refusal(name, request) is None)
    if not able:
        return choose(AttnBackend.auto, request)
    if BLOCKS in able:
        return (BLOCKS,)
    if FLASH in able and request.is_cuda and request.has_band:
        return (FLASH,)  # the others compute all scores, and need the mask in memory
    kernels = tuple(name for name in able if name != PLAIN)
    return kernels or (PLAIN,)


@lru_cache
def choose_for(wanted: AttnBackend, where: torch.device, **properties: Any) -> tuple[str, ...]:
    """Call `choose` with a request of these properties, which takes 3 us to make.

    ``where``: the device of this process, whose capability is part of a request.
    """
    del where
    return choose(wanted, AttentionRequest(**properties))


class OnlyKernels(AbstractContextManager[None]):
    """A context in which torch's attention on a GPU uses only ``names``, kernels of `choose`.

    As torch's `sdpa_kernel`, which takes 7 times as long on the host, in every layer.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._wrong = [
            (switch, name in names)
            for name, (is_on, switch) in _SWITCHES.items()
            if is_on() is not (name in names)
        ]

    def __enter__(self) -> None:
        for switch, is_wanted in self._wrong:
            switch(is_wanted)

    def __exit__(self, *_: object) -> None:
        for switch, is_wanted in self._wrong:
            switch(not is_wanted)


def fallback_warning(wanted: AttnBackend, request: AttentionRequest) -> str | None:
    """Return a warning if no implementation that ``wanted`` allows supports the request."""
    reasons = {name: refusal(name, request) for name in _CANDIDATES[wanted]}
    if None in reasons.values():
        return None
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    used = ", ".join(choose(wanted, request))
    return f"--attention-backend {wanted.name} is without effect ({why}): {used} is used instead"


def attention_report(wanted: AttnBackend, request: AttentionRequest) -> dict[str, str]:
    """Return "chosen" for each implementation that runs, and why each of the others does not."""
    chosen = choose(wanted, request)
    report = {}
    for name in NAMES:
        if name in chosen:
            report[name] = "chosen"
        elif name in _CANDIDATES[wanted]:
            report[name] = refusal(name, request) or "a faster implementation is used"
        else:
            excluded = f"--attention-backend {wanted.name} excludes it"
            report[name] = refusal(name, request) or excluded
    return report
