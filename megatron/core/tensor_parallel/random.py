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
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.parallel.default_groups import default_groups, library_call
from megatron.core.rank_local import each_rank_owns
from megatron.core.tensor_parallel.mappings import all_gather_first_dim

R = TypeVar("R")
MODEL_PARALLEL_STREAM = "model-parallel-rng"
DATA_PARALLEL_STREAM = "data-parallel-rng"
EXPERT_PARALLEL_STREAM = "expert-parallel-rng"
CONTEXT_PARALLEL_STREAM = "context-parallel-rng"  # exists with context parallelism only
# Offsets between the seeds of the streams: fixed, since resumed runs continue the streams.
_TENSOR_OFFSET = 2718
_EXPERT_OFFSET = 1024
_CONTEXT_OFFSET = 100_000


class RNGStatesTracker:
    """Named random number streams on this process's device."""

    def __init__(self) -> None:
        self._streams: dict[str, device.RandomStream] = {}
        self._seeds: dict[str, int] = {}
        self._capturable = False

    def reset(self, *, capturable: bool = False) -> None:
        """Remove all streams.  ``capturable``: CUDA graphs may use streams added later."""
        self._streams = {}
        self._seeds = {}
        self._capturable = capturable

    def is_initialized(self) -> bool:
        """Return whether any stream exists."""
        return bool(self._streams)

    def has(self, name: str) -> bool:
        """Return whether stream ``name`` exists."""
        return name in self._streams

    def streams(self) -> list[device.RandomStream]:
        """Return all streams."""
        return list(self._streams.values())

    def get_states(self) -> dict[str, Tensor]:
        """Return a copy of every stream's state by name, for a checkpoint."""
        return {name: stream.get_state() for name, stream in self._streams.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Restore the streams of a checkpoint; streams that it does not have are removed."""
        before = self._streams
        self._streams = {}
        for name, state in states.items():
            if name in before:  # captured CUDA graphs refer to this object: set its state in place
                before[name].set_state(state)
                self._streams[name] = before[name]
            else:
                self._streams[name] = device.RandomStream(state, capturable=self._capturable)

    def add(self, name: str, seed: int) -> None:
        """Create stream ``name``.  Name and seed must not be in use by another stream."""
        assert seed not in self._seeds.values(), f"seed {seed} is taken by another stream"
        assert name not in self._streams, f"stream {name} exists"
        state = device.seeded_rng_state(seed)  # leaves the default generators as they are
        self._streams[name] = device.RandomStream(state, capturable=self._capturable)
        self._seeds[name] = seed

    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which random numbers come from stream ``name``."""
        assert name in self._streams, (
            f"no random stream {name} among {', '.join(self._streams) or 'none'}: call "
            "model_parallel_cuda_manual_seed first"
        )
        return self._streams[name].drawing()


CudaRNGStatesTracker = RNGStatesTracker  # Megatron-LM's name
_tracker = RNGStatesTracker()
each_rank_owns(__name__, "_tracker")


def get_rng_tracker() -> RNGStatesTracker:
    """Return the tracker of this rank's streams."""
    return _tracker


_TRACKERS = "use_te_rng_tracker inference_rng_tracker use_cudagraphable_rng"
get_cuda_rng_tracker = library_call(_TRACKERS, unused=_TRACKERS)(get_rng_tracker)


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
    device.manual_seed(seed)
    _tracker.reset(capturable=capturable)
    _tracker.add(DATA_PARALLEL_STREAM, seed)
    context = 0 if cp_rank is None else _CONTEXT_OFFSET * (cp_rank + 1)
    _tracker.add(MODEL_PARALLEL_STREAM, seed + _TENSOR_OFFSET + tp_rank + context)
    if cp_rank is not None:
        _tracker.add(CONTEXT_PARALLEL_STREAM, seed + context)
    _tracker.add(EXPERT_PARALLEL_STREAM, seed + _EXPERT_OFFSET + 100 * ep_rank + expert_tp_rank)


@library_call(
    "seed te_rng_tracker inference_rng_tracker use_cudagraphable_rng tp_rank ep_rank etp_rank "
    "force_reset_rng",
    unused="force_reset_rng",
)
def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
) -> None:
    """Seed all streams; Megatron-LM's call, by default with the ranks of `parallel_state`.

    The flags for random state trackers only make the streams usable in CUDA graphs.
    """
    groups = default_groups()
    model_parallel_seed(
        seed,
        tp_rank=groups.tp.rank() if tp_rank is None else tp_rank,
        cp_rank=groups.cp.rank() if groups.cp.size() > 1 else None,
        ep_rank=groups.ep.rank() if ep_rank is None else ep_rank,
        expert_tp_rank=groups.expt_tp.rank() if etp_rank is None else etp_rank,
        capturable=te_rng_tracker or inference_rng_tracker or use_cudagraphable_rng,
    )


