"""One forward pass of the engine: the plan that rank 0 makes and all ranks execute, and its output.

A step processes rows: one row is one token of one request.  The rows of a request are consecutive
and form a segment.  Ranks send each other plans and outputs as arrays of int64 (`to_array`) over
gloo.  Order: rank 0 sends each rank the plans of its replica; ranks execute them in that order; the
rank of a replica that samples sends the result of each plan back.  Results arrive in the order of
the plans, since gloo keeps the order of messages between two ranks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.config.errors import LaunchError
from megatron.core.inference.paged_engine.request import Pooling, PromptImage

Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]

SAMPLE = -1  # target of an output row whose next token is to be sampled
NO_TOKEN = -1  # result of an output row without finite logits, or without an allowed token
NO_INTEGERS: Integers = np.empty(0, dtype=np.int64)
NO_VECTOR: Floats = np.empty(0, dtype=np.float32)
SAMPLE_ONLY: Integers = np.array([SAMPLE], dtype=np.int64)


class Segment(NamedTuple):
    """Rows of one request: ``tokens`` [n] at positions ``start`` to ``start + n - 1``.

    ``slot``: index of the request in the state of every rank, below --inference-max-requests.
    ``pages``: the pages that hold positions 0 to start + n - 1, in order, or a few more.
    ``targets`` [m]: one for each of the last m rows, whose logits are computed: the token that
    follows, whose log-probability is wanted, or `SAMPLE`.  Empty: a part of a prompt.
    ``ahead``: known tokens after the last row, as many as MTP layers read.  ``num_drafts``: drafts
    that MTP layers should give of the tokens after the sampled one.
    """

    slot: int
    start: int
    tokens: Integers
    pages: Integers
    targets: Integers
    ahead: Integers = NO_INTEGERS
    num_drafts: int = 0

    @property
    def num_keys(self) -> int:
        """Number of tokens in the cache after this step."""
        return self.start + len(self.tokens)


def idle_segment(slot: int, page: int, targets: Integers = NO_INTEGERS) -> Segment:
    """Return a row of no request, in the cache's extra ``slot`` and ``page``."""
    return Segment(slot, 0, np.zeros(1, np.int64), np.array([page]), targets)


@dataclass(frozen=True)
class Admission:
    """A request that takes ``slot`` in this step: its parameters and other facts for all ranks.

    ``params``: fields of `SamplingParams` with the seed set, as JSON values.  ``history``: all its
    tokens so far if penalties need them.  ``num_prompt``: number of tokens of its prompt.
    ``source``: tokens that an encoder reads.  ``start_length``: number of its tokens now, which
    chooses the frequencies of LongRoPE.  ``images``: of its prompt; ``image_starts``: the first row
    of each.  ``adapter``: number of the one that its rows have; 0 is none.
    ``pooling``: see `Request`.
    """

    slot: int
    params: Mapping[str, object]
    history: tuple[int, ...] = ()
    num_prompt: int = 0
    source: tuple[int, ...] = ()
    start_length: int = 0
    image_starts: tuple[int, ...] = ()
    images: tuple[PromptImage, ...] = ()
    adapter: int = 0
    pooling: Pooling | None = None

    @staticmethod
    def from_json(found: dict[str, Any]) -> Admission:
        """Return an admission from the JSON values of its fields."""
        lists = {name: tuple(found[name]) for name in ("history", "source", "image_starts")}
        images = tuple(map(PromptImage.from_json, found["images"]))
        return Admission(**{**found, **lists, "images": images})


