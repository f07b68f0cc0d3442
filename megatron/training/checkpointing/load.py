"""Load a run from a checkpoint, whatever layout it was saved in.

A reward model (--reward-model) may begin with the weights of a language model.

Order of collectives: rank 0 chooses the folder and reads its contents besides tensors (broadcast);
`all_ranks.load`; the random states of each rank (gather, broadcast, reduce).  Every rank ends
with the same result or the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.all_ranks import load
from megatron.core.dist_checkpointing.folders import RELEASE
from megatron.core.dist_checkpointing.formats import HUGGING_FACE, format_of, open_reader
from megatron.core.dist_checkpointing.local import find_local, load_local
from megatron.core.dist_checkpointing.manifest import RERUN_STATE, RNG_STATE
from megatron.core.dist_checkpointing.records import (
    OPTIMIZER_PREFIX,
    LazyPiece,
    TensorRecord,
    TensorRecords,
    replica_groups,
)
from megatron.core.parallel.collectives import (
    all_or_none,
    broadcast_json,
    is_so_everywhere,
    on_rank_0,
)
from megatron.core.peft.draft_heads import begin_heads
from megatron.core.rerun.results import RerunMode, log
from megatron.core.utils import get_model_config
from megatron.training.checkpointing.base_model import (
    BaseModel,
    base_named_in,
    check_base,
    folder_of_base,
    has_adapters,
    identify,
    of_adapters,
    of_base,
)
from megatron.training.checkpointing.checkpoint_args import check_kind, compare_models
from megatron.training.checkpointing.checkpoint_tensors import (
    RunParts,
    main_param_tensors,
    model_tensors,
    optimizer_tensors,
    set_rng_state,
)
from megatron.training.checkpointing.non_persistent import (
    claim_directories,
    decided_at_ns,
    keeps_parts,
    may_go_on,
    parts_root,
)
from megatron.training.checkpointing.paths import (
    RunContent,
    check_common,
    check_rank_state,
    find,
    is_same_directory,
)
from megatron.training.checkpointing.save import layout_of
from megatron.training.checkpointing.source import (
    STARTED_FROM,
    Source,
    Start,
    choose_source,
    continuation,
    describe_start,
    find_start,
    holds_adapters,
    log_if_renamed,
    started_from,
)
from megatron.training.checkpointing.upcycling import as_dense, finish_upcycling
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.fault_tolerance import sections
from megatron.training.process import exit_report
from megatron.training.process.rank_print import print_rank_0


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Values of a loaded checkpoint besides the tensors, which are in the model already."""

    iteration: int  # to resume from; 0 if only weights were loaded
    counters: Mapping[str, float] = field(default_factory=dict)  # as saved; empty with iteration 0
    has_schedule: bool = False  # the state of the scheduler was restored
    folder: str  # of the checkpoint
    base: BaseModel | None = None  # of adapters
    started_from: str | None = None  # folder of the weights that the run started from
    objective_state: JsonObject | None = None  # see ObjectiveState
    blends: Sequence[JsonObject] = ()  # see RunContext


BLENDS = "blends of training data"  # beside the flags of the command line
_REWARD_MODEL = "reward_model"  # --reward-model
_REWARD_HEAD = "score.weight"
_BEST_METRIC = "best_metric"  # --best-metric
_OUTPUT_LAYER = "output_layer."  # prefix of tensors that a reward model does not have
_PROJECTOR = "vision_projection."  # in the keys of its parameters and their optimizer state


