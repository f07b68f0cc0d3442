"""Load a run from a checkpoint, whatever layout it was saved in.

Order of collectives: rank 0 chooses the folder and reads its contents besides tensors (broadcast);
`serialization.load`; the random states of each rank (gather, broadcast, reduce).  Every rank ends
with the same result or the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeVar

import torch
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.collectives import (
    all_or_none,
    broadcast_json,
    is_so_everywhere,
)
from megatron.core.dist_checkpointing.folders import RELEASE, TRACKER, CheckpointChoice
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.dist_checkpointing.local_load import LocalContent, find_local, load_local
from megatron.core.dist_checkpointing.manifest import CheckpointDamaged
from megatron.core.dist_checkpointing.mapping import (
    OPTIMIZER_PREFIX,
    LazyPiece,
    ShardedTensor,
    replica_groups,
)
from megatron.core.dist_checkpointing.serialization import load
from megatron.core.dist_checkpointing.value_types import RERUN_STATE, RNG_STATE, JsonObject
from megatron.core.utils import get_model_config
from megatron.training.checkpointing.checkpoint_args import check_kind
from megatron.training.checkpointing.checkpoint_tensors import (
    RunParts,
    main_param_tensors,
    model_tensors,
    optimizer_tensors,
)
from megatron.training.checkpointing.content_checks import (
    RunContent,
    check_common,
    check_rank_state,
)
from megatron.training.checkpointing.non_persistent import (
    claim_directories,
    decided_at_ns,
    keeps_parts,
    may_go_on,
    newer_transient,
    parts_root,
)
from megatron.training.checkpointing.paths import find, is_same_directory
from megatron.training.checkpointing.rng_state import set_rng_state
from megatron.training.checkpointing.same_model import compare_models
from megatron.training.checkpointing.save import layout_of
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


class _Source(TypedDict):
    """The checkpoint that rank 0 chose; the other ranks receive it as JSON."""

    root: str
    folders: list[str]  # to try, in order
    num_transient: int  # how many of the first are non-persistent checkpoints
    note: str | None
    is_finetuning: bool
    weights_only: bool  # neither optimizer nor counters: --finetune, or a release


T = TypeVar("T")


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
    loaded = _load_local(config, parts)
    if loaded is not None:
        return loaded
    where = f"--load {config.load} cannot be read"
    source = _on_rank_0(partial(_choose, config), where, world)
    if source is None:
        return None
    if source["note"]:
        print_rank_0(f"NOTE: {source['root']}: {source['note']}")
    if source["weights_only"]:
        config = replace(config, no_load_optim=True, no_load_rng=True)
    folders = source["folders"]
    for position, folder in enumerate(folders):
        try:
            loaded = _load_folder(config, parts, source, Path(folder), verify_first)
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


def _load_local(config: CheckpointConfig, parts: RunParts) -> Loaded | None:
    """Load the newest local checkpoint if it is newer than that of ``--load``, else return None.

    Collective over all ranks.
    """
    if not keeps_parts(config) or not may_go_on(config):
        return None
    root = parts_root(config)
    world = parts.groups.world
    decided_ns = broadcast_json(_decided_ns(config) if world.rank() == 0 else 0, world)
    found, notes = find_local(root, layout_of(parts.groups), decided_ns, world)
    for note in notes:
        print_rank_0(f"NOTE: {note}; going on from another checkpoint")
    if found is None:
        return None
    print_rank_0(f" loading local checkpoint from {root} at iteration {found.iteration}")
    content = load_local(found, _wanted_tensors(config, parts), world)
    common = all_or_none(partial(_check_local, content, root), root, world)
    _check_model(parts, common, root, is_finetuning=False)
    has_schedule = _restore_scalars(config, parts, common)
    _restore_rank_state(config, parts, content.rank_state or {})
    _log_loaded(parts, str(root), found.iteration)
    exit_report.note(loaded_from=str(root))
    return Loaded(iteration=found.iteration, counters=common["counters"], has_schedule=has_schedule)


def _check_local(content: LocalContent, root: Path) -> RunContent:
    if content.rank_state is not None:
        check_rank_state(content.rank_state, root)
    return check_common(content.common, root)


def _decided_ns(config: CheckpointConfig) -> int:
    """Return `decided_at_ns` for ``--load``; errors of ``--load`` are reported by `_choose`."""
    try:
        return decided_at_ns(config, find(config.load, None, lenient=config.load_newest_valid))
    except (CheckpointError, OSError):
        return 2**63


def _loads_optimizer(config: CheckpointConfig, parts: RunParts) -> bool:
    return parts.optimizer is not None and not config.no_load_optim


def _wanted_tensors(config: CheckpointConfig, parts: RunParts) -> list[ShardedTensor]:
    tensors = model_tensors(parts)
    if config.moe_use_upcycling:
        model, granularity = (
            get_model_config(parts.model_chunks[0]),
            config.moe_upcycling_granularity,
        )
        return list(as_dense(tensors, model, granularity))
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


def _choose(config: CheckpointConfig) -> _Source | None:
    """Choose the checkpoint to load; None if the run starts from random weights.  Local.

    Raises CheckpointError, OSError.
    """
    if config.moe_use_upcycling and config.save and find(config.save, None) is not None:
        raise CheckpointError(
            f"--moe-use-upcycling: --save {config.save} holds a checkpoint already; go on from "
            "it with --load and without the flag, or save elsewhere"
        )
    choice = find(config.load, config.ckpt_step, lenient=config.load_newest_valid)
    newer = newer_transient(config, choice)
    if newer is not None:
        kept = () if choice is None else (choice.found, *choice.older)
        note = f"loading the non-persistent checkpoint {newer.folder}, the newest one"
        choice = CheckpointChoice(newer, kept, note)
    if choice is not None:
        assert config.load is not None
        num_transient = int(newer is not None)
        return _source(config.load, choice, config.finetune, num_transient)
    if config.pretrained_checkpoint is not None:
        choice = find(config.pretrained_checkpoint, None)
        if choice is None:
            raise CheckpointError(
                f"--pretrained-checkpoint {config.pretrained_checkpoint} holds no checkpoint"
            )
        return _source(config.pretrained_checkpoint, choice, is_finetuning=True)
    if config.exit_on_missing_checkpoint:
        lack = (
            "--load is not given" if config.load is None else f"{config.load} holds no checkpoint"
        )
        raise CheckpointError(f"--exit-on-missing-checkpoint: {lack}")
    if config.load is None:
        return None
    if not is_same_directory(config.load, config.save):
        raise CheckpointError(
            f"--load {config.load} holds no checkpoint: correct the path; to start from "
            "random weights and resume later, give --load and --save the same directory"
        )
    print(
        f"WARNING: could not find the metadata file {Path(config.load) / TRACKER}\n"
        "    will not load any checkpoints and will start from random",
        flush=True,
    )
    return None


def _source(
    root: str, choice: CheckpointChoice, is_finetuning: bool, num_transient: int = 0
) -> _Source:
    return {
        "root": root,
        "folders": [str(found.folder) for found in (choice.found, *choice.older)],
        "num_transient": num_transient,
        "note": choice.note,
        "is_finetuning": is_finetuning,
        "weights_only": is_finetuning or choice.found.folder.name == RELEASE,
    }


def _load_folder(
    config: CheckpointConfig, parts: RunParts, source: _Source, folder: Path, verify_first: bool
) -> Loaded:
    """Load one folder completely, or raise the same error on all ranks.  Collective."""
    world = parts.groups.world
    common = _on_rank_0(partial(_check_folder, folder, config, parts), folder, world)
    explanation = _check_model(parts, common, folder, is_finetuning=source["is_finetuning"])
    at = "" if source["weights_only"] else f" at iteration {common['iteration']}"
    kind = f" {RELEASE}" if folder.name == RELEASE else ""
    print_rank_0(f" loading{kind} distributed checkpoint from {source['root']}{at}")
    print_rank_0(f" checkpoint version {common['checkpoint_version']}")
    if verify_first:
        _load_tensors(config, parts, folder, explanation, is_trial=True)
    try:
        _load_tensors(config, parts, folder, explanation)
    except CheckpointError as error:
        if verify_first:
            raise RuntimeError(
                f"{folder} has changed while it was read, and some weights were replaced: {error}"
            ) from error
        raise
    if config.moe_use_upcycling:
        finish_upcycling(
            parts.model_chunks,
            get_model_config(parts.model_chunks[0]),
            config.moe_upcycling_granularity,
        )
    sections.monitor.has_loaded = True
    state = {} if source["weights_only"] else _read_rank_state(config, folder, parts)
    has_schedule = _restore_scalars(config, parts, common)
    _restore_rank_state(config, parts, state)
    iteration = 0 if source["weights_only"] else common["iteration"]
    # A program that does not train has no iteration of its own: report the checkpoint's.
    is_training = parts.optimizer is not None
    _log_loaded(parts, source["root"], iteration if is_training else common["iteration"])
    return Loaded(
        iteration=iteration,
        counters={} if source["weights_only"] else common["counters"],
        has_schedule=has_schedule,
    )


def _load_tensors(
    config: CheckpointConfig,
    parts: RunParts,
    folder: Path,
    explanation: str,
    *,
    is_trial: bool = False,
) -> None:
    """Load the tensors; the error that they do not fit ends with ``explanation``.  Collective.

    A trial reads and verifies the same bytes and changes no tensor.
    """
    wanted = _wanted_tensors(config, parts)
    try:
        load(
            folder,
            [_into_nothing(tensor) for tensor in wanted] if is_trial else wanted,
            parts.groups.world,
            strictness=config.dist_ckpt_strictness,
            leave_out=parts.unused
            + (() if _loads_optimizer(config, parts) else (OPTIMIZER_PREFIX,)),
            cast=bool(config.load_main_params_from_ckpt),
            replica_groups=(
                replica_groups(parts.groups) if config.ckpt_fully_parallel_load else None
            ),
        )
    except CheckpointDamaged:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{error}{explanation}") from None


def _into_nothing(tensor: ShardedTensor) -> ShardedTensor:
    """Return a record of the same pieces whose values are dropped once they are read."""
    pieces = [
        LazyPiece(
            piece.offset,
            piece.shape,
            partial(torch.empty, piece.shape, dtype=tensor.dtype),
            lambda values: None,
        )
        for piece in tensor.pieces
    ]
    return replace(tensor, pieces=tuple(pieces))


def _check_model(parts: RunParts, common: RunContent, folder: Path, *, is_finetuning: bool) -> str:
    """Raise CheckpointError if the checkpoint is of another model than the run's.  Local.

    Returns the text to append to the error if the tensors do not fit.
    """
    check_kind(common["args"], parts.kind)
    if parts.asked is None:
        return ""
    found = compare_models(common["args"], parts.asked, is_finetuning=is_finetuning)
    found.check(folder)
    for line in found.logged if parts.optimizer is not None else ():
        print_rank_0(f"NOTE: {line}")
    return f"; of the command line, {'; '.join(found.shown)}" if found.shown else ""


def _on_rank_0(call: Callable[[], T], where: object, world: ProcessGroup) -> T:
    """Return on all ranks what ``call`` returns on rank 0, or raise its error.  Collective."""
    results = all_or_none(lambda: [call()] if world.rank() == 0 else [], where, world)
    return broadcast_json(results, world)[0]


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
                f"{folder} holds no random state (it was saved with --no-save-rng): "
                "use --no-load-rng or --finetune"
            )
    return common


def _read_rank_state(config: CheckpointConfig, folder: Path, parts: RunParts) -> JsonObject:
    """Return this rank's state, empty if the layout of the checkpoint differs.

    Collective over all ranks.
    """

    def read() -> JsonObject | None:
        with open_reader(folder) as reader:
            is_same = reader.manifest.layout == layout_of(parts.groups)
            state = reader.rank_state(parts.groups.world.rank()) if is_same else None
            return None if state is None else check_rank_state(state, folder)

    state = all_or_none(read, folder, parts.groups.world)
    if not is_so_everywhere(state is not None, parts.groups.world) or state is None:
        if not config.no_load_rng:
            print_rank_0(
                "NOTE: random states, and the state of a step that would be computed again, are "
                "not restored: the checkpoint was written in another layout"
            )
        return {}
    return state


def _restore_rank_state(config: CheckpointConfig, parts: RunParts, state: JsonObject) -> None:
    if RNG_STATE in state and not config.no_load_rng:
        set_rng_state(state[RNG_STATE])
    if RERUN_STATE in state and parts.rerun is not None:
        parts.rerun.load_saved_state(state[RERUN_STATE])


def _restore_scalars(config: CheckpointConfig, parts: RunParts, common: RunContent) -> bool:
    """Restore the state of optimizer and scheduler besides tensors.

    Returns whether the checkpoint had the state of the scheduler.
    """
    if parts.optimizer is None:
        return False
    if config.no_load_optim:
        if not config.load_main_params_from_ckpt:
            parts.optimizer.reload_model_params()
        return False
    assert common["optimizer"] is not None, "the checkpoint holds an optimizer, as was checked"
    parts.optimizer.load_scalar_state(common["optimizer"])
    if parts.scheduler is None or common["opt_param_scheduler"] is None:
        return False
    parts.scheduler.load_state_dict(common["opt_param_scheduler"])
    return True
