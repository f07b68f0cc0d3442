"""Pipeline parallelism: schedule, execute and communicate the passes of a step."""

from megatron.core.optional import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "get_forward_backward_func": "megatron.core.pipeline_parallel.schedules",
        "StepHooks": "megatron.core.pipeline_parallel.microbatch",
    },
)
