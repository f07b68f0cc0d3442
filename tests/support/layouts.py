"""Runs a layout and the one process it must agree with, and says where they differ.

A run is the application itself, from the command line on; the harness looks at the step from
outside.  In float64 every ``float32`` that the code names is float64 (`_in_float64`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.datasets.gpt_dataset import MockGPTDataset
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.params.param_info import ParamInfo, info_of, local_part
from megatron.core.transformer.moe import router
from megatron.training.step import train_step as steps
from tests.support import tolerances
from tests.support.graph_stand_in import graphs_on_cpu
from tests.support.ranks import run_ranks
from tests.support.runs import train_gpt
from tools.dev.lib.layout_axes import FEATURES, Case

TIMEOUT_S = 240  # for a machine with much else to do

# A global tensor with NaN where the rank does not hold it, by the parameter's global name.
Parts = list[tuple[str, Tensor]]


@dataclass
class Trace:
    """What one rank saw of a run."""

    # By name; that of the model is not there where the last stage is elsewhere.
    losses: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    norms: list[float] = field(default_factory=list)  # of the gradient
    params_norms: list[float] = field(default_factory=list)
    zeros: list[int] = field(default_factory=list)  # in the gradient
    gradients: Parts = field(default_factory=list)  # of the first step, before clipping
    weights: Parts = field(default_factory=list)  # after the last


def must_agree(case: Case) -> None:
    """One answer, to the tolerances.  Raises AssertionError."""
    wrong = disagreements(case)[-1]
    assert not wrong, "\n".join([*wrong, " ".join(case.command())])


def disagreements(case: Case) -> list[list[str]]:
    """Where the answer is not that of one process, of each attempt until there is no such place.

    What is further off in fp32 has to agree in fp64; a gradient that is in 16 bits, must be one
    that rounding explains (`beyond_rounding`).
    """
    wrongs = []
    for dtype, line in _attempts(case):
        wrongs.append(differences(case, dtype, line))
        if not wrongs[-1]:
            return wrongs
    if dtype_of(case) != torch.float32 and not {"codes", "state"} & _groups(case).keys():
        wrongs.append(beyond_rounding(case))
    return wrongs


def _attempts(case: Case) -> list[tuple[torch.dtype, dict[str, float]]]:
    """In which precision it is run, and what is allowed there."""
    groups, dtype = _groups(case), dtype_of(case)
    is_exact = "codes" not in groups or not (cuts_scales(case) or rounds_gradients_elsewhere(case))
    if dtype != torch.float32 or "state" in groups:  # whose bits are those of fp32
        return [(dtype, allowed(case))]
    exactly = torch.float64, tolerances.LAYOUT[torch.float64] if is_exact else allowed(case)
    return [exactly] if "codes" in groups else [(dtype, allowed(case)), exactly]


def allowed(case: Case) -> dict[str, float]:
    """Between layouts that may share other scales and other noise, in the parameters' precision."""
    groups, lines = _groups(case), [tolerances.LAYOUT[dtype_of(case)]]
    if "codes" in groups:
        lines.append(tolerances.LAYOUT_OF_FP8)
        if dtype_of(case) != torch.float32 or rounds_gradients_elsewhere(case):
            lines.append(tolerances.LAYOUT_OF_FP8_IN_16_BITS)
        if groups["codes"] == "nvfp4":
            lines.append(tolerances.LAYOUT_OF_NVFP4)
    if "capacity" in case.features and dtype_of(case) != torch.float32:
        lines.append(tolerances.LAYOUT_OF_CAPACITY_IN_16_BITS)
    line = {what: max(line[what] for line in lines) for what in lines[0]}
    if "state" in groups:
        # A moment that is rounded otherwise for the noise of codes is noise of its own (seed 601).
        combined, rounded = sum if "codes" in groups else max, tolerances.LAYOUT_OF_ROUNDED_STATE
        line = {what: combined((line[what], rounded[what])) for what in line}
    return line


def cuts_scales(case: Case) -> bool:
    """Whether ranks hold parts of what one process rounds under one scale."""
    groups = _groups(case)
    # Delayed scaling reduces over all ranks; its first step over all but those of experts.
    has_parts = "fp8-delayed" not in case.features or "experts" in case.features
    return has_parts and bool({"tp", "cp", "ep", "etp"} & groups.keys())