def load_run(
    config: CheckpointConfig, parts: RunParts, *, verify_first: bool = False
) -> Loaded | None:
    """Load model, optimizer, scheduler and random states.  Collective over all ranks.

    With ``verify_first`` all tensors are read twice: an error then leaves them unchanged, unless
    the files change meanwhile, which is a RuntimeError.
    Returns None if there is nothing to load: without ``--load`` and ``--pretrained-checkpoint``, or
    if ``--load`` names the directory that this run saves to and nothing was saved yet.  Raises the
    same error on every rank: CheckpointError, or CheckpointDamaged if a published checkpoint has
    changed since it was written.
    """
    world = parts.groups.world
    if config.save is not None:
        all_or_none(partial(claim_directories, config, world.rank()), config.save, world)
    with_adapters = not is_so_everywhere(not has_adapters(parts), world)
    start = None
    if parts.optimizer is not None:
        look = partial(find_start, config, has_adapters=with_adapters)
        start = on_rank_0(look, f"--load {config.load} or --save {config.save}", world)
    own = config if start is None else continuation(config)
    loaded = _load_local(own, parts, start)
    if loaded is not None:
        return loaded
    if start is not None and start["is_continued"]:
        config = own
    source = on_rank_0(
        partial(choose_source, config), f"--load {config.load} cannot be read", world
    )
    if source is None:
        return None
    if parts.optimizer is not None and (line := describe_start(config, start)):
        print_rank_0(line)
    if source["note"]:
        print_rank_0(f"NOTE: {source['root']}: {source['note']}")
    if source["weights_only"]:
        config = replace(config, no_load_optim=True, no_load_rng=True)
    folders = source["folders"]
    for position, folder in enumerate(folders):
        try:
            loaded = _load_folder(config, parts, source, Path(folder), with_adapters, verify_first)
        except CheckpointDamaged as error:
            if verify_first:  # of a program without the flag
                raise
            may_go_on = config.load_newest_valid or position < source["num_transient"]
            if not may_go_on or len(folders) == 1:
                raise CheckpointDamaged(
                    f"{error}; --load-newest-valid loads the newest undamaged checkpoint"
                ) from None
            if position == len(folders) - 1:
                raise CheckpointDamaged(f"{error}; there is no older checkpoint") from None
            print_rank_0(f"WARNING: {error}; trying the checkpoint before it")
            continue
        exit_report.note(loaded_from=folder)
        return loaded
    raise AssertionError("at least one folder was chosen")


def _load_local(config: CheckpointConfig, parts: RunParts, start: Start | None) -> Loaded | None:
    """Load the newest local checkpoint if it is newer than that of ``--load``, else return None.

    None too if it is of a run with another ``start``.  Collective over all ranks.
    """
    if not keeps_parts(config) or not may_go_on(config):
        return None
    root = parts_root(config)
    world = parts.groups.world
    decided_ns = 2**63  # `choose_source` reports errors of --load
    if world.rank() == 0:
        with suppress(CheckpointError, OSError):
            choice = find(config.load, None, lenient=config.load_newest_valid)
            decided_ns = decided_at_ns(config, choice)
    decided_ns = broadcast_json(decided_ns, world)
    found, notes = find_local(root, layout_of(parts.groups), decided_ns, world)
    for note in notes:
        print_rank_0(f"NOTE: {note}; going on from another checkpoint")
    if found is None:
        return None
    saved = found.common
    if start is not None:
        if saved["args"].get(STARTED_FROM) != start["folder"]:
            print_rank_0(
                f"NOTE: the local checkpoint in {root} is of another run: it is not loaded"
            )
            return None
        print_rank_0(describe_start(config, {**start, "is_continued": True}))
    print_rank_0(f" loading local checkpoint from {root} at iteration {found.iteration}")
    state = load_local(found, _wanted_tensors(config, parts), world) or {}

    def check() -> RunContent:
        check_rank_state(state, root)
        return check_common(saved, root)

    common = all_or_none(check, root, world)
    _check_model(parts, common, root, is_finetuning=False)
    loaded = _restore(config, parts, common, state, str(root))
    _log_loaded(parts, str(root), found.iteration)
    exit_report.note(loaded_from=str(root))
    return loaded


def _loads_optimizer(config: CheckpointConfig, parts: RunParts) -> bool:
    return parts.optimizer is not None and not config.no_load_optim


def _wanted_tensors(config: CheckpointConfig, parts: RunParts) -> list[TensorRecord]:
    tensors = model_tensors(parts)
    if config.moe_use_upcycling:
        model = get_model_config(parts.model_chunks[0])
        return list(as_dense(tensors, model, config.moe_upcycling_granularity))
    if _loads_optimizer(config, parts):
        tensors += optimizer_tensors(parts)
    elif config.load_main_params_from_ckpt:
        tensors += main_param_tensors(parts)
    return tensors


