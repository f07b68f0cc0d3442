"""Save and load over all ranks: every rank ends with the same folder, or the same error.

A save is `begin` (the temporary folder), `write` (the files of a rank), a gather of the reports,
`complete` (on rank 0: common files, then `commit.publish`), `conclude` (the verdict to all ranks).
`write` and `complete` do not communicate and may run in the background (`background`).

Order of collectives.  Save: gather sizes, broadcast the folder; write; gather reports, broadcast
the verdict.  Load: gather differences, broadcast the verdict; read; gather errors, broadcast the
verdict.  A rank that fails still takes part and reports its error, so that no other rank waits for
it forever.

On a file system that all ranks share, data-parallel ranks that read the same bytes compete for its
bandwidth; their own network is usually faster.  With ``replica_groups`` each shard is therefore
read once and broadcast: weights before optimizer state; of each, group by group; within a group the
order of `assign_replicas`, one broadcast for each piece.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject, Shape
from megatron.core.diagnostics.fault_injection import InjectedFault, fault_point
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.folders import KEEP_ALL, Retention, published
from megatron.core.dist_checkpointing.formats import (
    SAFETENSORS_DIST,
    Contents,
    Format,
    RankReport,
    RankSave,
    files_of,
    open_reader,
)
from megatron.core.dist_checkpointing.manifest import MANIFEST, MANIFEST_BESIDE, FileEntries
from megatron.core.dist_checkpointing.reader import CheckpointReader, mismatch
from megatron.core.dist_checkpointing.records import (
    LazyPiece,
    Piece,
    SavePlan,
    TensorRecord,
    TensorRecords,
    assign_replicas,
    to_write,
    weights_then_state,
)
from megatron.core.dist_checkpointing.validation import (
    Differences,
    check_strictness,
    permitted_differences,
    shorten,
)
from megatron.core.parallel.collectives import (
    all_or_none,
    broadcast_json,
    error_as_json,
    gather_json,
    on_rank_0,
    on_wire,
    rank_in,
    reason_of,
)
from megatron.core.progress import Progress

AnyReader = TypeVar("AnyReader", bound=CheckpointReader)
_MAX_THREADS = 4  # concurrent reads; more threads do not raise throughput
# Errors that a rank reports in the next collective instead of raising before it, which would leave
# the others waiting.  torch's out-of-memory errors are RuntimeErrors.
REPORTED = (OSError, MemoryError, RuntimeError, CheckpointError, InjectedFault)


class SaveFailed(CheckpointError):
    """A rank could not save, so nothing was published; the previous checkpoint is complete."""

    exit_code = 1


@dataclass(frozen=True)
class SaveResult:
    """A published folder, the iterations that retention deleted, and warnings."""

    folder: Path
    iteration: int
    deleted: Shape = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PendingSave(RankSave):
    """One rank's view of a save whose temporary folder exists.  Methods do not communicate."""

    format: Format
    pending: commit.Pending | None = None  # only on rank 0
    retention: Retention = KEEP_ALL

    @property
    def _pending(self) -> commit.Pending:
        assert self.pending is not None, "rank 0 publishes"
        return self.pending

    def publish(self, files: FileEntries) -> Path:
        """Make the folder with ``files`` a checkpoint; return its path."""
        return commit.publish(
            self._pending,
            self.contents.layout,
            files,
            write_config=self.contents.write_config,
            manifest_name=MANIFEST_BESIDE if self.format.is_foreign else MANIFEST,
        )

    def abandon(self) -> list[str]:
        """Remove the folder; return messages that explain why the save failed."""
        return commit.abandon(self._pending)

    def retire(self) -> tuple[list[int], list[str]]:
        """Delete older checkpoints; return their iterations, and warnings.

        A failed delete does not fail the save: the new checkpoint is published already.
        """
        deleted = []
        warnings = commit.report_once(self._pending.unreadable)
        for found in self.retention.select_expired(published(self.folder.parent)):
            try:
                assert found.iteration is not None, "published() returns no release"
                if commit.retire(found.folder, self.attempt, self.iteration):
                    deleted.append(found.iteration)
            except REPORTED as error:
                warnings.append(f"{found.folder} could not be deleted: {reason_of(error)}")
        return deleted, warnings

    def failed(self, reason: str) -> SaveFailed:
        """Return the error of this save."""
        return save_failed(self.folder.parent, self.iteration, reason)