def rounds_gradients_elsewhere(case: Case) -> bool:
    """Whether backward passes of the layout have gradients that no power of two makes those alone.

    The loss is divided by the micro-batches of a rank before and by the replicas after the
    gradients become codes, whose scales are powers of two: three replicas change every rounding.
    """
    replicas = case.batch // (case.sizes.micro * case.sizes.microbatches)
    is_power_of_two = replicas & (replicas - 1) == 0
    return (
        "codes" in _groups(case) and "per-token-loss" not in case.features and not is_power_of_two
    )


def _groups(case: Case) -> dict[str, str]:
    return {FEATURES[name].group: name for name in case.features}


def dtype_of(case: Case) -> torch.dtype:
    """Of the parameters."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for name, dtype in half.items() if name in case.features), torch.float32)


def differences(case: Case, dtype: torch.dtype, line: dict[str, float]) -> list[str]:
    """Where the layout's answer is not that of one process."""
    return compare(*_traces(case, in_double=dtype == torch.float64), line)


def _traces(case: Case, *, in_double: bool) -> tuple[list[Trace], Trace]:
    """What each rank of the layout saw, and what one process saw."""
    padded = "padded" in case.features
    halves = ("--bf16", "--fp16", "--grad-reduce-in-bf16") if in_double else ()

    def run(num_processes: int, command: Sequence[str]) -> list[Trace]:
        argv = [word for word in command if word not in halves]
        processes = run_ranks(trace, num_processes, argv, padded, in_double, timeout_s=TIMEOUT_S)
        return [rank for process in processes for rank in process]

    layout = run(case.num_processes, case.command())
    assert len(layout) == case.world_size
    (alone,) = run(1, case.command_alone())
    return layout, alone


def beyond_rounding(case: Case) -> list[str]:
    """Where a layout in 16 bits differs from one process by more than rounding explains.

    In fp64 both must be equal: the layout computes the same function.  In 16 bits both are rounded,
    each elsewhere, so that a gradient of the layout may be about as far from that of fp64 as the
    one of the process.  Everything else must be as close as ever.
    """
    exact = _traces(case, in_double=True)
    found = [f"in fp64: {s}" for s in compare(*exact, tolerances.LAYOUT[torch.float64])]
    layout, alone = _traces(case, in_double=False)
    line = allowed(case)
    found += compare(layout, alone, {**line, "gradient": float("inf")})
    return found + badly_rounded(
        [rank.gradients for rank in layout],
        alone.gradients,
        exact[1].gradients,
        line["gradient"],
        _share_of_a_token(case),
    )


def badly_rounded(
    layout: Sequence[Parts], alone: Parts, exact: Parts, line: float, share_of_a_token: float
) -> list[str]:
    """Gradients beyond ``line`` whose error is not one of rounding.

    The error of one process is the largest of all matrices of a kind: of all layers and experts.
    Rounding may also send a token to another expert, in the layout alone.
    """
    rounding: dict[str, float] = defaultdict(float)
    for name, error in _errors([alone], exact).items():
        kind = _kind(name)
        moved = share_of_a_token if _ROUTED.search(name) else 0.0
        rounding[kind] = max(rounding[kind], error.norm / error.scale, moved)
    errors = _errors(layout, exact)
    return [
        f"gradient of {name}: {errors[name].norm / errors[name].scale:.2e} from fp64, rounding "
        f"explains {tolerances.ROUNDINGS} x {rounding[_kind(name)]:.2e}"
        for name, error in _errors(layout, alone).items()
        if not error.norm <= line * error.scale
        and not errors[name].norm
        <= tolerances.ROUNDINGS * rounding[_kind(name)] * errors[name].scale
    ]


# Gradients that a token changes by its choice of an expert.
_ROUTED = re.compile(r"\.experts\.|\.router\.|\.pre_mlp_layernorm\.")


