"""A plan survives its way through one array of integers."""

from __future__ import annotations

import numpy as np

from megatron.core.inference.paged_engine.step_plan import SAMPLE, Admission, Segment, StepPlan


def _ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_plan_is_restored_from_its_array() -> None:
    plan = StepPlan(
        [
            Segment(3, 16, _ints(5, 6), _ints(9, 2), _ints(6, SAMPLE)),
            Segment(0, 0, _ints(1, 2, 3), _ints(7), _ints()),
        ],
        [
            Admission(
                3, {"temperature": 0.5, "seed": 2**63 - 1, "logit_bias": {"7": -1.5}}, (1, 2), 1
            ),
        ],
        [(4, 9), (1, 2)],
        {3: _ints(-1, 2**31 - 1)},
    )
    array = plan.to_array()
    assert array.dtype == np.int64
    found = StepPlan.from_array(array)
    assert found.admissions == plan.admissions
    assert found.copies == plan.copies
    assert found.masks[3].tolist() == plan.masks[3].tolist()
    for a, b in zip(found.segments, plan.segments, strict=True):
        assert (a.slot, a.start, a.num_keys) == (b.slot, b.start, b.num_keys)
        assert [a.tokens.tolist(), a.pages.tolist(), a.targets.tolist()] == [
            b.tokens.tolist(),
            b.pages.tolist(),
            b.targets.tolist(),
        ]
    assert sum(len(segment.tokens) for segment in found.segments) == 5
    assert found.num_outputs == 2


def test_an_empty_plan_has_no_rows() -> None:
    found = StepPlan.from_array(StepPlan().to_array())
    assert (found.segments, found.admissions, found.copies) == ([], [], [])
