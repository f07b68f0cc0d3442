"""Memory of an engine: how many pages of the KV cache fit, and their allocation on all ranks."""

from __future__ import annotations

import numpy as np
import torch

from megatron.core import device
from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.device import cpu_kernels
from megatron.core.inference.paged_engine.cache import PagedCache
from megatron.core.inference.paged_engine.control import ControlChannel
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.runner import GenerationModel, ModelRunner
from megatron.core.inference.paged_engine.step_plan import Admission, Integers, Segment, StepPlan

_BUFFER = "--inference-dynamic-batching-buffer-size-gb"
_PAGES_WITHOUT_ATTENTION = 2**20  # of a model whose layers are all recurrent
_DTYPES = {"auto": None, "bf16": torch.bfloat16, "int8": torch.int8}


def cache_dtype(options: EngineOptions, model: GenerationModel) -> torch.dtype | None:
    """Return the dtype of keys and values in pages; None: that of the model.

    Raises ConfigError on a GPU, whose kernels read the dtype of the model only, and
    MissingDependency if the compiled kernels that batch invariance needs cannot read the dtype.
    """
    flag = f"--inference-kv-cache-dtype {options.kv_cache}"
    dtype = _DTYPES[options.kv_cache]
    if dtype is None:
        return None
    if device.is_cuda(model.device):
        raise ConfigError(
            f"{flag} runs on a CPU only: use auto; a model in bf16 has keys and values of 16 bits"
        )
    if options.batch_invariant and not cpu_kernels.has("paged_attention", dtype):
        raise MissingDependency(
            f"{flag} with --inference-batch-invariant needs compiled kernels of this version: "
            "python setup.py build_ext --inplace"
        )
    return dtype


def num_fitting_pages(runner: ModelRunner, buffer_bytes: int, channel: ControlChannel) -> int:
    """Return how many pages fit into every rank's buffer.

    An idle step of ``runner``, whose cache has one page, shows what the layers store.  Collective
    over all ranks.  Raises ConfigError if no page fits.
    """
    runner.execute(idle_plan(runner.model, 1, 1))
    cost = runner.cache.bytes_per_page
    fitting = buffer_bytes // cost if cost else _PAGES_WITHOUT_ATTENTION
    found = torch.tensor([fitting])
    channel.all_reduce_min(found)
    num_pages = int(found)
    if num_pages == 0:
        raise ConfigError(
            f"{_BUFFER} {buffer_bytes / 2**30:g}: the KV cache holds no page of "
            f"{runner.cache.page_size} tokens, which takes {cost} bytes; give more"
        )
    return num_pages


def allocate(
    runner: ModelRunner, like: PagedCache, buffer_bytes: int, channel: ControlChannel
) -> bool:
    """Allocate the cache for the layers of ``like``; return if there are recurrent layers.

    Collective over all ranks.  Raises ConfigError on all if one has too little memory.
    """
    cache = runner.cache
    world = runner.model.groups.world
    lacking = world.size()
    try:
        cache.allocate(like)
    except (RuntimeError, MemoryError):  # of torch: it only allocates
        lacking = world.rank()
        cache.clear()
    found = torch.tensor([lacking, not like.states])
    channel.all_reduce_min(found)
    lacking, is_stateless = found.tolist()
    if lacking < world.size():
        size = cache.num_pages * like.bytes_per_page
        raise ConfigError(
            f"{_BUFFER} {buffer_bytes / 2**30:g}: rank {lacking} has too little memory for "
            f"the KV cache of {cache.num_pages} pages of {cache.page_size} tokens, "
            f"{size / 2**30:.3g} GB on this rank; lower it"
        )
    return not is_stateless


def idle_plan(model: GenerationModel, num_pages: int, slots: int) -> StepPlan:
    """Return a step of one row in the cache's extra page and slot, without output."""

    def ints(*values: int) -> Integers:
        return np.array(values, dtype=np.int64)

    segment = Segment(slots, 0, ints(0), ints(num_pages), ints())
    source = (0,) if model.decoder_start is not None else ()
    return StepPlan((segment,), (Admission(slots, {}, source=source),))