@dataclass(frozen=True)
class StepPlan:
    """Segments of a step; before it, ``copies`` (from, to) of pages and ``admissions``.

    ``masks``: allowed tokens of the sampled rows of a slot, one bit a token in int32 words
    (llguidance's form), as int64 numbers.  Order on each rank: admissions, copies, forward,
    sampling.
    """

    segments: list[Segment] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    masks: dict[int, Integers] = field(default_factory=dict)

    @property
    def num_outputs(self) -> int:
        """Number of rows whose logits are computed."""
        return sum(len(s.targets) for s in self.segments)

    def to_array(self) -> Integers:
        """Return the plan as one array."""
        columns = [*zip(*self.segments, strict=True)] or [()] * len(Segment._fields)
        slots, starts, *arrays, num_drafts = columns
        admissions = json.dumps(self.admissions, default=_json_values)
        return pack(
            [
                slots,
                starts,
                *map(pack, arrays),
                num_drafts,
                [*chain.from_iterable(self.copies)],
                [*self.masks],
                pack(self.masks.values()),
                text_to_array(admissions),
            ]
        )

    @staticmethod
    def from_array(array: Integers) -> StepPlan:
        """Return the plan that `to_array` wrote."""
        slots, starts, *arrays, num_drafts, copies, masked, masks, text = unpack(array)
        numbers = (x.tolist() for x in (slots, starts))
        segments = map(Segment, *numbers, *map(unpack, arrays), num_drafts.tolist())
        return StepPlan(
            [*segments],
            [*map(Admission.from_json, json.loads(array_to_text(text)))],
            [(int(a), int(b)) for a, b in copies.reshape(-1, 2)],
            dict(zip(masked.tolist(), unpack(masks), strict=True)),
        )


def pack(arrays: Iterable[npt.ArrayLike]) -> Integers:
    """Return one array: the number of ``arrays``, the length of each, and their values."""
    parts = [np.asarray(array, dtype=np.int64) for array in arrays]
    return np.concatenate([np.array([len(parts), *map(len, parts)]), *parts])


def unpack(packed: Integers) -> list[Integers]:
    """Return the arrays that `pack` joined."""
    first = 1 + int(packed[0])
    ends = first + packed[1:first].cumsum()
    return [packed[a:b] for a, b in pairwise([first, *ends.tolist()])]


def _json_values(value: Any) -> object:
    return value.to_json() if isinstance(value, PromptImage) else vars(value)


def text_to_array(text: str) -> Integers:
    """Return a text with spaces at its end as int64, 8 bytes in each."""
    data = text.encode()
    return np.frombuffer(data + b" " * (-len(data) % 8), dtype=np.int64)


def array_to_text(array: Integers) -> str:
    """Return the text of `text_to_array`."""
    return array.tobytes().decode()


class StepOutput(NamedTuple):
    """Output rows of a step, in the order of the plan: r rows, n likely tokens each.

    ``tokens`` [r]: the sampled token, or the row's target, or `NO_TOKEN`: the request cannot go
    on.  ``log_probs`` [r]: its log-probability; 0 where the request does not ask for it.
    ``top_tokens`` and ``top_log_probs`` [r, n]: the most likely tokens, best first; n is the
    largest number that a request of the step asks for.  ``drafts`` [segments, d]: of MTP layers,
    after the sampled token of a segment; `NO_TOKEN` after its last draft.  ``vectors`` [p, h]: of
    the requests with ``pooling`` that end with this step.  ``routes`` [N, layers, k]: experts of
    all rows of the plan, if the engine records them; 0 in layers of other stages.
    """

    tokens: Integers = NO_INTEGERS
    log_probs: Floats = NO_INTEGERS.astype(np.float32)
    top_tokens: Integers = NO_INTEGERS.reshape(0, 0)
    top_log_probs: Floats = NO_INTEGERS.reshape(0, 0).astype(np.float32)
    drafts: Integers = NO_INTEGERS.reshape(0, 0)
    vectors: Floats = NO_INTEGERS.reshape(0, 0).astype(np.float32)
    routes: Integers = NO_INTEGERS.reshape(0, 0, 0)

    def to_array(self) -> Integers:
        """Return the output as one array; log-probabilities as the bits of float64."""
        floats = (self.log_probs, self.top_log_probs, self.vectors)
        bits = (x.astype(np.float64).ravel().view(np.int64) for x in floats)
        tables = (self.top_tokens, self.drafts, self.routes)
        shapes = (x.shape for x in (*tables, self.vectors))
        return pack([*shapes, self.tokens, *(x.ravel() for x in tables), *bits])

    @staticmethod
    def from_array(array: Integers) -> StepOutput:
        """Return the output that `to_array` wrote."""
        *shapes, tokens, top_tokens, drafts, routes, a, b, c = unpack(array)
        top_shape, drafts_shape, routes_shape, vectors_shape = shapes
        log_probs, top_log_probs, vectors = (
            x.view(np.float64).astype(np.float32) for x in (a, b, c)
        )
        return StepOutput(
            tokens,
            log_probs,
            top_tokens.reshape(top_shape),
            top_log_probs.reshape(top_shape),
            drafts.reshape(drafts_shape),
            vectors.reshape(vectors_shape),
            routes.reshape(routes_shape),
        )


