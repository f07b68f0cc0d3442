"""The end of a run: clear the global state, destroy the process groups."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.parallel import parallel_state
from megatron.core.pipeline_parallel.schedules import graphs_of
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.training.compat import global_vars
from megatron.training.step.run import ModelRun, TrainingRun


def is_set_up() -> bool:
    """Return whether this process has the groups of a run: `shut_down` destroys them."""
    return parallel_state.is_initialized()


def shut_down(*, has_failed: bool = False) -> None:
    """Clear the global state and destroy the process groups, before the interpreter exits.

    ``has_failed``: an exception ends this process, and other ranks may be in collectives that it
    will not join.  NCCL destroys a group only after its pending collectives, so groups are aborted.

    CUDA graphs are released first: NCCL does not destroy a group while a graph holds a collective
    of that group.  So are the hooks of parameters: through torch's C++ objects, which the garbage
    collector does not see, they would keep the model and its process groups alive.
    """
    run = global_vars.current_run()
    chunks = run.model_chunks if isinstance(run, ModelRun) else []
    for chunk in chunks:
        for param in chunk.parameters():
            for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks):
                if hooks:
                    hooks.clear()
    for graphs in (g for chunk in chunks for g in graphs_of(chunk)):
        graphs.release()
    if isinstance(run, TrainingRun) and run.step_graph is not None:
        run.step_graph.release()
    global_vars.set_run(None)
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        if has_failed and dist.get_backend() == dist.Backend.NCCL:
            distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
