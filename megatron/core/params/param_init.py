"""Initial weights as a pure function of seed, global parameter name and global element index.

Element ``i`` of a parameter is lane ``i % 4`` of Philox-4x32-10 at counter ``i // 4``, with a key
that is a hash of seed and name.  The integers are the same on every device.  The normal variates
computed from them (in float64, then rounded to the parameter's dtype) are the same on one kind of
device, and differ by at most one unit in the last place between kinds.  A rank computes only its
own shard, and its values are those that one process computes for the same elements.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.parallel.default_groups import is_building_model
from megatron.core.params.param_info import ParamInfo, info_of, local_part, set_info
from megatron.core.rank_local import each_rank_owns

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Elements computed at a time: about 12 temporaries of 8 bytes per element stay in a CPU's cache.
_CHUNK_CPU = 1 << 15
_CHUNK_GPU = 1 << 24
_SEED_ATTRIBUTE = "_initialized_with_seed"
_num_unnamed = 0  # initializations of parameters or modules without names
each_rank_owns(__name__, "_num_unnamed")


@dataclass(unsafe_hash=True)
class Init:
    """Initialization of a parameter: kind and standard deviation.

    Calling the object fills a tensor from torch's own generator instead, for modules that receive
    an ``init_method`` and do not use parameter records.
    """

    kind: str = "normal"  # a call supports zeros, ones, normal and xavier_uniform
    std: float = 0.0
    is_derived: bool = field(default=False, compare=False)  # from other fields of a config

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.kind == "normal":
            return nn.init.normal_(tensor, std=self.std)
        if self.kind == "xavier_uniform":
            return nn.init.xavier_uniform_(tensor)
        return nn.init.constant_(tensor, {"zeros": 0.0, "ones": 1.0}[self.kind])


_ZEROS = Init("zeros")
InitMethod = Init | Callable[[Tensor], object]


def param_info_for(
    global_shape: tuple[int, ...],
    init: InitMethod = _ZEROS,
    *,
    over: ProcessGroup | None = None,
    dim: int = 0,
    **more: Any,
) -> ParamInfo:
    """Return the record of a parameter with initialization ``init``.

    ``over``: the group whose ranks shard it along ``dim``; ``more``: further fields of `ParamInfo`.
    """
    kind, std = (init.kind, init.std) if isinstance(init, Init) else (init, 0.0)
    if over is not None:
        more |= {"shard_dim": dim, "shard_index": over.rank(), "shard_count": over.size()}
    return ParamInfo(global_shape=global_shape, init=kind, init_std=std, **more)


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, info: ParamInfo) -> nn.Parameter:
    """Create a parameter on this process's device, with the record ``info``.

    Inside ``torch.device("meta")`` it is a meta tensor.  A parameter of a model has no values until
    `initialize_parameters` sets them.  Outside a model it has initial values of torch's seed, which
    depend on how many such parameters this rank has created before, not on the size of a group.
    """
    global _num_unnamed
    is_meta = torch.get_default_device().type == "meta"
    where = torch.device("meta") if is_meta else device.current()
    param = nn.Parameter(torch.empty(shape, dtype=dtype, device=where))
    set_info(param, info)
    if not param.is_meta and info.init != "own" and not is_building_model():
        _num_unnamed += 1
        named = replace(info, name=f"parameter {_num_unnamed}")
        fill_parameter(param, named, torch.initial_seed())
    return param


def initialize_parameters(model: nn.Module, seed: int | None, *, random: bool = True) -> None:
    """Initialize every parameter of ``model`` that has a record.

    ``seed`` None is torch's.  Does nothing if the model was already initialized with this seed.
    Unnamed parameters, of a module outside a model, get a number in the order of these calls.
    ``random=False`` writes only constant initial values.  Parameters without a record keep the
    values that their module has set; meta parameters are skipped.  Of a sharded model
    (`FullyShardedDataParallel`) each rank initializes its own parts.
    """
    global _num_unnamed
    seed = torch.initial_seed() if seed is None else seed
    # A subclass may add parameters after its base class has filled its own.
    filled = seed, len(list(model.parameters()))
    if model.__dict__.get(_SEED_ATTRIBUTE) == filled:
        return
    complete = True
    _num_unnamed += any(not info_of(param).name for param in model.parameters())
    for name, param in model.named_parameters():
        info = info_of(param)
        if not info.name and info.init != "own":
            info = replace(info, name=f"module {_num_unnamed}.{name}")
        if param.is_meta:
            complete = False
        elif info.init != "own" and (random or info.init in ("zeros", "ones")):
            fill_parameter(local_part(param), info, seed)
    if complete and random:
        model.__dict__[_SEED_ATTRIBUTE] = filled


@torch.no_grad()
def fill_parameter(param: Tensor, info: ParamInfo, seed: int) -> None:
    """Write the initial values of this rank's part of a parameter; padding is zero.

    Values are rounded to ``info.dtype`` if it is set.
    """
    pieces = list(info.pieces(param))
    if info.init in ("zeros", "ones") or sum(view.numel() for _, view in pieces) < param.numel():
        param.zero_()
    if info.init == "ones":
        for _, view in pieces:
            view.fill_(1.0)
    elif info.init != "zeros":
        assert info.name, "a randomly initialized parameter has no name: call name_parameters"
        key = _key(seed, info.name)
        if callable(info.init):
            complete = torch.empty(info.global_shape, dtype=param.dtype, device=param.device)
            with device.RandomStream(device.seeded_rng_state(key[0])).drawing():
                info.init(complete)
            for offset, view in pieces:
                box = zip(offset, view.shape, strict=True)
                view.copy_(complete[tuple(slice(at, at + size) for at, size in box)])
            return
        for offset, view in pieces:
            _fill_rows(*_rows(offset, view, info.global_shape), key, info)


def _rows(offset: tuple[int, ...], view: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Split a box of a tensor of ``shape`` into contiguous rows; return ([rows, width], starts).

    ``view``: the values of the box at ``offset``; ``starts``: the index of each row's first element
    in the flattened global tensor.
    """
    dim = next((d for d in reversed(range(view.dim())) if view.shape[d] != shape[d]), 0)
    starts = torch.zeros(1, dtype=torch.int64, device=view.device)
    for d, length in enumerate(shape):
        count = view.shape[d] if d < dim else 1
        places = offset[d] + torch.arange(count, dtype=torch.int64, device=view.device)
        starts = (starts[:, None] * length + places).view(-1)
    return view.view(math.prod(view.shape[:dim]), math.prod(view.shape[dim:])), starts