def _log_loaded(parts: RunParts, root: str, iteration: int) -> None:
    tp, pp = parts.groups.tp, parts.groups.pp
    print_rank_0(
        f"  successfully loaded checkpoint from {root} "
        f"[ t {tp.rank() + 1}/{tp.size()}, p {pp.rank() + 1}/{pp.size()} ] "
        f"at iteration {iteration}"
    )


def _load_folder(
    config: CheckpointConfig,
    parts: RunParts,
    source: Source,
    folder: Path,
    with_adapters: bool,
    verify_first: bool,
) -> Loaded:
    """Load one folder completely, or raise the same error on all ranks.  Collective."""
    world = parts.groups.world
    if with_adapters and not on_rank_0(partial(holds_adapters, folder), folder, world):
        # The folder is the base: its optimizer state and its counters belong to another run.
        if is_same_directory(source["root"], config.save):
            raise CheckpointError(
                f"--save {config.save} holds the base of the adapters: save them in another "
                "directory"
            )
        config = replace(config, no_load_optim=True, no_load_rng=True)
        source = {**source, "weights_only": True}
    weights_only = source["weights_only"]
    common = on_rank_0(partial(_check_folder, folder, config, parts), folder, world)
    log_if_renamed(folder, common["iteration"])
    if (parts.asked or {}).get(_REWARD_MODEL):
        # It needs no output layer in the checkpoint, and may begin with a language model.
        parts = replace(parts, unused=(*parts.unused, _OUTPUT_LAYER))
        begins_reward_model = not common["args"].get(_REWARD_MODEL)
        if begins_reward_model and not weights_only:
            raise CheckpointError(
                f"{folder} holds a language model, whose optimizer state does not fit a reward "
                "model: give --finetune"
            )
    else:
        begins_reward_model = False
    explanation = _check_model(parts, common, folder, is_finetuning=source["is_finetuning"])
    at = "" if weights_only else f" at iteration {common['iteration']}"
    kind = f" {RELEASE}" if folder.name == RELEASE else ""
    print_rank_0(f" loading{kind} distributed checkpoint from {source['root']}{at}")
    print_rank_0(f" checkpoint version {common['checkpoint_version']}")
    wanted = _wanted_tensors(config, parts)
    if begins_reward_model:  # its head keeps its initial values
        wanted = [tensor for tensor in wanted if tensor.key != _REWARD_HEAD]
    named = base_named_in(common["args"])
    base = None
    if with_adapters and named is None:  # the folder may be the base
        wanted = _of_base_with_heads(wanted, folder, world)
    elif with_adapters and named is not None:
        wanted = of_adapters(wanted)
        base = _load_base(config, parts, folder, named, explanation)
    elif named is not None:
        raise CheckpointError(
            f"{folder} holds adapters alone, and this run has none: add --use-checkpoint-args, or "
            "--lora-rank and the other flags of the run that wrote it"
        )
    if config.allow_missing_vision_projection_checkpoint:
        present = on_rank_0(partial(_keys_with, (_PROJECTOR,), folder), folder, world)
        wanted = [t for t in wanted if _PROJECTOR not in t.key or t.key in present]
    if verify_first:
        _load_tensors(config, parts, folder, explanation, [_discarding(t) for t in wanted])
    try:
        _load_tensors(config, parts, folder, explanation, wanted)
    except CheckpointError as error:
        if verify_first:
            raise RuntimeError(
                f"{folder} has changed while it was read, and some weights were replaced: {error}"
            ) from error
        raise
    if config.moe_use_upcycling:
        model = get_model_config(parts.model_chunks[0])
        finish_upcycling(parts.model_chunks, model, config.moe_upcycling_granularity)
    path = str(folder.resolve())
    if with_adapters and base is None:
        base = identify(parts, path)
        begin_heads(parts.model_chunks, [tensor.key for tensor in wanted])
    sections.monitor.has_loaded = True
    state = {} if weights_only else _read_rank_state(config, folder, parts)
    loaded = _restore(config, parts, common, state, path, weights_only=weights_only)
    # A program that does not train has no iteration of its own: report the checkpoint's.
    is_training = parts.optimizer is not None
    _log_loaded(parts, source["root"], loaded.iteration if is_training else common["iteration"])
    return replace(loaded, base=base)