def _kind(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _share_of_a_token(case: Case) -> float:
    """How much of its expert's gradient a token is: n gradients of any directions sum to sqrt(n).

    0 without experts, to which rounding moves no token.
    """
    if "experts" not in case.features:
        return 0.0
    sizes = case.sizes
    return float((case.batch * sizes.seq * sizes.topk / sizes.experts) ** -0.5)


def compare(layout: Sequence[Trace], alone: Trace, allowed: dict[str, float]) -> list[str]:
    """A sentence for each number that is further off than ``allowed``."""
    missing = [name for name in alone.losses if not any(name in rank.losses for rank in layout)]
    assert not missing, f"no rank reported {missing}"
    found = [*_differing_numbers(layout, alone, allowed), *_differing_zeros(layout, alone, allowed)]
    for name, error in _errors([rank.gradients for rank in layout], alone.gradients).items():
        if not error.norm <= allowed["gradient"] * error.scale:
            found.append(f"gradient of {name}: off by {error.norm:.2e} of {error.scale:.2e}")
    for name, error in _errors([rank.weights for rank in layout], alone.weights).items():
        if not error.largest <= allowed["weight"]:
            found.append(f"weight {name}: off by {error.largest:.2e}")
    copies = assembled([rank.weights for rank in layout])[1]
    return found + [f"copies of {name} differ" for name in copies]


def _differing_numbers(
    layout: Sequence[Trace], alone: Trace, allowed: dict[str, float]
) -> Iterator[str]:
    for rank, seen in enumerate(layout):
        losses = ((n, seen.losses.get(n, values), values) for n, values in alone.losses.items())
        for what, actual, expected in (
            *losses,
            ("norm", seen.norms, alone.norms),
            ("params norm", seen.params_norms, alone.params_norms),
        ):
            assert len(actual) == len(expected) > 1, f"rank {rank}: {what} of {len(actual)} steps"
            for step, (a, e) in enumerate(zip(actual, expected, strict=True), 1):
                if not abs(a - e) <= allowed[what.split("_")[-1].split()[-1]] * abs(e):
                    yield f"{what} of step {step} on rank {rank}: {a!r}, alone {e!r}"


def _differing_zeros(
    layout: Sequence[Trace], alone: Trace, allowed: dict[str, float]
) -> Iterator[str]:
    """The count is that of the gradient; alone it is the same but for numbers that are noise.

    A bias of keys has no gradient: only rounding decides which of its numbers are exactly zero.
    """
    gradient = assembled([rank.gradients for rank in layout])[0]
    there = sum(int((t == 0).sum()) for t in gradient.values())
    expected = dict(alone.gradients)
    line = allowed["norm"] * float(
        torch.stack([t.double().norm() for t in expected.values()]).norm()
    )
    noise = sum(int(((t != 0) & (t.abs() <= line)).sum()) for t in expected.values())
    for rank, seen in enumerate(layout):
        if seen.zeros[0] != there:
            yield f"zeros of step 1 on rank {rank}: {seen.zeros[0]}, the gradient has {there}"
        for step, (a, e) in enumerate(zip(seen.zeros, alone.zeros, strict=True), 1):
            if abs(a - e) > noise or a != layout[0].zeros[step - 1]:
                yield f"zeros of step {step} on rank {rank}: {a}, alone {e}"


def assembled(ranks: Sequence[Parts]) -> tuple[dict[str, Tensor], list[str]]:
    """The global tensors, and the names of those of which ranks hold other bits."""
    whole: dict[str, Tensor] = {}
    differing: dict[str, None] = {}
    for name, part in (named for parts in ranks for named in parts):
        first = whole.setdefault(name, part)
        both = ~(first.isnan() | part.isnan())
        if not torch.equal(first[both], part[both]):
            differing[name] = None
        whole[name] = torch.where(first.isnan(), part, first)
    return whole, list(differing)


@dataclass(frozen=True)
class Error:
    """Of one tensor: norm of the difference, what it is compared with, its largest element."""

    norm: float
    scale: float
    largest: float


def _errors(ranks: Sequence[Parts], alone: Parts) -> dict[str, Error]:
    """The largest difference that any rank has, element by element; every element somewhere."""
    expected = dict(alone)
    total = torch.stack([t.double().norm() for t in expected.values()]).norm()
    worst = {name: torch.full_like(t, -1.0) for name, t in expected.items()}
    for parts in ranks:
        for name, part in parts:
            off = (part - expected[name]).abs()
            worst[name] = torch.where(part.isnan(), worst[name], torch.maximum(worst[name], off))
    missing = [name for name, t in worst.items() if (t < 0).any()]
    assert not missing, f"no rank holds all of {missing}"
    return {
        name: Error(
            norm=float(off.double().norm()),
            scale=max(float(expected[name].double().norm()), 1e-6 * float(total)),
            largest=float(off.max()),
        )
        for name, off in worst.items()
    }


def trace(
    rank: int, world_size: int, argv: Sequence[str], padded: bool, in_double: bool
) -> list[Trace]:
    """Train in this process; what its rank, or each of its virtual ranks, saw."""
    traces: dict[int, Trace] = defaultdict(Trace)
    step, norm = steps.train_step, optimizers.squared_norm
    last = len(argv) - argv[::-1].index("--train-iters")  # the value of the last one counts
    num_steps = int(argv[last])

    def train_step(run: Any) -> Any:
        result, seen = step(run), traces[dist.get_rank()]
        for name, loss in result.losses.items():
            if name != "accuracy":  # it jumps where rounding decides between two classes
                seen.losses[name].append(float(loss))
        seen.norms.append(result.grad_norm)
        seen.params_norms.append(result.params_norm)
        seen.zeros.append(result.num_zeros)
        if len(seen.norms) == num_steps:
            for chunk in run.model_chunks:
                chunk.state_dict()  # it waits for parameters that are still being gathered
            params = [p for chunk in run.model_chunks for p in chunk.parameters()]
            seen.weights = [_part(info_of(p), p.detach()) for p in params]
        return result

    def squared_norm(grads: Any, *args: Any, **kwargs: Any) -> Any:
        seen = traces[dist.get_rank()]
        if not seen.gradients:
            seen.gradients = [_part(info, grad) for info, grad in grads]
        return norm(grads, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        quiet = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(quiet))
        stack.enter_context(mock.patch.object(steps, "train_step", train_step))
        stack.enter_context(mock.patch.object(optimizers, "squared_norm", squared_norm))
        stack.enter_context(_short_documents(padded))
        if in_double:
            stack.enter_context(_in_float64())
        if "--enable-cuda-graph" in argv:
            stack.enter_context(graphs_on_cpu())
        if "--virtual-ranks" in argv:
            dist.destroy_process_group()  # as where no launcher is
        train_gpt(rank, world_size, argv)
    return list(traces.values())


def _part(info: ParamInfo, values: Tensor) -> tuple[str, Tensor]:
    """The global tensor as far as this rank holds it."""
    held = local_part(values)
    assert held.isfinite().all(), f"{info.name} is not finite"
    whole = torch.full(info.global_shape, torch.nan, dtype=held.dtype)
    for offset, piece in info.pieces(held.contiguous()):
        place = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
        whole[place] = piece
    return info.name, whole


@contextlib.contextmanager
def _short_documents(padded: bool) -> Iterator[None]:
    """Documents that end within a sample; ``padded`` samples whose text ends early as well."""
    query = MockGPTDataset._query_document_sample_shuffle_indices

    def cut(self: MockGPTDataset, idx: int) -> Any:
        text, documents = query(self, idx)
        return (text[: 3 + 5 * idx % len(text)] if padded else text), documents

    with (
        mock.patch.object(MockGPTDataset, "_MEAN_DOCUMENT_LENGTH", 8),
        mock.patch.object(MockGPTDataset, "_query_document_sample_shuffle_indices", cut),
    ):
        yield


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """What the code calls float32 is float64, for the life of this rank."""
    single, before = torch.float32, torch.get_default_dtype()
    adamw, sgd = torch._fused_adamw_, torch._fused_sgd_

    # The kernels read these two as float32 whatever the parameters are.
    def step_adamw(params: Any, grads: Any, a: Any, b: Any, c: Any, steps: Any, **rest: Any) -> Any:
        steps = [step.to(single) for step in steps]
        return adamw(params, _unscaled(grads, rest), a, b, c, steps, **rest)

    def step_sgd(params: Any, grads: Any, momenta: Any, **rest: Any) -> Any:
        return sgd(params, _unscaled(grads, rest), momenta, **rest)

    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch, "_fused_adamw_", step_adamw),
        mock.patch.object(torch, "_fused_sgd_", step_sgd),
        mock.patch.object(Tensor, "float", Tensor.double),
        mock.patch.dict(router._DTYPES, fp32=torch.float64),
    ):
        torch.set_default_dtype(torch.float64)
        yield
    torch.set_default_dtype(before)


def _unscaled(grads: list[Tensor], rest: dict[str, Any]) -> list[Tensor]:
    scale = rest.pop("grad_scale")
    return grads if scale is None else [grad / scale for grad in grads]
