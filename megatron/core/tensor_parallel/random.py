"""Named random number streams, and activation recomputation that replays them.

Dropout on activations that all tensor-parallel ranks hold in full samples from the default stream,
which is the same on all of them; dropout on sharded activations samples from the model-parallel
stream, which differs.  A stream is a saved state of the device's default generator, which `fork`
swaps in for the duration of a ``with`` block.

Context-parallel ranks hold different tokens and must not sample the same masks: their
model-parallel streams differ, and hidden states use a context-parallel stream, which is the same on
the tensor-parallel ranks of one context-parallel rank.  The default stream is the same on all.

Recomputation must sample the same values as the first forward pass.  It saves all states before
that pass, restores them for the recomputation, and then continues with the present states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.parallel import parallel_state
from megatron.core.rank_local import each_rank_owns
from megatron.core.tensor_parallel.mappings import all_gather_first_dim

MODEL_PARALLEL_STREAM = "model-parallel-rng"
DATA_PARALLEL_STREAM = "data-parallel-rng"
EXPERT_PARALLEL_STREAM = "expert-parallel-rng"
CONTEXT_PARALLEL_STREAM = "context-parallel-rng"  # only where sequences are divided
# Offsets between the seeds of the streams: fixed, since resumed runs continue the streams.
_TENSOR_OFFSET = 2718
_EXPERT_OFFSET = 1024
_CONTEXT_OFFSET = 100_000


class RNGStatesTracker:
    """Named streams of random numbers on this process's device."""

    def __init__(self) -> None:
        self._streams: dict[str, device.RandomStream] = {}
        self._seeds: dict[str, int] = {}
        self._capturable = False

    def reset(self, *, capturable: bool = False) -> None:
        """Forget all streams; those to come may be drawn from in a `device.Graph`, or not."""
        self._streams, self._seeds, self._capturable = {}, {}, capturable

    def is_initialized(self) -> bool:
        """Whether there is any stream."""
        return bool(self._streams)

    def has(self, name: str) -> bool:
        """Whether there is a stream ``name``."""
        return name in self._streams

    def streams(self) -> list[device.RandomStream]:
        """All of them."""
        return list(self._streams.values())

    def get_states(self) -> dict[str, Tensor]:
        """A copy of every stream's state, for a checkpoint."""
        return {name: stream.get_state() for name, stream in self._streams.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Continue the streams of a checkpoint."""
        before, self._streams = self._streams, {}
        for name, state in states.items():
            if name in before:  # captured CUDA graphs refer to this object: set its state in place
                before[name].set_state(state)
                self._streams[name] = before[name]
            else:
                self._streams[name] = device.RandomStream(state, capturable=self._capturable)

    def add(self, name: str, seed: int) -> None:
        """Begin stream ``name``.  Two streams never share a seed."""
        assert seed not in self._seeds.values(), f"seed {seed} is taken by another stream"
        assert name not in self._streams, f"stream {name} exists"
        before = device.rng_state()
        device.manual_seed(seed)
        stream = device.RandomStream(device.rng_state(), capturable=self._capturable)
        self._streams[name], self._seeds[name] = stream, seed
        device.set_rng_state(before)

    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> contextlib.AbstractContextManager[None]:
        """Draw from stream ``name`` inside the block."""
        assert name in self._streams, f"no stream {name}: model_parallel_seed comes first"
        return self._streams[name].drawing()


CudaRNGStatesTracker = RNGStatesTracker  # the name that scripts know
_tracker = RNGStatesTracker()
each_rank_owns(__name__, "_tracker")


def get_rng_tracker() -> RNGStatesTracker:
    """The streams of this process."""
    return _tracker


get_cuda_rng_tracker = get_rng_tracker


def model_parallel_seed(
    seed: int,
    *,
    tp_rank: int,
    cp_rank: int | None = None,
    ep_rank: int = 0,
    expert_tp_rank: int = 0,
    capturable: bool = False,
) -> None:
    """Seed the default stream with ``seed``, and the named streams with this rank's own seeds.

    ``cp_rank`` is None without context parallelism; ``capturable``: CUDA graphs may use the
    streams.
    """
    _tracker.reset(capturable=capturable)
    device.manual_seed(seed)
    _tracker.add(DATA_PARALLEL_STREAM, seed)
    context = 0 if cp_rank is None else _CONTEXT_OFFSET * (cp_rank + 1)
    _tracker.add(MODEL_PARALLEL_STREAM, seed + _TENSOR_OFFSET + tp_rank + context)
    if cp_rank is not None:
        _tracker.add(CONTEXT_PARALLEL_STREAM, seed + context)
    _tracker.add(EXPERT_PARALLEL_STREAM, seed + _EXPERT_OFFSET + 100 * ep_rank + expert_tp_rank)


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> None:
    """`model_parallel_seed` for scripts."""
    groups = parallel_state.current()
    model_parallel_seed(
        seed,
        tp_rank=groups.tp.rank(),
        cp_rank=groups.cp.rank() if groups.cp.size() > 1 else None,
        ep_rank=groups.ep.rank(),
        expert_tp_rank=groups.expt_tp.rank(),
        capturable=te_rng_tracker or inference_rng_tracker or use_cudagraphable_rng,
    )


def fork_if(
    condition: bool, name: str = MODEL_PARALLEL_STREAM
) -> contextlib.AbstractContextManager[None]:
    """`RNGStatesTracker.fork` where ``condition`` holds and the stream exists."""
    if condition and _tracker.has(name):
        return _tracker.fork(name)
    return contextlib.nullcontext()


def fork_for_tokens(
    condition: bool, *, is_sequence_cut: bool
) -> contextlib.AbstractContextManager[None]:
    """If ``condition``, use the stream for hidden states, unique among ranks with other tokens.

    ``is_sequence_cut``: sequence parallelism, so tensor-parallel ranks hold different tokens.
    """
    return fork_if(condition, MODEL_PARALLEL_STREAM if is_sequence_cut else CONTEXT_PARALLEL_STREAM)


# -- recomputation --------------------------------------------------------------------------

_States = tuple[Tensor, Tensor, dict[str, Tensor]]


def _all_rng_states() -> _States:
    return torch.get_rng_state(), device.rng_state(), _tracker.get_states()


def _set_all_rng_states(states: _States) -> None:
    torch.set_rng_state(states[0])
    device.set_rng_state(states[1])
    _tracker.set_states(states[2])


@contextlib.contextmanager
def _replayed(states: _States) -> Iterator[None]:
    """Restore ``states`` inside the block, and the present states after it."""
    now = _all_rng_states()
    _set_all_rng_states(states)
    try:
        yield
    finally:
        _set_all_rng_states(now)


class _Checkpoint(torch.autograd.Function):
    """Forward without saving activations; recompute them in backward."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], group: ProcessGroup | None, *args: Any
    ) -> Any:
        ctx.group = group
        tensors = [a for a in args if torch.is_tensor(a)]
        if group is not None:
            ctx.first_shape = tensors[0].shape
            tensors[0] = _own_part(tensors[0], group)
        _keep(ctx, function, args, tensors)
        with torch.no_grad():
            outputs = function(*args)
        # A returned parameter (a bias added later) would become a non-leaf output: detach it.
        if isinstance(outputs, tuple):
            return tuple(o.detach() if isinstance(o, nn.Parameter) else o for o in outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        tensors = list(ctx.saved_tensors)
        if ctx.group is not None:
            tensors[0] = all_gather_first_dim(tensors[0], ctx.group).view(ctx.first_shape)
        outputs, args = _run_again(ctx, tensors)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if _takes_gradient(o)]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return None, None, *(a.grad if torch.is_tensor(a) else None for a in args)


