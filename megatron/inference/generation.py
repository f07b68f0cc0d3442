"""Load a model from a checkpoint directory, or from a run in training, to generate text with it.

A checkpoint of any layout loads into the layout of this run: one process, or ``torchrun`` with
tensor, pipeline and expert parallelism and several replicas of the model.  No other flags are
needed (`open_writer`).  While a model is trained, an engine on the same ranks has a layout of its
own and takes the weights of the run (`open_engine`):

    engine = open_engine(run, layout=GenerationLayout(tensor=1))     # after the optimizer is built
    for each round:
        ... training steps ...
        engine.update()                        # all ranks: the engine gets the weights
        if rank 0: answers = engine.writer.engine.generate(requests); engine.writer.engine.close()
        else:      engine.writer.engine.follow()
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from torch import nn

from megatron.core import device
from megatron.core.config.errors import ConfigError, LaunchError
from megatron.core.config.option import dest_of, options_of
from megatron.core.config.value_types import Arguments
from megatron.core.device.cpu_tuning import use_huge_pages
from megatron.core.diagnostics.collective_tracer import waiting_for_work
from megatron.core.inference.fast_linear import use_fast_linears
from megatron.core.inference.paged_engine.adapters import LayerAdapters
from megatron.core.inference.paged_engine.engine import Engine
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.runner import GenerationModel, token_of
from megatron.core.inference.refit import Refit, share_parameters
from megatron.core.models.mimo import MimoModel
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.multimodal.qwen2_vl_model import Qwen2VLModel
from megatron.core.parallel.collectives import all_or_none
from megatron.core.quantization.quantizer import restored_parameters, store_weights
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model
from megatron.inference.engine_flags import GenerationLayout as GenerationLayout
from megatron.inference.image_prompts import ImageInput, ImagePrompts
from megatron.training.arguments.resolve import resolve
from megatron.training.arguments.sections import SECTIONS
from megatron.training.checkpointing.checkpoint_args import (
    FORCED,
    IF_UNSET,
    saved_namespace,
    without_code_and_paths,
)
from megatron.training.checkpointing.checkpoint_tensors import (
    RunParts,
    model_tensors,
)
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.model_folder_args import local_folder
from megatron.training.checkpointing.paths import open_checkpoint, resolve_folder
from megatron.training.config.run import RunConfig
from megatron.training.fault_tolerance.failure_watch import FailureWatch, failure_watch
from megatron.training.initialize import connect, create_context, install_groups, is_set_up
from megatron.training.models.kind import ModelKind
from megatron.training.models.mimo import image_embeddings
from megatron.training.models.registry import model_kind, model_kind_of
from megatron.training.models.vlm import embeddings_per_tile, image_settings
from megatron.training.process.rank_print import world_size
from megatron.training.runtime.context import RunContext
from megatron.training.runtime.setup import (
    build_context,
    build_model_chunks,
    build_stage,
    create_groups,
)
from megatron.training.step.run import TrainingRun
from megatron.training.tokenizer import MegatronTokenizer, TokenizerSpec

# Sections of the saved flags that generation uses: model and tokenizer.  The others
# (saving, data, logging, layout, optimizer) are for training, and may name files and programs.
_TAKEN = ("model", "language_model", "retro", "vision", "tokenizer", "inference")
# Layout and speed of training; and dropped tokens of experts, which would depend on the batch.
_LEFT_OUT = frozenset(
    "pipeline_model_parallel_size encoder_pipeline_model_parallel_size context_parallel_size "
    "cp_comm_type hierarchical_context_parallel_sizes config_logger_dir "
    "calculate_per_token_loss decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    "pipeline_model_parallel_layout pipeline_split pipeline_schedule "
    "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
    "microbatch_group_size_per_vp_stage account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split overlap_moe_expert_parallel_comm tp_comm_overlap "
    "recompute_granularity recompute_method recompute_num_layers recompute_modules "
    "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_modules moe_enable_deepep "
    "moe_flex_dispatcher_backend encoder_tp retro_project_dir "
    "moe_expert_capacity_factor moe_pad_expert_input_to_capacity".split()
)
# Values set for every generation run.
_OWN = {
    **dict.fromkeys(("no_load_optim", "no_load_rng", "skip_train"), True),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
    "load_main_params_from_ckpt": True,  # weights of another precision are converted
    "perform_initialization": False,  # the checkpoint has all weights
}
_MTP_LAYERS = ("mtp.",)  # prefix of the names of their tensors
_PATIENCE_S = 30.0  # without progress in a step, then all ranks report their collectives


ONE_REPLICA = GenerationLayout()
DEFAULT_OPTIONS = EngineOptions()
NO_FLAGS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Writer:
    """An engine with its tokenizer, which another process can build from ``tokenizer_spec``.

    ``watch``: that of the ranks' failures, if there is one.  ``image_prompts``: for models that
    read images.
    """

    engine: Engine
    tokenizer: MegatronTokenizer
    tokenizer_spec: TokenizerSpec
    watch: FailureWatch | None = None
    image_prompts: ImagePrompts | None = None

    def explain(self, error: BaseException) -> str:
        """Return why a step failed; a rank that has ended is the reason of its neighbours."""
        if self.watch is not None:
            return self.watch.explain(error)
        return f"{type(error).__name__}: {error}"


def open_writer(
    load: str,
    *,
    step: int | None = None,
    device_kind: str = "auto",
    layout: GenerationLayout = ONE_REPLICA,
    options: EngineOptions = DEFAULT_OPTIONS,
    flags: Mapping[str, object] = NO_FLAGS,
    watch: ExitStack | None = None,
    strictness: str | None = None,
) -> Writer:
    """Build an engine with the checkpoint ``load``.  Collective over all ranks.

    ``flags``, dest -> value, override the saved ones.  ``strictness``: --dist-ckpt-strictness.  If
    one rank fails before ``watch`` is closed, all ranks end with its message (`failure_watch`).
    Raises CheckpointError if there is no checkpoint, ConfigError if the model does not fit the
    ranks or generates no text, LaunchError if the process has another model.
    """
    if is_set_up():
        raise LaunchError(
            f"{load} cannot be loaded: this process has the process groups of another model; call "
            "shut_down() of that LLM first, or load the second model in a process of its own"
        )
    load = local_folder(load, "--load")
    content = open_checkpoint(load, step)
    kind = model_kind(content.asked.get("model_kind"))
    _require_text(load, kind, content.asked)
    asked = {**without_code_and_paths(content.asked, flags), **flags}
    config = generation_config(
        asked,
        load,
        step=step,
        device_kind=device_kind,
        layout=layout,
        drafts_ahead=options.draft_model == "mtp",
    )
    minutes = max(round(options.timeout_s / 60), 1)
    distributed = replace(config.distributed, distributed_timeout_minutes=minutes)
    config = replace(config, distributed=distributed)
    if strictness is not None:
        config = replace(
            config, checkpoint=replace(config.checkpoint, dist_ckpt_strictness=strictness)
        )
    connect(config)
    watching = None
    if watch is not None:
        failures = failure_watch(timeout_s=options.timeout_s, patience_s=_PATIENCE_S)
        watching = watch.enter_context(failures)
        watch.enter_context(waiting_for_work(True))  # except in steps
    run, module = load_model(config, parallel_output=False)
    parts = model_parts(run, module)

    def load_weights(directory: str) -> None:
        """Load the newest checkpoint of ``directory``, see `GenerationModel`."""
        all_or_none(partial(resolve_folder, directory), directory, parts.groups.world)
        newest = replace(config.checkpoint, load=directory, ckpt_step=None)
        with restored_parameters([module]):
            load_run(newest, parts, verify_first=True)

    model = generation_model(run, module, options, load_weights)
    image_prompts = None
    if kind.reads_images:
        vision = run.config.vision
        images = ImageInput(
            image_settings(vision), embeddings_per_tile(vision), has_tile_tags=vision.use_tile_tags
        )
        image_prompts = ImagePrompts(images, run.tokenizer)
    return Writer(
        Engine(model, options),
        run.tokenizer,
        TokenizerSpec.of(run.config.tokenizer),
        watching if isinstance(watching, FailureWatch) else None,
        image_prompts,
    )


def _require_text(load: str, kind: ModelKind, asked: Arguments) -> None:
    """Raise ConfigError for a checkpoint whose model generates no text."""
    positions = asked.get("position_embedding_type")
    counts_images_once = kind.reads_images and not kind.has_placeholders
    if counts_images_once and positions not in ("rope", "none", "mrope"):
        raise ConfigError(
            f"{load} has --position-embedding-type {positions}, which counts an image as one "
            "position: text is generated with rope, mrope or none only"
        )
    if not kind.writes_text:
        other = "writes no text: for embeddings of texts use tools/bert_embedding.py"
        if kind.reads_neighbors:
            other = "reads neighbors of its text: use tools/retro/text_generation.py"
        raise ConfigError(f"{load} holds a {kind.title}, which {other}")


def _load_adapter(run: RunContext, module: nn.Module, folder: str) -> LayerAdapters:
    # The package that knows the names of all families is imported when it is needed.
    load: Callable[..., LayerAdapters] = pkgutil.resolve_name(_ADAPTERS)
    return load(run, module, folder)


_ADAPTERS = "megatron.inference.adapters:load_adapter"


def load_model(config: RunConfig, **of_stage: bool) -> tuple[RunContext, nn.Module]:
    """Return the context and the model of a checkpoint.  Collective over all ranks.

    ``of_stage`` are arguments of `build_model_stage`.  Call `connect` before.
    """
    run = create_context(config, install_groups(config))
    (module,) = build_model_chunks(run, partial(build_stage, run, **of_stage), wrap=False)
    use_huge_pages(module.parameters())
    load_run(config.checkpoint, model_parts(run, module))
    store_weights([module])
    return run, module.eval()


def model_parts(run: RunContext, module: nn.Module) -> RunParts:
    """Return the parts to load a checkpoint into: the model without an optimizer."""
    return RunParts(
        model_chunks=[module],
        groups=run.groups,
        asked=run.config.asked,
        unused=_MTP_LAYERS if run.config.model.mtp_num_layers is None else (),
    )


def generation_model(
    run: RunContext,
    module: nn.Module,
    options: EngineOptions,
    load_weights: Callable[[str], object] | None = None,
) -> GenerationModel:
    """Describe the model of a run for an engine; bind fast matmuls."""
    load_adapter = partial(_load_adapter, run, module)
    if not device.is_cuda() or options.batch_invariant or options.weights != "saved":
        weights = "fp32" if options.weights == "saved" else options.weights
        use_fast_linears(module, weights, batch_invariant=options.batch_invariant)
    kind = model_kind_of(run.config)
    encode_images = None
    whole = None
    if kind.reads_images:
        whole = get_attr_wrapped_model(module, "language_model", return_model_obj=True)
        if isinstance(whole, MimoModel):
            encode_images = partial(image_embeddings, whole) if whole.pre_process else None
        elif whole.vision_model is not None:
            encode_images = whole.rows_of_images
        text = whole.language_model
        module = Float16Module(text.config, text) if isinstance(module, Float16Module) else text
    start = None
    if kind.has_encoder:  # as in training: BOS, else PAD, which is 0 in the published T5
        start = token_of(run.tokenizer, "bos", "pad") or 0
    heads = run.config.adapters
    return GenerationModel(
        module=module,
        config=run.config.model,
        groups=run.groups,
        device=device.current(),
        vocab_size=run.tokenizer.vocab_size,
        max_sequence_length=longest_sequence(run),
        eod=run.tokenizer.id_of("eos" if kind.has_encoder else "eod"),
        decoder_start=start,
        load_weights=load_weights,
        load_adapter=None if kind.has_encoder or kind.reads_images else load_adapter,
        encode_images=encode_images,
        reads_images=kind.reads_images,
        has_grid=isinstance(whole, Qwen2VLModel) and text.position_embedding_type == "mrope",
        sees_images_whole=isinstance(whole, LLaVAModel) and whole.sees_images_whole,
        num_logits=run.padded_vocab_size if run.config.language_model.pad_vocab_in_loss else None,
        num_heads=heads.export_num_medusa_heads or int(heads.has_eagle),
        heads_repeat=heads.has_eagle,
    )


def longest_sequence(run: RunContext) -> int:
    """Return the largest number of tokens that the model takes."""
    longest = run.config.language_model.max_position_embeddings
    assert longest is not None, "resolve() has checked it"
    return longest


def generation_config(
    asked: Arguments,
    load: str | None,
    *,
    step: int | None,
    device_kind: str,
    layout: GenerationLayout = ONE_REPLICA,
    drafts_ahead: bool = False,
) -> RunConfig:
    """Build the config from the saved flags of the model, with the layout of this run's ranks.

    Without ``drafts_ahead`` the model has no layers for multi-token prediction.
    """
    taken = {dest_of(f, opt) for name in _TAKEN for f, opt in options_of(SECTIONS[name])}
    taken = (taken | {*FORCED, *IF_UNSET, "bf16", "fp16"}) - _LEFT_OUT
    namespace = saved_namespace({k: v for k, v in asked.items() if k in taken})
    ranks = world_size()
    tensor = layout.tensor
    if tensor is None:  # one replica of the model; several share experts of their own size
        tensor = max(ranks // max(layout.pipeline, 1), 1)  # resolve() reports sizes below 1
        if layout.expert_tensor is None:
            tensor = max(tensor // max(layout.expert, 1), 1)
    own = {
        "load": load,
        "finetune": load is not None,
        "exit_on_missing_checkpoint": load is not None,
        "ckpt_step": step,
        "device": device_kind,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        # Replicas have different numbers of rows in a step; all-gather needs equal ones.
        "moe_token_dispatcher_type": "alltoall",
        "micro_batch_size": 1,
        "global_batch_size": max(ranks // max(tensor * layout.pipeline, 1), 1),
        "distributed_backend": None,
    }
    vars(namespace).update(_OWN | own)
    has_encoder = model_kind(asked.get("model_kind")).has_encoder
    if has_encoder and layout.pipeline > 1:  # the first half of the stages
        namespace.encoder_pipeline_model_parallel_size = layout.pipeline // 2
    is_uneven = (namespace.num_layers or 0) % max(layout.pipeline, 1) != 0
    if is_uneven and not has_encoder:
        namespace.pipeline_split = "auto"
    if not drafts_ahead:
        namespace.mtp_num_layers = None
    namespace.sequence_parallel = False
    return resolve(namespace, ranks, extra={}, trains=False)


@dataclass(frozen=True)
class TrainingEngine:
    """An engine that takes its weights from a run in training."""

    writer: Writer
    weights: Refit

    def update(self) -> None:
        """Give the engine the run's weights of this moment; see `Engine.refit`."""
        self.writer.engine.refit(self.weights)


def open_engine(
    run: TrainingRun,
    *,
    layout: GenerationLayout = ONE_REPLICA,
    options: EngineOptions = DEFAULT_OPTIONS,
    share_memory: bool = False,
) -> TrainingEngine:
    """Build an engine for the model of ``run``, with its weights.  Collective over all ranks.

    ``share_memory``: parameters that a rank holds alike in both models are not copied, so that a
    training step changes the engine at once: call `TrainingEngine.update` before the engine goes
    on.
    """
    config = generation_config(
        run.config.asked,
        None,
        step=None,
        device_kind=run.config.distributed.device,
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
    parts = RunParts(model_chunks=run.model_chunks, groups=run.groups)
    targets = model_tensors(model_parts(own, module))
    weights = Refit(partial(model_tensors, parts), targets, groups.world)
    weights.copy()
    engine = Engine(generation_model(own, module, options), options)
    spec = TokenizerSpec.of(own.config.tokenizer)
    return TrainingEngine(Writer(engine, own.tokenizer, spec), weights)