def _fill_rows(target: Tensor, starts: Tensor, key: tuple[int, int], info: ParamInfo) -> None:
    """Fill ``target`` [rows, width]; row r has the elements from global index ``starts[r]`` on."""
    chunk = _CHUNK_GPU if device.is_cuda(target.device) else _CHUNK_CPU
    num_rows, width = target.shape
    dtype = info.dtype or target.dtype
    rows_at_once = max(1, chunk // max(width, 1))
    for row in range(0, num_rows, rows_at_once):
        at = starts[row : row + rows_at_once]
        for column in range(0, width, chunk):
            part = target[row : row + rows_at_once, column : column + chunk]
            part.copy_(_draw(at + column, part.shape[1], key, info).to(dtype))


def _draw(starts: Tensor, width: int, key: tuple[int, int], info: ParamInfo) -> Tensor:
    """Return elements ``starts[r]``, ``starts[r] + 1``, ... as [rows, width] in float64."""
    aligned = width % 4 == 0 and not bool((starts % 4).any())
    counters_per_row = width // 4 + (0 if aligned else 2)
    counters = (starts // 4)[:, None] + torch.arange(counters_per_row, device=starts.device)
    values = _distribute(philox(counters.view(-1), key), info).view(len(starts), -1)
    if aligned:
        return values
    columns = (starts % 4)[:, None] + torch.arange(width, device=starts.device)
    return values.gather(1, columns)


def _distribute(words: tuple[Tensor, ...], info: ParamInfo) -> Tensor:
    """Convert four random words per counter to four float64 variates per counter, in lane order."""
    out = torch.empty(*words[0].shape, 4, dtype=torch.float64, device=words[0].device)
    scale = 2.0**-32
    if info.init != "normal":
        assert isinstance(info.init, str), "fill_parameter calls a function"
        assert info.init in _QUANTILES, f"unknown initialization {info.init!r}"
        for lane, word in enumerate(words):
            torch.mul(word.double().add_(0.5), scale, out=out[..., lane])
        return _QUANTILES[info.init](out, info)
    for lane in (0, 2):  # Box-Muller
        # word + 1/2 keeps the logarithm finite; the largest variate is 6.8 deviations
        radius = words[lane].double().add_(0.5).mul_(scale).log_().mul_(-2 * info.init_std**2)
        radius.sqrt_()
        angle = words[lane + 1].double().mul_(2 * math.pi * scale)
        torch.mul(radius, angle.cos(), out=out[..., lane])
        torch.mul(radius, angle.sin_(), out=out[..., lane + 1])
    return out


def _xavier(u: Tensor, info: ParamInfo) -> Tensor:
    fan_out = info.global_shape[0]
    fan_in = math.prod(info.global_shape[1:])
    bound = math.sqrt(6.0 / (fan_in + fan_out))
    return u.mul_(2 * bound).sub_(bound)


def _mamba_step(u: Tensor, info: ParamInfo) -> Tensor:
    step = u.mul_(math.log(100)).add_(math.log(0.001)).exp_()
    return step + torch.log(-torch.expm1(-step))


# Initialization kind -> function from uniform variates in (0, 1) to initial values.
_QUANTILES: dict[str, Callable[[Tensor, ParamInfo], Tensor]] = {
    "xavier_uniform": _xavier,
    # Between -init_std and init_std.
    "uniform": lambda u, info: u.mul_(2 * info.init_std).sub_(info.init_std),
    # A_log of a Mamba layer: the logarithm of a decay rate from 1 to 16.
    "mamba_decay": lambda u, _: u.mul_(15).add_(1).log_(),
    # dt_bias of a Mamba layer: its softplus is a step size between 0.001 and 0.1, uniform in its
    # logarithm.
    "mamba_step": _mamba_step,
}


def philox(counters: Tensor, key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit words of Philox-4x32-10 per counter, in int64 tensors.

    Multiplications wrap modulo 2^64, and words are masked at their next use: so the integers are
    the same on every device.
    """
    key0, key1 = key
    word0 = counters & _MASK
    word1 = counters >> 32
    word2 = word3 = torch.zeros_like(counters)
    for _ in range(_ROUNDS):
        product0 = word0 * _MULTIPLIERS[0]
        product1 = word2 * _MULTIPLIERS[1]
        word0 = (product1 >> 32).bitwise_xor_(word1).bitwise_xor_(key0).bitwise_and_(_MASK)
        word2 = (product0 >> 32).bitwise_xor_(word3).bitwise_xor_(key1).bitwise_and_(_MASK)
        word1 = product1
        word3 = product0
        key0 = (key0 + _KEY_STEPS[0]) & _MASK
        key1 = (key1 + _KEY_STEPS[1]) & _MASK
    return word0, word1.bitwise_and_(_MASK), word2, word3.bitwise_and_(_MASK)


def _key(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
