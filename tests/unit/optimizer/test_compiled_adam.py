"""AdamW by the compiled kernel: values of torch's, and the same bits wherever an element lies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.device import cpu_kernels
from megatron.core.fusions.adam_step import Step, Updated
from megatron.core.fusions.cpu import ops
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.reduced_precision_state import StateStorage
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from tests.support import tolerances

pytestmark = pytest.mark.skipif(
    cpu_kernels.compiled() is None, reason="not installed: python setup.py build_ext --inplace"
)
AWARE = {"use_precision_aware_optimizer": True}
FORMS = [{}, {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}]


def after_two_steps(flags: dict[str, Any], groups: ProcessGroupCollection) -> dict[str, Tensor]:
    """Main parameter and moments in float32, and the weight."""
    torch.manual_seed(0)
    model = nn.Linear(333, 77, bias=False, dtype=torch.bfloat16)
    config = OptimizerConfig(lr=1e-2, clip_grad=1.0, **flags)
    optimizer = get_megatron_optimizer(config, [model], pg_collection=groups)
    for _ in range(2):
        model.weight.grad = torch.randn(model.weight.shape).bfloat16()
        optimizer.step()
    ((_, _, state),) = optimizer.named_state()
    kept = {k: s.read() if isinstance(s, StateStorage) else s.detach() for k, s in state.items()}
    return {"weight": model.weight.detach(), **kept}


@pytest.mark.parametrize("flags", FORMS, ids=["split", "rounded"])
@pytest.mark.feature("Optimizers: AdamW of 16-bit weights in one pass on a CPU")
def test_values_are_those_of_torchs_kernel(
    flags: dict[str, Any], alone: ProcessGroupCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    run = cpu_kernels.run
    monkeypatch.setattr(cpu_kernels, "run", lambda *a, **k: ran.append(a[0]) or run(*a, **k))
    found = after_two_steps(flags, alone)
    assert {name.partition(" ")[0] for name in ran} == {"adam", "sums_of_squares"}
    monkeypatch.setattr(cpu_kernels, "take", lambda *_: False)
    expected = after_two_steps(flags, alone)
    is_rounded = "exp_avg_dtype" in flags
    for name, values in expected.items():
        dtype = torch.bfloat16 if is_rounded or name == "weight" else torch.float32
        torch.testing.assert_close(found[name], values, **tolerances.of(dtype))


@pytest.mark.feature("Optimizers: fp32 main parameters in 16 bits beside bf16 weights on a CPU")
def test_adam_keeps_what_weights_lack_by_itself(
    alone: ProcessGroupCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for takes in (cpu_kernels.take, lambda *_: False):  # while the optimizer is made
        model = nn.Linear(333, 77, bias=False, dtype=torch.bfloat16)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_kernels, "take", takes)
            config = OptimizerConfig(lr=1e-2)
            runs.append((model, get_megatron_optimizer(config, [model], pg_collection=alone)))
    (split, few), (plain, many) = runs
    plain.load_state_dict(split.state_dict())
    many.reload_model_params()
    for _ in range(5):
        split.weight.grad = torch.randn(split.weight.shape).bfloat16()
        plain.weight.grad = split.weight.grad.clone()
        few.step()
        many.step()
    torch.testing.assert_close(split.weight, plain.weight, **tolerances.of(torch.bfloat16))
    kept, whole = (next(o.named_state())[2]["fp32_param"] for o in (few, many))
    assert torch.equal(kept.read(), whole)
    sizes = [sum(t.nbytes for t in o.state_tensors(on_host=False)) for o in (few, many)]
    weight = split.weight.numel()
    assert [bytes_ // weight for bytes_ in sizes] == [2 + 2 + 8, 4 + 8]


@pytest.mark.feature("Optimizers: a state_dict is loaded with and without compiled kernels")
@pytest.mark.parametrize("saved_with", [True, False])
@pytest.mark.parametrize("loaded_with", [True, False])
def test_a_state_dict_does_not_depend_on_kernels(
    saved_with: bool, loaded_with: bool, alone: ProcessGroupCollection, monkeypatch: Any
) -> None:
    runs = []
    for has_kernels in (saved_with, loaded_with):
        model = nn.Linear(33, 7, bias=False, dtype=torch.bfloat16)
        with monkeypatch.context() as patch:
            if not has_kernels:
                patch.setattr(cpu_kernels, "take", lambda *_: False)
            config = OptimizerConfig(lr=1e-2)
            runs.append((model, get_megatron_optimizer(config, [model], pg_collection=alone)))
    (first, saved), (second, loaded) = runs
    for _ in range(3):
        first.weight.grad = torch.randn_like(first.weight)
        saved.step()
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    torch.testing.assert_close(second.weight, first.weight, **tolerances.of(torch.bfloat16))
    mains = [next(o.named_state())[2]["fp32_param"] for o in (saved, loaded)]
    values = [m.read() if isinstance(m, StateStorage) else m for m in mains]
    assert torch.equal(*values)


def test_weights_that_are_no_stretch_of_memory_have_main_parameters(
    alone: ProcessGroupCollection,
) -> None:
    model = nn.Linear(8, 4, bias=False)
    model.weight = nn.Parameter(torch.randn(8, 4).bfloat16().t())
    model.weight.main_grad = torch.ones(4, 8)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [model], pg_collection=alone)
    before = model.weight.detach().clone()
    optimizer.step()
    assert (model.weight < before).all()


Numbers = dict[str, Tensor | None]


def fresh(*, split: bool, rounded: bool) -> Numbers:
    """A parameter and all that is kept for it, in the middle of training."""
    torch.manual_seed(1)
    main, grad, mean = torch.randn(3, 40_005)
    square = torch.rand(40_005)
    return {
        "param": main.bfloat16() if split else main,
        "lower": torch.randint(-(2**15), 2**15, main.shape, dtype=torch.int16) if split else None,
        "grad": grad.bfloat16(),
        "mean": mean.bfloat16() if rounded else mean,
        "square": square.bfloat16() if rounded else square,
        "weight": None if split else main.bfloat16(),
    }


def update(numbers: Numbers) -> None:
    corrections = torch.tensor([1 - 0.9**7, 1 - 0.95**7])
    rates = 1e-2, (0.9, 0.95), 1e-8, 0.1
    step = Step(torch.tensor(7.0), corrections, torch.tensor(3.0), None, *rates)
    moments = {k: (numbers[k], None, False) for k in ("mean", "square")}
    ops.update([Updated(**{**numbers, **moments})], step)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
def test_bits_do_not_depend_on_the_number_of_threads(split: bool, rounded: bool) -> None:
    seen, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        seen.append(fresh(split=split, rounded=rounded))
        update(seen[-1])
    torch.set_num_threads(before)
    torch.testing.assert_close(seen[0], seen[1], **tolerances.BITWISE)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("cut", [37, 16 * 1024 + 128])
def test_bits_do_not_depend_on_where_an_update_is_cut(cut: int, split: bool, rounded: bool) -> None:
    whole, parts = (fresh(split=split, rounded=rounded) for _ in range(2))
    update(whole)
    for span in (slice(0, cut), slice(cut, None)):
        update({k: None if t is None else t[span] for k, t in parts.items()})
    torch.testing.assert_close(parts, whole, **tolerances.BITWISE)