def save(
    root: Path, iteration: int, contents: Contents, group: ProcessGroup | None, **options: Any
) -> SaveResult:
    """Publish a checkpoint of ``iteration`` in ``root``: `begin`, with its options, and `finish`.

    Collective.  Raises SaveFailed on every rank if any rank fails: then nothing was published.
    """
    return finish(begin(root, iteration, contents, group, **options), group)


def begin(
    root: Path,
    iteration: int,
    contents: Contents,
    group: ProcessGroup | None,
    *,
    share_work: bool = True,
    format: Format = SAFETENSORS_DIST,
    retention: Retention = KEEP_ALL,
    plan: SavePlan | None = None,
) -> PendingSave:
    """Check free space and create the temporary folder on rank 0.  Collective over ``group``.

    ``group`` spans all ranks, None is a world of one.  ``share_work``: data-parallel ranks share
    the writing.  ``retention`` deletes older checkpoints after this one is published.  ``plan``
    caches the assignment between saves.  Raises SaveFailed on every rank if rank 0 fails.
    """
    mine = to_write(contents.tensors, share_work, plan)
    sizes = gather_json(sum(tensor.num_bytes for tensor in mine), group)
    pending = None
    answer = {}
    if sizes is not None:
        try:
            num_bytes = format.num_copies * sum(sizes)
            pending = commit.create_folder(root, iteration, num_bytes, commit.claim(root))
            answer = {"folder": str(pending.folder), "attempt": pending.attempt}
        except REPORTED as error:
            answer = {"error": reason_of(error)}
    answer = broadcast_json(answer, group)
    if "error" in answer:
        raise save_failed(root, iteration, answer["error"])
    return PendingSave(
        iteration=iteration,
        folder=Path(answer["folder"]),
        attempt=answer["attempt"],
        rank=rank_in(group),
        pending=pending,
        tensors=mine,
        contents=contents,
        format=format,
        retention=retention,
    )


def finish(begun: PendingSave, group: ProcessGroup | None) -> SaveResult:
    """Write, publish and broadcast the verdict, synchronously.  Collective.  Raises SaveFailed."""
    reports = gather_json(write(begun), group)
    verdict = None if reports is None else complete(begun, reports)
    return conclude(begun, verdict, group)


def write(begun: PendingSave) -> JsonObject:
    """Write this rank's files; return its `RankReport` as JSON.  Not collective."""
    try:
        fault_point("save.write", step=begun.iteration)
        report = begun.format.write_rank_files(begun)
        fault_point("save.written", step=begun.iteration)
    except REPORTED as error:
        return not_written(error)
    return asdict(report)


def not_written(error: BaseException) -> JsonObject:
    """Return the result of a `write` that failed with ``error``."""
    return asdict(RankReport(error=reason_of(error)))


def complete(begun: PendingSave, written: Sequence[JsonObject]) -> JsonObject:
    """On rank 0: publish the folder if all ranks have written, else remove it.  Not collective.

    Returns the verdict: ``error``, or else the fields of `SaveResult`.

    ``written`` has the result of `write` of each rank.  Retention deletes older checkpoints only
    after the new one and its tracker are on disk.
    """
    reports = [RankReport.from_json(each) for each in written]
    errors = [f"rank {r}: {each.error}" for r, each in enumerate(reports) if each.error]
    if errors:
        return {"error": shorten([*begun.abandon(), *errors])}
    try:
        more = begun.format.write_common_files(begun.folder, reports, begun.contents.common)
        folder = begun.publish({**files_of(reports), **more})
    except REPORTED as error:
        begun.abandon()
        return {"error": f"rank 0: {reason_of(error)}"}
    deleted, warnings = begun.retire()
    return {"folder": str(folder), "deleted": deleted, "warnings": warnings}