def fork_if(
    condition: bool, name: str = MODEL_PARALLEL_STREAM
) -> contextlib.AbstractContextManager[None]:
    """Return `RNGStatesTracker.fork` if ``condition`` holds and the stream exists, else no-op."""
    if condition and _tracker.has(name):
        return _tracker.fork(name)
    return contextlib.nullcontext()


def fork_for_tokens(
    condition: bool, *, is_sequence_sharded: bool
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that, if ``condition``, uses the random stream for hidden states.

    The stream differs between ranks that hold different tokens and is the same on ranks that hold
    the same.  ``is_sequence_sharded``: tensor-parallel ranks hold different tokens.
    """
    return fork_if(
        condition, MODEL_PARALLEL_STREAM if is_sequence_sharded else CONTEXT_PARALLEL_STREAM
    )


# -- recomputation --------------------------------------------------------------------------


def get_all_rng_states() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return torch.get_rng_state(), device.rng_state(), _tracker.get_states()


def set_all_rng_states(of_host: Tensor, of_device: Tensor, streams: dict[str, Tensor]) -> None:
    torch.set_rng_state(of_host)
    device.set_rng_state(of_device)
    _tracker.set_states(streams)


_SAVED = object()  # placeholder of a tensor argument, which autograd saves


class _Call:
    """A function, its arguments that are not tensors, and the random states before it ran.

    ``group``: ranks over which the first tensor argument is saved in shards.
    """

    def __init__(
        self, function: Callable[..., object], group: ProcessGroup | None, args: Sequence[object]
    ) -> None:
        self.function = function
        self.group = group
        self._states = get_all_rng_states()
        self._args = [_SAVED if torch.is_tensor(arg) else arg for arg in args]
        self._shape = next(filter(torch.is_tensor, args)).shape

    def run_again(self, ctx: Context[_Call]) -> tuple[tuple[object, ...], list[object]]:
        """Recompute; return the outputs with a graph, and the arguments that receive gradients.

        The random states after it are those before it.
        """
        tensors = list(ctx.saved_tensors)
        if self.group is not None:
            tensors[0] = all_gather_first_dim(tensors[0], self.group).view(self._shape)
        rest = iter(tensors)
        args = [
            next(rest).detach().requires_grad_(needed) if arg is _SAVED else arg
            for arg, needed in zip(self._args, ctx.needs_input_grad[3:], strict=True)
        ]
        now = get_all_rng_states()
        set_all_rng_states(*self._states)
        try:
            with torch.enable_grad():
                outputs = self.function(*args)
        finally:
            set_all_rng_states(*now)
        return outputs if isinstance(outputs, tuple) else (outputs,), args


class _Recomputed(Function[R], Generic[R]):
    """Forward without saving activations; backward recomputes them.

    With an ``owner``, its hook has recomputed them before.
    """

    @staticmethod
    def forward(
        ctx: Context[_Call],
        function: Callable[..., object],
        group: ProcessGroup | None,
        owner: CheckpointWithoutOutput | None,
        *args: object,
    ) -> object:
        ctx.values = _Call(function, group, args)
        tensors = [arg for arg in args if torch.is_tensor(arg)]
        if group is not None:
            size = group.size()
            assert tensors[0].numel() % size == 0, f"{tensors[0].numel()} elements, {size} ranks"
            # A copy of this rank's shard, so that the tensor itself can be freed.
            tensors[0] = tensors[0].contiguous().view(size, -1)[group.rank()].clone()
        ctx.save_for_backward(*tensors)
        if owner is not None:
            owner.context = ctx
        with torch.no_grad():
            outputs = function(*args)
        # A returned parameter (a bias added later) would become a non-leaf output: detach it.
        if isinstance(outputs, tuple):
            return tuple(o.detach() if isinstance(o, nn.Parameter) else o for o in outputs)
        return outputs

    @staticmethod
    def backward(ctx: Context[Any], *grads: Tensor) -> tuple[Tensor | None, ...]:
        if isinstance(ctx.values, _Call):
            outputs, args = ctx.values.run_again(ctx)
        else:
            outputs, args = ctx.values
            ctx.values = None
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if _takes_gradient(o)]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return None, None, None, *(a.grad if torch.is_tensor(a) else None for a in args)


def _takes_gradient(x: object) -> TypeGuard[Tensor]:
    return torch.is_tensor(x) and x.requires_grad


def _with_gradient(args: tuple[object, ...]) -> tuple[object, ...]:
    """Return ``args`` with at least one that requires a gradient.

    Otherwise autograd would not call backward, and the parameters inside would get no gradients.
    """
    if not torch.is_grad_enabled() or any(_takes_gradient(a) for a in args):
        return args
    i, first = next(
        (i, a) for i, a in enumerate(args) if torch.is_tensor(a) and a.is_floating_point()
    )
    return (*args[:i], first.detach().requires_grad_(), *args[i + 1 :])


def checkpoint(
    function: Callable[..., R],
    distribute_saved_activations: bool,
    *args: object,
    tp_group: ProcessGroup | None = None,
) -> R:
    """Return ``function(*args)`` without saving its activations; backward recomputes them.

    The recomputation samples the same random numbers.  With ``distribute_saved_activations`` each
    rank of ``tp_group``, by default the installed group, saves only its shard of the first tensor
    argument, which must be the same on all ranks; backward is then collective over the group.
    """
    group = None
    if distribute_saved_activations:
        tp_group = default_groups().tp if tp_group is None else tp_group
        group = tp_group if tp_group.size() > 1 else None
    return _Recomputed.apply(function, group, None, *_with_gradient(args))


class CheckpointWithoutOutput:
    """Compute ``y = function(x)``, free ``y`` after its last use, recompute it for backward.

    Use: ``y = c.checkpoint(function, x)``; ``z = next_op(y)``;
    ``c.discard_output_and_register_recompute(z)``.  Lifetime: the storage of ``y`` is resized to
    zero after forward and refilled by a hook on the gradient of ``z``, which runs before the
    backward of ``next_op`` reads what it saved.  The tensor object stays the same throughout.
    """

    @library_call("fp8", unused="fp8")
    def __init__(self) -> None:
        self.context: Context[Any] | None = None
        self._outputs: list[Tensor] = []

    def checkpoint(self, run_function: Callable[..., R], *args: object) -> R:
        """Run ``run_function`` without saving its activations; return its result."""
        result: R = _Recomputed.apply(run_function, None, self, *_with_gradient(args))
        outputs = result if isinstance(result, tuple) else (result,)
        self._outputs = [o for o in outputs if isinstance(o, Tensor)]
        return result

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the output now; recompute it when the gradient of ``hook_tensor`` is computed."""
        if not hook_tensor.requires_grad:
            return
        self.discard_output()

        def recompute(_grad: Tensor) -> None:
            self.recompute()

        hook_tensor.register_hook(recompute)

    def discard_output(self) -> None:
        """Free the output now; the caller calls `recompute` before backward reads it."""
        for output in self._outputs:
            # An operation of torch: memory tracers see it.
            torch.ops.inductor.resize_storage_bytes_(output, 0)

    @torch.no_grad()
    def recompute(self) -> None:
        """Fill the output again."""
        context = self.context
        assert context is not None, "recomputed once"
        # The graph of the recomputation, which backward uses.
        outputs, _ = context.values = context.values.run_again(context)
        for old, new in zip(self._outputs, filter(torch.is_tensor, outputs), strict=True):
            torch.ops.inductor.resize_storage_bytes_(old, new.untyped_storage().nbytes())
            old.untyped_storage().copy_(new.untyped_storage())
        self._outputs = []
        self.context = None