def _keep(
    ctx: Any, function: Callable[..., Any], args: Sequence[Any], tensors: Sequence[Tensor]
) -> None:
    """Save what `_run_again` needs; ``tensors``: the tensors of ``args``, or shards of them."""
    ctx.function, ctx.states = function, _all_rng_states()
    ctx.other_args = [None if torch.is_tensor(a) else a for a in args]
    ctx.is_tensor = [torch.is_tensor(a) for a in args]
    ctx.save_for_backward(*tensors)


def _run_again(ctx: Any, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], list[Any]]:
    """Recompute; return the outputs with a graph, and the arguments that receive gradients."""
    needs = ctx.needs_input_grad[2:]
    rest = iter(tensors)
    args = [
        next(rest).detach().requires_grad_(needs[i]) if is_tensor else ctx.other_args[i]
        for i, is_tensor in enumerate(ctx.is_tensor)
    ]
    with torch.enable_grad(), _replayed(ctx.states):
        outputs = ctx.function(*args)
    return outputs if isinstance(outputs, tuple) else (outputs,), args


def _takes_gradient(output: Any) -> bool:
    return torch.is_tensor(output) and output.requires_grad


def _with_gradient(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with at least one that requires a gradient.

    Otherwise autograd would not call backward, and the parameters inside would get no gradients.
    """
    if not torch.is_grad_enabled() or any(_takes_gradient(a) for a in args):
        return args
    first = next(i for i, a in enumerate(args) if torch.is_tensor(a) and a.is_floating_point())
    return (*args[:first], args[first].detach().requires_grad_(), *args[first + 1 :])


def _own_part(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return a copy of this rank's share of ``x``, so that ``x`` itself can be freed."""
    assert x.numel() % group.size() == 0, f"{x.numel()} elements for {group.size()} ranks"
    return x.contiguous().view(group.size(), -1)[group.rank()].clone()


def checkpoint(
    function: Callable[..., Any],
    distribute_saved_activations: bool,
    *args: Any,
    tp_group: ProcessGroup | None = None,
) -> Any:
    """``function(*args)``, computed again in backward instead of keeping its activations.

    Random streams are replayed.  With ``distribute_saved_activations`` each rank of ``tp_group``
    keeps its share of the first tensor only; backward is then collective over the group.
    """
    assert not distribute_saved_activations or tp_group is not None, "which group shares it?"
    group = tp_group if distribute_saved_activations else None
    if group is not None and group.size() == 1:
        group = None
    return _Checkpoint.apply(function, group, *_with_gradient(args))


class CheckpointWithoutOutput:
    """Compute ``y = function(x)``, free ``y`` after its last use, recompute it for backward.

    Use: ``y = c.checkpoint(function, x)``; ``z = next_op(y)``;
    ``c.discard_output_and_register_recompute(z)``.  Lifetime: the storage of ``y`` is resized to
    zero after forward and refilled by a hook on the gradient of ``z``, which runs before the
    backward of ``next_op`` reads what it saved.  The tensor object stays the same throughout.
    """

    def __init__(self) -> None:
        self._context: Any = None
        self._outputs: tuple[Tensor, ...] = ()

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function`` without keeping its activations."""
        result = _CheckpointWithoutOutput.apply(function, self, *_with_gradient(args))
        self._outputs = result if isinstance(result, tuple) else (result,)
        return result

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the output now; fill it again when the gradient of ``hook_tensor`` arrives."""
        if not hook_tensor.requires_grad:
            return
        for output in self._outputs:
            output.untyped_storage().resize_(0)
        hook_tensor.register_hook(self._recompute)

    def _recompute(self, _grad: Tensor) -> None:
        context = self._context
        again, args = _run_again(context, context.saved_tensors)
        for old, new in zip(self._outputs, again, strict=True):
            size = new.untyped_storage().nbytes()
            with torch.no_grad():
                old.untyped_storage().resize_(size)
                old.untyped_storage().copy_(new.untyped_storage())
        context.again, context.args = again, args
        self._outputs, self._context = (), None


class _CheckpointWithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], owner: CheckpointWithoutOutput, *args: Any
    ) -> Any:
        _keep(ctx, function, args, [a for a in args if torch.is_tensor(a)])
        owner._context = ctx
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        torch.autograd.backward(ctx.again, grads)
        found = tuple(a.grad if torch.is_tensor(a) else None for a in ctx.args)
        ctx.again = ctx.args = None
        return None, None, *found