def conclude(
    begun: PendingSave, verdict: JsonObject | None, group: ProcessGroup | None
) -> SaveResult:
    """Broadcast the result of `complete` from rank 0.  Collective.  Raises SaveFailed."""
    verdict = broadcast_json(verdict, group)
    assert verdict is not None
    if "error" in verdict:
        raise begun.failed(verdict["error"])
    return SaveResult(
        Path(verdict["folder"]),
        begun.iteration,
        tuple(verdict["deleted"]),
        tuple(verdict["warnings"]),
    )


def load(
    folder: Path,
    wanted: TensorRecords,
    group: ProcessGroup | None,
    *,
    strictness: str = "raise_all",
    leave_out: tuple[str, ...] = (),
    cast: bool = False,
    replica_groups: Mapping[str, ProcessGroup] | None = None,
) -> Differences:
    """Fill the views of ``wanted`` from the checkpoint in ``folder``, saved with any layout.

    Collective over ``group``, which spans all ranks; None is a world of one.  Keys that begin with
    a prefix in ``leave_out`` may be in the checkpoint unused.  ``cast`` allows another dtype.
    ``replica_groups``: see `_fill_shared`; without them each rank reads all the bytes it needs.
    Raises on every rank alike: CheckpointDamaged if files differ from what was written,
    CheckpointError if tensors do not match.  After a read error, ``wanted`` is partly filled.
    """
    check_strictness(strictness)
    keys = [t.key for t in wanted if t.replica is not None and t.replica.index == 0]
    reader, agreed = open_agreed(
        open_reader, folder, wanted, keys, group, strictness, leave_out, cast=cast
    )
    with reader:
        fill_all = partial(_fill_shared, wanted, reader, replica_groups or {}, cast)
        all_or_none(fill_all, folder, group)
    return agreed