def _restore(
    config: CheckpointConfig,
    parts: RunParts,
    common: RunContent,
    state: JsonObject,
    folder: str,
    *,
    weights_only: bool = False,
) -> Loaded:
    """Restore all values besides tensors; ``state``: that of this rank."""
    optimizer = parts.optimizer
    schedule = common["opt_param_scheduler"]
    has_schedule = False
    if optimizer is not None and not config.no_load_optim:
        assert common["optimizer"] is not None, "the checkpoint holds an optimizer, as was checked"
        optimizer.load_scalar_state(common["optimizer"])
        if parts.scheduler is not None and schedule is not None:
            parts.scheduler.load_state_dict(schedule)
            has_schedule = True
    elif optimizer is not None and not config.load_main_params_from_ckpt:
        optimizer.reload_model_params()
    if RNG_STATE in state and not config.no_load_rng:
        set_rng_state(state[RNG_STATE])
    if RERUN_STATE in state and parts.rerun is not None:
        parts.rerun.load_saved_state(state[RERUN_STATE])
    if weights_only:
        return Loaded(iteration=0, has_schedule=has_schedule, folder=folder, started_from=folder)
    counters = common["counters"]
    compares = common["args"].get(_BEST_METRIC), (parts.asked or {}).get(_BEST_METRIC)
    if compares[0] != compares[1] and counters.get("best_iteration"):
        print_rank_0("NOTE: the best evaluation is forgotten: --best-metric is another one now")
        counters = {**counters, "best_iteration": 0, "evaluations_since_best": 0}
    return Loaded(
        iteration=common["iteration"],
        counters=counters,
        has_schedule=has_schedule,
        objective_state=common.get("objective_state"),
        folder=folder,
        started_from=started_from(common),
        blends=found if isinstance(found := common["args"].get(BLENDS), list) else (),
    )


def _of_base_with_heads(
    wanted: list[TensorRecord], folder: Path, world: ProcessGroup
) -> list[TensorRecord]:
    """Return the tensors of the base, and of its own modules that this run trains."""
    present = on_rank_0(partial(_keys_with, ("",), folder), folder, world)
    frozen = of_base(wanted)
    others = set(present) - {t.key for t in frozen} - {_REWARD_HEAD}
    return [*frozen, *(t for t in wanted if t.key in others)]


def _keys_with(parts: tuple[str, ...], folder: Path) -> list[str]:
    """Return the names of tensors in ``folder`` that contain one of ``parts``."""
    with open_reader(folder) as reader:
        return [key for key in reader.tensors if any(part in key for part in parts)]


def _load_base(
    config: CheckpointConfig, parts: RunParts, folder: Path, named: BaseModel, explanation: str
) -> BaseModel:
    """Load the frozen model that the adapters in ``folder`` name.

    Collective over all ranks.  Raises CheckpointError if it is not that base.
    """
    where = on_rank_0(
        partial(folder_of_base, named, config.pretrained_checkpoint, folder),
        folder,
        parts.groups.world,
    )
    if where is not None:
        config = replace(config, no_load_optim=True, load_main_params_from_ckpt=False)
        # The adapters' own values of trained modules are loaded afterwards.
        wanted = _of_base_with_heads(
            _wanted_tensors(config, parts), Path(where), parts.groups.world
        )
        _load_tensors(config, parts, Path(where), explanation, wanted)
    found = identify(parts, where)
    if not parts.unused:  # else a part of the base was not loaded
        check_base(named, found, folder)
    print_rank_0(f" loaded the base of the adapters from {where or 'the seed'}")
    return found


