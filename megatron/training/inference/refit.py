"""Generate with a model while it is trained: an engine on the same ranks, in a layout of its own.

    engine = open_engine(run, layout=GenerationLayout(tensor=1))     # after the optimizer is built
    for each round:
        ... training steps ...
        engine.update()                        # all ranks: the engine gets the weights
        if rank 0: answers = engine.writer.engine.generate(requests); engine.writer.engine.close()
        else:      engine.writer.engine.follow()

Every function is collective over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.inference.paged_engine.engine import Engine
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.refit import Refit, share_parameters
from megatron.training.checkpointing.checkpoint_tensors import (
    RunParts,
    main_param_tensors,
    model_tensors,
)
from megatron.training.inference.engine_flags import GenerationLayout
from megatron.training.inference.generation import (
    DEFAULT_OPTIONS,
    NO_FLAGS,
    ONE_REPLICA,
    DeviceKind,
    Writer,
    generation_config,
    generation_model,
    model_parts,
)
from megatron.training.runtime.setup import (
    build_context,
    build_model_chunks,
    build_stage,
    create_groups,
)
from megatron.training.step.run import TrainingRun
from megatron.training.tokenizer import TokenizerSpec


@dataclass(frozen=True)
class TrainingEngine:
    """An engine that takes its weights from a run in training."""

    writer: Writer
    weights: Refit

    def update(self, *, drain: bool = False) -> None:
        """Give the engine the run's weights of this moment; see `Engine.refit`."""
        self.writer.engine.refit(self.weights, drain=drain)


def open_engine(
    run: TrainingRun,
    *,
    layout: GenerationLayout = ONE_REPLICA,
    options: EngineOptions = DEFAULT_OPTIONS,
    flags: Mapping[str, object] = NO_FLAGS,
    share_memory: bool = False,
) -> TrainingEngine:
    """Build an engine for the model of ``run``, with its weights.  Collective over all ranks.

    ``flags``, dest -> value, override the run's; in a higher precision than the run's weights the
    engine gets the main parameters of the optimizer.  It is batch invariant if the run is: then
    both compute the same log-probabilities.  ``share_memory``: parameters that a rank
    holds alike in both models are not copied, so that a training step changes the engine at once:
    call `TrainingEngine.update` before the engine goes on.
    """
    is_invariant = options.batch_invariant or run.config.model.batch_invariant_mode
    options = replace(options, batch_invariant=is_invariant)
    asked = {**run.config.asked, **flags}
    device_kind = cast(DeviceKind, run.config.distributed.device)
    config = generation_config(
        asked,
        None,
        step=None,
        device_kind=device_kind,
        layout=layout,
        drafts_ahead=options.draft_model == "mtp",
    )
    groups = create_groups(config)
    own = build_context(config, groups, started_at_s=run.started_at_s)
    (module,) = build_model_chunks(
        own, partial(build_stage, own, parallel_output=False), wrap=False
    )
    module.eval()
    if share_memory:
        share_parameters(run.model_chunks, module)
    parts = RunParts(model_chunks=run.model_chunks, groups=run.groups, optimizer=run.optimizer)
    is_wider = config.model.params_dtype.itemsize > run.config.model.params_dtype.itemsize
    sources = partial(_sources, parts, with_main_params=is_wider)
    weights = Refit(sources, model_tensors(model_parts(own, module)), groups.world)
    weights.copy()
    engine = Engine(generation_model(own, module, options), options)
    spec = TokenizerSpec.of(own.config.tokenizer)
    return TrainingEngine(Writer(engine, own.tokenizer, spec), weights)


def _sources(parts: RunParts, *, with_main_params: bool) -> list[ShardedTensor]:
    """Return this rank's weights and, where there are, main parameters under the same keys."""
    return [*model_tensors(parts), *(main_param_tensors(parts) if with_main_params else ())]