def fill(wanted: TensorRecords, reader: CheckpointReader, *, cast: bool = False) -> None:
    """Read ``wanted`` from ``reader`` into its views, with several threads.  Not collective.

    Raises the error of the first tensor that fails; others may or may not be filled.
    """

    def fill_one(tensor: TensorRecord) -> float:
        fault_point("load.tensor")
        if tensor.key in reader.tensors:
            reader.load(tensor, cast=cast)
        return tensor.num_bytes / 1e9

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    threads = max(1, min(_MAX_THREADS, _num_cpus() // max(1, ranks)))
    total = sum(tensor.num_bytes for tensor in wanted) / 1e9
    with (
        ThreadPoolExecutor(threads) as pool,
        Progress(f"loading {reader.folder}", total, "GB") as progress,
    ):
        for part in weights_then_state(wanted):
            largest_first = sorted(part, key=lambda tensor: -tensor.num_bytes)
            for size in pool.map(fill_one, largest_first):
                progress.add(size)


def _num_cpus() -> int:
    """Return the number of CPUs of this process; a launcher may bind each rank to some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def open_agreed(
    open_folder: Callable[[Path], AnyReader],
    folder: Path,
    wanted: TensorRecords,
    keys: Sequence[str],
    group: ProcessGroup | None,
    strictness: str,
    leave_out: tuple[str, ...],
    *,
    cast: bool,
) -> tuple[AnyReader, Differences]:
    """Open the checkpoint on every rank; compare its keys with ``keys`` of all ranks.

    Collective.  Raises CheckpointError on every rank alike, also if ``wanted`` does not fit.
    """
    stored: Collection[str] = ()
    plan: JsonObject = {"wanted": list(keys)}
    try:
        reader = open_folder(folder)
        stored = reader.keys
        tensors = reader.tensors
        found = (mismatch(t, tensors[t.key], cast=cast) for t in wanted if t.key in tensors)
        plan["problems"] = [problem for problem in found if problem]
    except (CheckpointError, OSError) as error:
        plan["error"] = error_as_json(error)
    plans = gather_json(plan, group) or []
    compare = partial(permitted_differences, folder, plans, stored, strictness, leave_out)
    absent, unused = on_rank_0(compare, folder, group)
    return reader, Differences(tuple(absent), tuple(unused))


def save_failed(root: Path, iteration: int, reason: str) -> SaveFailed:
    """Return the error of a save."""
    return SaveFailed(
        f"the checkpoint of iteration {iteration} was not saved in {root}: {reason}; "
        "earlier checkpoints are complete"
    )


_READ_AHEAD = 4  # pieces of one rank in host memory before they are broadcast


def _fill_shared(
    wanted: TensorRecords,
    reader: CheckpointReader,
    groups: Mapping[str, ProcessGroup],
    cast: bool,
) -> None:
    """Fill the views of ``wanted`` from ``reader``.

    ``groups`` maps `Replica.among` to the group whose ranks hold the same pieces.  Collective over
    every group.  Raises CheckpointError and OSError after the last collective, on the rank that
    cannot read.
    """
    errors = []
    active = {among: group for among, group in groups.items() if group.size() > 1}
    for part in weights_then_state(wanted):
        for among, group in active.items():
            held = [t for t in part if t.key in reader.tensors and _among(t) == among]
            errors += _broadcast(held, reader, group)
        try:
            fill([t for t in part if _among(t) not in active], reader, cast=cast)
        except (CheckpointError, OSError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _among(tensor: TensorRecord) -> str | None:
    return None if tensor.replica is None else tensor.replica.among


@torch.no_grad()
def _broadcast(
    tensors: TensorRecords, reader: CheckpointReader, group: ProcessGroup
) -> list[Exception]:
    """Read this rank's share of ``tensors`` and broadcast it; return the errors of its reads."""
    errors: list[Exception] = []

    def empty(tensor: TensorRecord, piece: Piece | LazyPiece) -> Tensor:
        return torch.empty(piece.shape, dtype=reader.tensors[tensor.key].dtype)

    def read(tensor: TensorRecord, piece: Piece | LazyPiece) -> Tensor:
        buffer = empty(tensor, piece)
        try:
            fault_point("load.tensor")
            reader.read_box(tensor.key, piece.offset, buffer)
        except (CheckpointError, OSError) as error:
            errors.append(error)
        return buffer

    plan = [
        (tensor, piece, owner == group.rank(), owner)
        for tensor, _, owner in assign_replicas(tensors)
        for piece in tensor.pieces
    ]
    with ThreadPoolExecutor(_READ_AHEAD) as pool:
        calls = [partial(read, tensor, piece) for tensor, piece, is_mine, _ in plan if is_mine]
        buffers = _in_order(calls, pool)
        for tensor, piece, is_mine, owner in plan:
            buffer = next(buffers) if is_mine else empty(tensor, piece)
            sent = on_wire(buffer.reshape(-1).view(torch.uint8), group)
            dist.broadcast(sent, group=group, group_src=owner)
            values = sent.view(buffer.dtype).reshape(piece.shape)
            piece.fill(methodcaller("copy_", values))
    return errors


def _in_order(calls: Sequence[Callable[[], Tensor]], pool: ThreadPoolExecutor) -> Iterator[Tensor]:
    """Yield the results of ``calls`` in order, with up to `_READ_AHEAD` calls running ahead."""
    running: deque[Future[Tensor]] = deque()
    for call in calls:
        running.append(pool.submit(call))
        if len(running) == _READ_AHEAD:
            yield running.popleft().result()
    for future in running:
        yield future.result()
