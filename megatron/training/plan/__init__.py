"""What a run would take, found out without running it: memory, communication, bubble.

`rank` builds the real model and optimizer of any rank without memory and sends one micro-batch
through each of its chunks under `tracing`; `memory` and `communication` make sums of that, `cure`
looks for the change that makes a run fit, and `report` says it.  A run that trains imports none.
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
