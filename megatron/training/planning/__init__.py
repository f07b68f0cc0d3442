"""Predict memory, communication and pipeline bubble of a run without running it.

`rank` builds the real model and optimizer of any rank without memory, and sends micro-batches
through each of its chunks under `tracing`; `costs` adds up what the passes cost, `run_plan` plans
the ranks of a pipeline, and `check` searches for a change that makes a run fit.  A run that trains
imports none of them; `memory_warmup` rehearses the peak memory of a running rank, and
`out_of_memory` lists what holds it, and the changes that save memory.
"""

from megatron.core.optional import lazy_exports

__getattr__ = lazy_exports(__name__, {"check_only": "megatron.training.planning.check"})
