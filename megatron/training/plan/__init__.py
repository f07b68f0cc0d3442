"""Predict memory, communication and pipeline bubble of a run without running it.

`rank` builds the real model and optimizer of any rank without memory, and sends micro-batches
through each of its chunks under `tracing`; `memory` and `communication` add up the costs, `cure`
searches for a change that makes a run fit, and `report` formats the plan.  A run that trains
imports none of them, except for an out-of-memory report.
"""

from megatron.core.lazy import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "check_only": "megatron.training.plan.check",
        "fits": "megatron.training.plan.cure",
        "plan_lines": "megatron.training.plan.report",
        "plan_run": "megatron.training.plan.stages",
    },
)