def _load_tensors(
    config: CheckpointConfig,
    parts: RunParts,
    folder: Path,
    explanation: str,
    wanted: TensorRecords,
) -> None:
    """Load ``wanted``; the error that they do not fit ends with ``explanation``.  Collective."""
    leave_out = parts.unused
    if not _loads_optimizer(config, parts):
        leave_out += (OPTIMIZER_PREFIX,)
    try:
        load(
            folder,
            wanted,
            parts.groups.world,
            strictness=config.dist_ckpt_strictness,
            leave_out=leave_out,
            cast=bool(config.load_main_params_from_ckpt) or format_of(folder) == HUGGING_FACE,
            replica_groups=replica_groups(parts.groups) if config.ckpt_fully_parallel_load else {},
        )
    except CheckpointDamaged:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{error}{explanation}") from None


def _discarding(tensor: TensorRecord) -> TensorRecord:
    """Return a record of the same pieces whose values are dropped once they are read.

    To load it verifies the same bytes and changes no tensor.
    """
    empty = partial(torch.empty, dtype=tensor.dtype)
    pieces = (
        LazyPiece(piece.offset, piece.shape, partial(empty, piece.shape), lambda values: None)
        for piece in tensor.pieces
    )
    return replace(tensor, pieces=tuple(pieces))


def _check_model(parts: RunParts, common: RunContent, folder: Path, *, is_finetuning: bool) -> str:
    """Raise CheckpointError if the checkpoint is of another model than the run's.  Local.

    Returns the text to append to the error if the tensors do not fit.
    """
    check_kind(common["args"], parts.kind)
    if parts.asked is None:
        return ""
    if common["args"].get(_REWARD_MODEL) and not parts.asked.get(_REWARD_MODEL):
        raise CheckpointError(
            f"{folder} holds a reward model, which scores answers and writes none: train it "
            "with --reward-model, or name the language model that it was made from"
        )
    found = compare_models(common["args"], parts.asked, is_finetuning=is_finetuning)
    found.check(folder)
    for line in found.warned:
        print_rank_0(f"WARNING: {line}")
    for line in found.logged if parts.optimizer is not None else ():
        print_rank_0(f"NOTE: {line}")
    return f"; of the command line, {'; '.join(found.shown)}" if found.shown else ""


def _check_folder(folder: Path, config: CheckpointConfig, parts: RunParts) -> RunContent:
    """Check the sizes of the files in a folder; return its values besides tensors.

    Raises CheckpointError if it lacks optimizer or random states that the run loads.
    """
    with open_reader(folder) as reader:
        reader.check_sizes()
        common = check_common(reader.common(), folder)
        if _loads_optimizer(config, parts) and common["optimizer"] is None:
            raise CheckpointError(
                f"{folder} holds no optimizer state (it was saved with --no-save-optim): "
                "use --no-load-optim or --finetune"
            )
        if not config.no_load_rng and RNG_STATE not in (reader.rank_state(0) or {}):
            raise CheckpointError(
                f"{folder} holds no random state (it was saved with --no-save-rng, or "
                "converted to another layout): use --no-load-rng or --finetune"
            )
    return common


def _read_rank_state(config: CheckpointConfig, folder: Path, parts: RunParts) -> JsonObject:
    """Return this rank's state, empty if the layout of the checkpoint differs.

    Collective over all ranks.
    """
    world = parts.groups.world

    def read() -> JsonObject | None:
        with open_reader(folder) as reader:
            is_same = reader.manifest.layout == layout_of(parts.groups)
            state = reader.rank_state(world.rank()) if is_same else None
            return None if state is None else check_rank_state(state, folder)

    state = all_or_none(read, folder, world)
    if is_so_everywhere(state is not None, world):
        return state or {}
    if not config.no_load_rng:
        print_rank_0(
            "NOTE: random states, and the state of a step that would be computed again, are "
            "not restored: the checkpoint was written in another layout"
        )
    if parts.rerun is not None and parts.rerun.mode != RerunMode.DISABLED:
        log("Job sharding has changed: Rerun state will be ignored", once=True)
    return {}