_FIRST = 512  # numbers in the first message; longer ones need a second message
_MOST_PENDING = 256  # messages; each is received within a round of steps
# Ranks wait for the next plan as long as a server is idle; the death of the root ends the wait.
_LONGEST_IDLE = timedelta(days=3650)


class ControlChannel:
    """Sends and receives arrays between the first rank of ``world``, the root, and the others.

    Construction is collective over all ranks.  ``peers``: ranks of every channel that they
    construct at the same time, in the same order on all of them; default: ``world`` alone.
    ``timeout_s``: the longest wait for a result.  The channel has a group of its own:
    collectives of the model may be in flight at the same time.
    """

    def __init__(
        self,
        world: ProcessGroup,
        peers: Sequence[Sequence[int]] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.longest_step = timedelta(seconds=timeout_s)  # that the root waits for a result
        self.ranks = [0]  # global ranks, the root first; unused with one rank
        self._group: ProcessGroup | None = None
        # Tensors must live until gloo has sent them.
        self._pending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        if world.size() == 1:
            return
        self.ranks = dist.get_process_group_ranks(world)
        for ranks in peers or [self.ranks]:
            # Not use_local_synchronization: its name of a group is wrong on ranks that belong to
            # different numbers of groups.
            group = dist.new_group(
                list(ranks), timeout=_LONGEST_IDLE, backend="gloo", group_desc="generation control"
            )
            if list(ranks) == self.ranks:
                self._group = group

    @property
    def root(self) -> int:
        """Global rank of the process that plans."""
        return self.ranks[0]

    def send(self, array: Integers, rank: int) -> None:
        """Send to global ``rank`` without waiting: it may be sending to this rank itself."""
        first = np.zeros(_FIRST, dtype=np.int64)
        first[0] = len(array)
        head = array[: _FIRST - 1]
        first[1 : 1 + len(head)] = head
        self._start(torch.from_numpy(first), rank)
        if len(array) >= _FIRST:
            self._start(torch.from_numpy(np.ascontiguousarray(array[_FIRST - 1 :])), rank)
        while len(self._pending) > _MOST_PENDING:
            self._pending.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until all messages have been received."""
        while self._pending:
            self._pending.popleft()[0].wait()

    def _start(self, tensor: torch.Tensor, rank: int) -> None:
        work = dist.isend(tensor, rank, group=self._group)
        assert work is not None, "this rank is in the group"
        self._pending.append((work, tensor))

    def receive(self, rank: int) -> Integers:
        """Wait for the next message of global ``rank``."""
        first = torch.empty(_FIRST, dtype=torch.int64)
        self._receive(first, rank)
        length = int(first[0])
        if length < _FIRST:
            return first[1 : 1 + length].numpy()
        rest = torch.empty(length - _FIRST + 1, dtype=torch.int64)
        self._receive(rest, rank)
        return torch.cat([first[1:], rest]).numpy()

    def _receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill ``tensor``.  Raises LaunchError if ``rank`` ends, or takes too long for a step."""
        work = dist.irecv(tensor, rank, group=self._group)
        assert work is not None, "this rank is in the group"
        try:
            if rank == self.root:
                work.wait()
            else:
                work.wait(self.longest_step)
        except RuntimeError as error:
            reason = str(error).partition(". This")[0]  # before gloo's advice
            what = "plans" if rank == self.root else "the result of a step"
            raise LaunchError(
                f"rank {rank} has not sent {what}: {reason}; look for its last message, and start "
                "all ranks again"
            ) from error

    def all_reduce_min(self, numbers: torch.Tensor) -> None:
        """Replace ``numbers`` by their minima over all ranks.  Collective."""
        if self._group is not None:
            dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self._group)
