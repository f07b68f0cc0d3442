"""The generation engine: rank 0 schedules the requests of all replicas, all ranks compute.

Rank 0 is the first rank of the group ``world`` of the model: the ranks of the engine.

A replica is one copy of the model: tp x pp ranks.  It has one scheduler for each pipeline stage
(lane): while one lane's step is in a stage, the other stages work on the steps of other lanes.
With expert parallelism the replicas communicate in a forward pass, so they step together; one
without work then computes an idle row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, product

import numpy as np
import torch

from megatron.core import device
from megatron.core.config.errors import CheckpointError, ConfigError, MissingDependency
from megatron.core.device import cpu_kernels
from megatron.core.diagnostics.collective_tracer import waiting_for_work
from megatron.core.inference.grammar import GrammarMatcher
from megatron.core.inference.paged_engine.cache import PagedCache
from megatron.core.inference.paged_engine.options import EngineLimits
from megatron.core.inference.paged_engine.options import EngineOptions as EngineOptions
from megatron.core.inference.paged_engine.pages import PagePool
from megatron.core.inference.paged_engine.request import (
    Request,
    RequestError,
    RequestOutput,
    TokenOutput,
    check_grammar,
    check_tokens,
    generation_length,
)
from megatron.core.inference.paged_engine.runner import GenerationModel, ModelRunner
from megatron.core.inference.paged_engine.scheduler import RequestScheduler
from megatron.core.inference.paged_engine.step_plan import (
    Admission,
    ControlChannel,
    Integers,
    StepOutput,
    StepPlan,
    idle_segment,
)
from megatron.core.inference.refit import Refit, note_new_weights

_MOST_REQUESTS = 256  # that run at the same time, unless more are asked for
_BUFFER = "--inference-dynamic-batching-buffer-size-gb"
_PAGES_WITHOUT_ATTENTION = 2**20  # of a model whose layers are all recurrent
_SHARE_OF_MEMORY = 0.9  # of what is free, for the KV cache at most
_PAUSE_S = 0.001  # of a step without work
_STOP, _PLAN, _UPDATE, _LOAD, _DROP = range(5)  # first number of a message to the other ranks


@dataclass(frozen=True)
class EngineStats:
    """Requests and pages of all replicas at this moment, and drafts of all steps so far.

    ``num_draft_steps``: steps of a request that verified drafts; ``tokens_per_step``: tokens that
    such a step gave on average, 1 without drafts.
    """

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    num_draft_steps: int = 0
    tokens_per_step: float = 1.0

    @property
    def drafts(self) -> str:
        """A sentence on the drafts, to print."""
        return (
            f"{self.tokens_per_step:.3f} tokens in a step with drafts ({self.num_draft_steps} "
            f"steps, {self.num_accepted_drafts} of {self.num_drafts} drafts accepted)"
        )


class Engine:
    """Generates tokens for requests.

    Construction is collective over all ranks.  Then rank 0 calls `add` and `step`, and at the end
    `close`; the other ranks call `follow`, which returns after `close`.
    """

    def __init__(
        self,
        model: GenerationModel,
        options: EngineOptions,
        peers: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """``peers``: ranks of all engines that are constructed at the same time; default: one."""
        groups = model.groups
        self.model = model
        self.options = options
        self._channel = ControlChannel(groups.world, peers, options.timeout_s)
        self._num_lanes = groups.pp.size()
        num_replicas = groups.dp.size()
        self._in_lockstep = groups.ep.size() > 1
        longest = min(
            options.max_sequence_length or model.max_sequence_length, model.max_sequence_length
        )
        num_draft_layers = model.num_draft_layers(options)
        self._page_size = 256 if device.is_cuda(model.device) else 16
        if options.page_size is not None:  # more than the longest sequence is never used
            most = -(-longest // self._page_size) * self._page_size
            self._page_size = min(options.page_size, most)
        probe = self._new_runner(1, 1)
        num_pages = self._num_fitting_pages(probe)
        if options.max_sequence_length is None:  # a wish is kept; a longer request is refused
            longest = min(longest, num_pages * self._page_size)
        in_sequence = -(-longest // self._page_size)
        slots = options.max_requests
        if slots is None:
            slots = min(int(num_pages // in_sequence * options.overflow_factor), _MOST_REQUESTS)
        slots = min(slots, num_pages)  # a running request has a page at least
        slots = max(slots // self._num_lanes, 1) * self._num_lanes
        num_pages = min(num_pages, slots * in_sequence)
        self._runner = self._new_runner(num_pages, slots)
        has_recurrent_layers = self._allocate(probe.cache)
        if num_draft_layers and has_recurrent_layers:
            raise ConfigError(
                f"--inference-draft-model {options.draft_model}: the model has recurrent layers, "
                "whose states cannot be taken back after a rejected draft; leave the flag out"
            )
        self._idle = self._idle_plan(self._runner)
        self.limits = EngineLimits(
            page_size=self._page_size,
            num_pages=num_pages,
            max_requests=slots,
            max_step_tokens=options.max_step_tokens,
            max_sequence_length=longest,
            max_waiting=options.max_waiting,
            has_prefix_cache=options.has_prefix_cache,
            has_recurrent_layers=has_recurrent_layers,
            keeps_images_whole=model.sees_images_whole,
            num_draft_tokens=options.num_draft_tokens,
            num_draft_layers=num_draft_layers,
            num_reserved_pages=int(num_pages * options.guaranteed_fraction),
        )
        longest_short = model.config.longrope_original_max_position_embeddings
        c = model.config
        of_routes = (c.num_layers, c.moe_router_topk) if options.records_routes else None
        self._pools = [
            PagePool(num_pages, self._page_size, num_draft_layers, longest_short, of_routes)
            for _ in range(num_replicas)
        ]
        in_lane = slots // self._num_lanes
        self._schedulers = {
            (replica, lane): RequestScheduler(
                self.limits, pool, range(lane * in_lane, (lane + 1) * in_lane), model.eod
            )
            for replica, pool in enumerate(self._pools)
            for lane in range(self._num_lanes)
        }
        self._home: dict[str, RequestScheduler] = {}
        self.adapters: dict[str, int] = {}  # those that requests may name, with their numbers
        self._numbers = count(1)
        self._leaving: set[int] = set()  # numbers of adapters that only unfinished requests have
        # Kind and text of a grammar -> its matcher; None: this engine has no grammars.
        self.make_matcher: Callable[[str, str], GrammarMatcher] | None = None
        self._lane = 0
        self._num_steps = 0
        self._held: list[RequestOutput] = []  # that the next `step` returns
        self._flights: dict[tuple[int, int], tuple[StepPlan, StepOutput | None]] = {}

    # ---- rank 0 ------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return the planned size of the KV cache, as a line for the log."""
        limits = self.limits
        size = limits.num_pages * self._runner.cache.bytes_per_page / 2**30
        num_tokens = limits.num_pages * limits.page_size
        return (
            f"KV cache: {size:.3g} GB on each rank for {num_tokens} tokens; "
            f"at most {limits.max_requests} requests run at the same time, of up to "
            f"{limits.max_sequence_length} tokens each"
        )

    def prepare(self, request: Request) -> bool:
        """Begin to compile the grammar of a request; return whether `add` need not wait for it.

        Raises RequestError for a grammar that is refused at once; QueueFullError: many are in use.
        """
        if request.grammar is not None and request.matcher is None and self.make_matcher:
            request.matcher = self.make_matcher(*request.grammar)
        return request.matcher is None or request.matcher.is_ready()

    def add(self, request: Request) -> None:
        """Queue a request.  Raises RequestError: it can never run; QueueFullError: many wait."""
        self._check_content(request)
        if not self.prepare(request) and request.matcher is not None:
            request.matcher.allowed()  # wait for it
        request.adapter_number = self.adapters[request.adapter] if request.adapter else 0
        scheduler = self._home.get(request.fork_of or "") or min(
            self._schedulers.values(), key=lambda s: s.num_running + s.num_waiting
        )
        scheduler.add(request)
        self._home[request.request_id] = scheduler

    def check(self, request: Request) -> None:
        """Raise RequestError if a request can never run; other ranks can call it too."""
        self._check_content(request)
        check_grammar(request)
        generation_length(request, self.limits)

    def _check_content(self, request: Request) -> None:
        if request.images and not self.model.reads_images:
            raise RequestError("this model reads no images: give a text", "images")
        longest = max((image.num_rows for image in request.images), default=0)
        if self.limits.keeps_images_whole and longest > self.limits.max_step_tokens:
            raise RequestError(
                f"an image has {longest} embeddings, and a step, which must compute all of them, "
                f"has {self.limits.max_step_tokens} tokens: raise max_step_tokens "
                "(--inference-dynamic-batching-max-tokens-override)",
                "images",
            )
        check_tokens(request, self.model.vocab_size)
        if request.pooling and self.model.decoder_start is not None:
            raise RequestError("an encoder-decoder has no vectors of texts here", "model")
        if request.adapter is not None and request.adapter not in self.adapters:
            raise RequestError(f"the adapter {request.adapter!r:.80} is not loaded", "model")

    def abort(self, request_id: str) -> bool:
        """End a request without further output; return whether it was there."""
        scheduler = self._home.pop(request_id, None)
        return scheduler is not None and scheduler.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._flights or self._held) or any(
            s.has_unfinished for s in self._schedulers.values()
        )

    def stats(self) -> EngineStats:
        """Count requests and pages."""
        schedulers = self._schedulers.values()
        accepted = sum(s.num_accepted_drafts for s in schedulers)
        steps = sum(s.num_draft_steps for s in schedulers)
        return EngineStats(
            sum(s.num_running for s in schedulers),
            sum(s.num_waiting for s in schedulers),
            sum(pool.num_free for pool in self._pools),
            self.limits.num_pages * len(self._pools),
            sum(s.num_drafts for s in schedulers),
            accepted,
            steps,
            1 + accepted / max(steps, 1),
        )

    def _log_step(self) -> None:
        self._num_steps += 1
        interval = self.options.log_interval
        if interval and self._num_steps % interval == 0:
            now = self.stats()
            used = now.num_pages - now.num_free_pages
            print(
                f"engine step {self._num_steps}: {now.num_running} requests run, "
                f"{now.num_waiting} wait, {used} of {now.num_pages} KV pages are in use",
                flush=True,
            )

    @waiting_for_work(False)
    def step(self) -> list[RequestOutput]:
        """Run the next step of one lane of each replica; return its outputs of requests."""
        lane = self._lane
        outputs = self._held
        self._held = []
        self._lane = (lane + 1) % self._num_lanes
        if self._leaving:
            self._drop_adapters()
        if self._num_lanes > 1:  # sent one round ago: the other stages have worked meanwhile
            outputs += self._collected(lane)
        plans = {
            replica: self._schedulers[replica, lane].plan() for replica in range(len(self._pools))
        }
        if any(plans.values()):
            self._run(
                {r: p or self._idle for r, p in plans.items() if p or self._in_lockstep}, lane
            )
            self._log_step()
        if self._num_lanes == 1:
            outputs += self._collected(lane)
        if not (any(plans.values()) or self._flights):  # all requests wait for their grammars
            time.sleep(_PAUSE_S)
        return outputs

    @property
    def weight_version(self) -> int:
        """Number of times that the weights were replaced."""
        return self._pools[0].weight_version

    @waiting_for_work(False)
    def update_weights(self, checkpoint: str) -> int:
        """Load the weights of a checkpoint directory, while the other ranks follow.

        Returns the new weight version.  Running requests go on: the new weights compute the keys
        of their tokens again.
        CheckpointError: the checkpoint is damaged or of another model, and the old weights stay.
        """
        assert self.model.load_weights is not None, "the model has no checkpoint to load"
        self._finish_steps()
        self._tell_others(_with_path(checkpoint, _UPDATE))
        self.model.load_weights(checkpoint)
        self.use_new_weights()
        self._start_anew()
        return self.weight_version

    @waiting_for_work(False)
    def load_adapter(self, name: str, folder: str) -> None:
        """Load the adapter in ``folder``, while the other ranks follow; requests can name it.

        Requests of an adapter that had this name go on with it.  CheckpointError: ``folder`` holds
        none of this model; ConfigError: this engine has no adapters.
        """
        if self.model.load_adapter is None:
            raise ConfigError(f"adapter {name}: only GPT and Mamba models have adapters")
        if self.options.batch_invariant or self.options.draft_model != "ngram":
            raise ConfigError(
                f"adapter {name}: not with --inference-batch-invariant or --inference-draft-model "
                "mtp or heads; start without them, or merge the adapter into its model"
            )
        self._finish_steps()
        number = next(self._numbers)
        self._tell_others(_with_path(folder, _LOAD, number))
        self._runner.adapters.load(number, self.model.load_adapter(folder))
        self.unload_adapter(name)
        self.adapters[name] = number

    def unload_adapter(self, name: str) -> bool:
        """Refuse the name in new requests; return whether it was there.

        The adapter is freed when no request has it any more.
        """
        number = self.adapters.pop(name, None)
        if number is not None:
            self._leaving.add(number)
        return number is not None

    def _drop_adapters(self) -> None:
        used = set[int]().union(*(s.adapters for s in self._schedulers.values()))
        for number in self._leaving - used:
            self._tell_others(np.array([_DROP, number]))
            self._runner.adapters.drop(number)
        self._leaving &= used

    def reset_prefix_cache(self) -> None:
        """Let no later request use the pages of those before."""
        for pool in self._pools:
            pool.invalidate(pool.weight_version)

    def generate(self, requests: Iterable[Request]) -> dict[str, list[TokenOutput]]:
        """Run requests to their end; return the tokens of each by its id."""
        requests = list(requests)
        out: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
        for output in self.run_to_end(requests):
            out[output.request_id] += output.new
        return out

    def run_to_end(self, requests: Iterable[Request]) -> Iterator[RequestOutput]:
        """Add requests and step until none is unfinished; yield the outputs of each step."""
        for request in requests:
            self.add(request)
        while self.has_unfinished:
            yield from self.step()

    def close(self) -> None:
        """Let the other ranks return from `follow`."""
        self._tell_others(np.array([_STOP]))
        self._channel.flush()
        self._runner.release()

    def _tell_others(self, message: Integers) -> None:
        for rank in self._channel.ranks[1:]:
            self._channel.send(message, rank)

    def _run(self, plans: dict[int, StepPlan], lane: int) -> None:
        """Send each plan to the ranks of its replica; execute the plan of this rank's replica."""
        groups = self.model.groups
        for replica, plan in plans.items():
            places = product(range(self._num_lanes), range(groups.tp.size()))
            ranks = {self._rank(dp=replica, pp=pp, tp=tp) for pp, tp in places}
            if others := ranks - {self._channel.root}:
                message = np.concatenate([[_PLAN], plan.to_array()])
                for rank in others:
                    self._channel.send(message, rank)
            self._flights[replica, lane] = plan, None
        if 0 in plans:
            self._flights[0, lane] = plans[0], self._runner.execute(plans[0])

    def _collected(self, lane: int) -> list[RequestOutput]:
        """Wait for the output of the lane's steps in flight, and record it."""
        outputs = []
        for replica in range(len(self._pools)):
            if (replica, lane) not in self._flights:
                continue
            plan, result = self._flights.pop((replica, lane))
            for stage in range(self._num_lanes):
                # Each stage sends its routes; without them only the last one has a result.
                is_last = stage == self._num_lanes - 1
                sender = self._rank(dp=replica, pp=stage, tp=0)
                if sender == self._channel.root or not (
                    self.options.records_routes or (is_last and plan.num_outputs)
                ):
                    continue
                found = StepOutput.from_array(self._channel.receive(sender))
                if result is not None:
                    found = found._replace(routes=found.routes + result.routes)
                result = found
            if plan is not self._idle:
                outputs += self._schedulers[replica, lane].record(plan, result or StepOutput())
        for output in outputs:
            if output.finish_reason is not None:
                self._home.pop(output.request_id, None)
        return outputs

    def _finish_steps(self) -> None:
        """Wait for all steps in flight; the next `step` returns their outputs."""
        for i in range(self._num_lanes):
            self._held += self._collected((self._lane + i) % self._num_lanes)

    def _start_anew(self) -> None:
        """Raise the weight version; keys and values of the weights before are not used again."""
        version = self.weight_version + 1
        for scheduler in self._schedulers.values():
            scheduler.pre_empt_all()
        for pool in self._pools:
            pool.invalidate(version)

    # ---- all ranks ---------------------------------------------------------------------------

    def refit(self, weights: Refit) -> None:
        """Copy weights from the model in training.  Collective over all ranks; none follows.

        Running requests go on: see `update_weights`.
        """
        is_root = self.model.groups.world.rank() == 0
        if is_root:
            self._finish_steps()
            self.close()
        else:
            self.follow()
        weights.copy()
        self.use_new_weights()
        if is_root:
            self._start_anew()

    def use_new_weights(self) -> None:
        """Forget on this rank what was computed from the weights before."""
        note_new_weights(self.model.module)
        self._runner.release()

    # ---- the other ranks ---------------------------------------------------------------------

    @waiting_for_work(False)
    def follow(self) -> None:
        """Execute the plans of rank 0 until it closes the engine."""
        while True:
            with waiting_for_work(True):
                message = self._channel.receive(self._channel.root)
            if message[0] == _STOP:
                self._channel.flush()
                self._runner.release()
                return
            if message[0] == _UPDATE:
                assert self.model.load_weights is not None, "rank 0 has checked it"
                with suppress(CheckpointError):  # rank 0 reports it
                    self.model.load_weights(_path_in(message[1:]))
                    self.use_new_weights()
                continue
            if message[0] == _LOAD:
                assert self.model.load_adapter is not None, "rank 0 has checked it"
                with suppress(CheckpointError):  # rank 0 reports it
                    adapter = self.model.load_adapter(_path_in(message[2:]))
                    self._runner.adapters.load(int(message[1]), adapter)
                continue
            if message[0] == _DROP:
                self._runner.adapters.drop(int(message[1]))
                continue
            result = self._runner.execute(StepPlan.from_array(message[1:]))
            if result is not None and (len(result.tokens) or len(result.routes)):
                self._channel.send(result.to_array(), self._channel.root)

    # ---- set-up ------------------------------------------------------------------------------

    def _new_runner(self, num_pages: int, slots: int) -> ModelRunner:
        dtype = cache_dtype(self.options, self.model)
        of_states = [None if name is None else _DTYPES[name] for name in self.options.state_dtypes]
        cache = PagedCache(num_pages, self._page_size, slots, dtype, of_states)
        return ModelRunner(self.model, cache, self.options)

    def _num_fitting_pages(self, probe: ModelRunner) -> int:
        """Return how many pages fit into every rank's buffer, and into its free memory.

        An idle step of ``probe``, whose cache has one page, shows the size of a page in all layers.
        Collective over all ranks.  Raises ConfigError if no page fits.
        """
        probe.execute(self._idle_plan(probe))
        cost = probe.cache.bytes_per_page
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        free_bytes = int(device.free_memory(ranks_here) * _SHARE_OF_MEMORY)
        buffer_bytes = min(self.options.buffer_bytes, free_bytes)
        fitting = torch.tensor([buffer_bytes // cost if cost else _PAGES_WITHOUT_ATTENTION])
        self._channel.all_reduce_min(fitting)
        if fitting == 0:
            raise ConfigError(
                f"{_BUFFER} {buffer_bytes / 2**30:.3g}: the KV cache holds no page of "
                f"{self._page_size} tokens, which takes {cost} bytes; give more"
            )
        return int(fitting)

    def _allocate(self, like: PagedCache) -> bool:
        """Allocate the cache for the layers of ``like``; return if there are recurrent layers.

        Collective over all ranks.  Raises ConfigError on all if one has too little memory.
        """
        cache = self._runner.cache
        world = self.model.groups.world
        lacking = world.size()
        try:
            cache.allocate(like)
        except (RuntimeError, MemoryError):  # of torch: it only allocates
            lacking = world.rank()
            cache.clear()
        found = torch.tensor([lacking, not like.states])
        self._channel.all_reduce_min(found)
        lacking, is_stateless = found.tolist()
        if lacking < world.size():
            size = cache.num_pages * like.bytes_per_page
            raise ConfigError(
                f"{_BUFFER} {self.options.buffer_bytes / 2**30:g}: rank {lacking} has too little "
                f"memory for the KV cache of {cache.num_pages} pages of {cache.page_size} tokens, "
                f"{size / 2**30:.3g} GB on this rank; lower it"
            )
        return not is_stateless

    def _idle_plan(self, runner: ModelRunner) -> StepPlan:
        """Return a step of one row in the cache's extra page and slot, without output."""
        slot = runner.cache.max_requests
        source = (0,) if self.model.decoder_start is not None else ()
        segment = idle_segment(slot, runner.cache.num_pages)
        return StepPlan([segment], [Admission(slot, {}, source=source)])

    def _rank(self, **coordinate: int) -> int:
        grid = self.model.groups.dense_grid
        return self._channel.ranks[
            grid.rank(**{axis: coordinate.get(axis, 0) for axis in grid.sizes})
        ]


def _with_path(path: str, *numbers: int) -> Integers:
    """Return a message to other ranks.  Raises CheckpointError for a path that none can open."""
    if "\0" in path:
        raise CheckpointError(f"{path!r} is no directory: a path has no NUL character")
    return np.array([*numbers, *os.fsencode(path)])


def _path_in(numbers: Integers) -> str:
    return os.fsdecode(numbers.astype(np.uint8).tobytes())


_DTYPES = {
    "auto": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
}


def cache_dtype(options: EngineOptions, model: GenerationModel) -> torch.dtype | None:
    """Return the dtype of keys and values in pages; None: the dtype of the model.

    Raises ConfigError on a GPU, whose kernels read the dtype of the model only, and
    MissingDependency if the compiled kernels that batch invariance needs cannot read the dtype.
    """
    flag = f"--inference-kv-cache-dtype {options.kv_cache}"
    dtype = _DTYPES[options.kv_cache]
    if dtype is None:
        return None
    if device.is_cuda(model.device):
        raise ConfigError(
            f"{flag} runs on a CPU only: use auto; a model in bf16 has keys and values of 16 bits"
        )
    if options.batch_invariant and not cpu_kernels.has("paged_attention", dtype):
        raise MissingDependency(
            f"{flag} with --inference-batch-invariant needs compiled kernels of this version: "
            "python setup.py build_ext --inplace"
        )
    return dtype
