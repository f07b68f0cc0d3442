"""Several runs that save to one directory: each in a process and with a clock of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.commit import newest_token, take_token, token_of
from megatron.core.dist_checkpointing.folders import TRACKER, choose, published
from megatron.core.dist_checkpointing.manifest import MANIFEST, MANIFEST_BESIDE
from tests.support.tiny_checkpoint import names_in, publish_model
from tests.unit.dist_checkpointing.test_commit import calls_of, run_and_kill

HOUR_NS = 3600 * 10**9
OF_AN_EARLIER_VERSION = f"{time.time_ns():x}-0123abcd"


class Run:
    """A process that uses ``root``; what it is asked to do raises here what it raises there."""

    def __init__(self, root: Path, *, manifest: str = MANIFEST, clock_ns: int = 0) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, root, manifest, clock_ns))
        self.process.start()
        self.ask("claim")

    def ask(self, what: str, iteration: int = 0) -> Any:
        self._pipe.send((what, iteration))
        return self.answer()

    def send(self, what: str, iteration: int = 0) -> None:
        self._pipe.send((what, iteration))

    def answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Any, root: Path, manifest: str, clock_ns: int) -> None:
    now = time.time_ns
    time.time_ns = lambda: now() + clock_ns
    time.time = lambda: time.time_ns() / 1e9
    commit._claimed.clear()
    commit.attempt_id.cache_clear()
    pending: commit.Pending | None = None
    while True:
        what, iteration = pipe.recv()
        try:
            if what == "claim":
                commit.claim(root)
            if what in ("begin", "save"):
                pending = commit.create_folder(root, iteration, 0, commit.claim(root))
            if what in ("publish", "save"):
                assert pending is not None
                commit.publish(pending, {}, {}, manifest_name=manifest)
            pipe.send(pending and str(pending.folder))
        except Exception as error:
            pipe.send(error)


@pytest.fixture
def start(tmp_path) -> Iterator[Any]:
    runs: list[Run] = []

    def make(**more: Any) -> Run:
        runs.append(Run(tmp_path, **more))
        return runs[-1]

    yield make
    for run in runs:
        run.process.kill()
        run.process.join()


@pytest.mark.feature("Checkpoints: a run that was replaced but still lives cannot save any more")
@pytest.mark.parametrize("manifest", [MANIFEST, MANIFEST_BESIDE])
@pytest.mark.parametrize("clock_ns", [0, -HOUR_NS, HOUR_NS])
def test_a_run_that_was_replaced_but_still_lives_cannot_publish(
    tmp_path, start, clock_ns, manifest
):
    """Whatever the clock of its successor says, and though it hung before its first save."""
    old = start(manifest=manifest)
    hangs = start(manifest=manifest)
    hangs.ask("begin", 8)
    new = start(manifest=manifest, clock_ns=clock_ns)
    new.ask("save", 5)
    for ask in (partial(hangs.ask, "publish"), partial(hangs.ask, "save", 6)):
        with pytest.raises(CheckpointError, match=r"iter_0000005 was .* started later \(00000003-"):
            ask()
    with pytest.raises(CheckpointError, match="must not save here any more"):
        old.ask("save", 9)
    assert choose(tmp_path).found.iteration == 5
    new.ask("save", 6)
    start(clock_ns=-2 * HOUR_NS).ask("save", 7)
    assert choose(tmp_path).found.iteration == 7
    assert (tmp_path / TRACKER).read_text() == "7"


def test_an_earlier_run_leaves_the_folder_of_a_later_one_alone(tmp_path, start):
    old, new = start(), start(clock_ns=-HOUR_NS)
    folder = Path(new.ask("begin", 5))
    old.ask("save", 8)
    assert folder.is_dir()
    new.ask("publish")
    assert choose(tmp_path).found.iteration == 5
    assert names_in(tmp_path) == ["iter_0000005", "iter_0000008", TRACKER]


def test_a_start_that_dies_before_its_first_save_stops_nobody(tmp_path, start):
    long_run = start()
    long_run.ask("save", 4)
    start().process.kill()
    long_run.ask("save", 8)
    assert choose(tmp_path).found.iteration == 8


def test_what_a_dead_run_left_goes_whatever_its_step(tmp_path, start):
    dead = start()
    dead.ask("save", 3)
    dead.ask("begin", 9)
    dead.process.kill()
    (tmp_path / f"{TRACKER}.tmp-00000001-x").touch()
    (tmp_path / "iter_0000007.del-00000004-x").mkdir()
    (tmp_path / "iter_0000003").rename(tmp_path / "iter_0000003.old-00000001-x")
    for name in ("iter_0000009.tmp-00000002-x", "iter_0000009.old-00000004-x"):
        (tmp_path / name).mkdir()
    run = start()  # token 5: above all names that are there
    run.ask("save", 4)
    assert names_in(tmp_path) == ["iter_0000003", "iter_0000004", "iter_0000009", TRACKER]
    assert [path.name for path in tmp_path.glob(".attempt-*")] == [".attempt-00000005"]


@pytest.mark.parametrize("point", ["save.after_rename", "save.before_rename", "save.displaced"])
def test_a_run_that_is_stopped_in_its_publish_does_not_go_before_its_successor(
    tmp_path, start, point, monkeypatch
):
    publish_model(tmp_path, 8)
    monkeypatch.setenv("FAULTS", f"{point}:stop")
    stopped = start()
    monkeypatch.delenv("FAULTS")
    new = start()
    stopped.ask("begin", 8)
    stopped.send("publish")
    assert os.WIFSTOPPED(os.waitpid(stopped.process.pid, os.WUNTRACED)[1])
    new.ask("save", 5)
    os.kill(stopped.process.pid, signal.SIGCONT)
    with pytest.raises((CheckpointError, OSError), match="must not save here|not empty|No such"):
        stopped.answer()
    assert choose(tmp_path).found.iteration == 5
    assert published(tmp_path)[0].iteration == 5
    assert (tmp_path / TRACKER).read_text() == "5"


def test_checkpoints_of_an_earlier_version_are_read_in_their_order_and_replaced_by_no_clock(
    tmp_path, start
):
    for iteration in (5, 10, 7):
        commit.publish(commit.create_folder(tmp_path, iteration, 0, OF_AN_EARLIER_VERSION), {}, {})
    (tmp_path / f"iter_0000020.tmp-{OF_AN_EARLIER_VERSION}").mkdir()
    assert token_of(OF_AN_EARLIER_VERSION) == 0
    assert [found.iteration for found in published(tmp_path)] == [7, 10, 5]
    start(clock_ns=-HOUR_NS).ask("save", 8)
    assert [found.iteration for found in published(tmp_path)] == [8, 7, 10, 5]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_processes_that_claim_at_the_same_time_have_different_tokens(tmp_path):
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            try:
                tokens = [take_token(tmp_path, ()) for _ in range(20)]
                (tmp_path / f"tokens-{os.getpid()}").write_text(json.dumps(tokens))
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    lists = [json.loads(path.read_text()) for path in tmp_path.glob("tokens-*")]
    assert len(lists) == 8
    assert all(tokens == sorted(tokens) for tokens in lists)
    flat = [token for tokens in lists for token in tokens]
    assert len(set(flat)) == len(flat)
    assert newest_token(tmp_path) == max(flat)


def test_a_kill_at_any_moment_of_a_claim_leaves_the_next_one_a_higher_token(tmp_path):
    take_token(tmp_path, ())
    calls = calls_of(partial(take_token, tmp_path, ()))
    rng = random.Random(0)
    for _ in range(25):
        before = newest_token(tmp_path)
        run_and_kill(partial(take_token, tmp_path, ()), rng.randrange(1, calls + 2))
        assert newest_token(tmp_path) >= before
        assert take_token(tmp_path, ()) > before
    assert len(list(tmp_path.glob(".attempt-*"))) == 1


def test_a_claim_is_above_those_of_checkpoints_that_were_copied_without_it(tmp_path, start):
    first = start()
    first.ask("save", 1)
    for path in tmp_path.glob(".attempt-*"):
        path.unlink()
    start().ask("save", 2)
    assert [token_of(found.manifest.attempt) for found in published(tmp_path)] == [2, 1]
    with pytest.raises(CheckpointError, match="must not save here"):
        first.ask("save", 3)
