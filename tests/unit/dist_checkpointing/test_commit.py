"""A save that is killed, or fails, anywhere leaves a whole checkpoint."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing import all_ranks, commit
from megatron.core.dist_checkpointing.all_ranks import SaveFailed, begin, fill, load, save
from megatron.core.dist_checkpointing.folders import (
    TRACKER,
    Retention,
    choose,
    published,
    read_tracker,
)
from megatron.core.dist_checkpointing.formats import FORMATS, Contents
from megatron.core.dist_checkpointing.manifest import FileEntry
from megatron.core.dist_checkpointing.records import ParamInfo, from_param
from tests.support.tiny_checkpoint import names_in, publish_model, read_all

NUM_KILLS = 30
POINTS = [
    "save.claimed",
    "save.begin",
    "save.write",
    "save.tensor",
    "save.before_fsync",
    "save.written",
    "save.before_manifest",
    "save.before_rename",
    "save.displaced",
    "save.after_rename",
    "save.before_tracker",
    "save.after_tracker",
    "save.before_delete",
    "save.in_delete",
]


def contents(iteration: int) -> Contents:
    """Several tensors that all hold the number of the iteration."""
    tensors = [
        from_param(f"t{i}", ParamInfo(global_shape=(8, i)), torch.full((8, i), float(iteration)))
        for i in range(1, 5)
    ]
    return Contents(
        tensors=tensors,
        rank_state={"rng_state": iteration},
        common={"iteration": iteration, "args": {}},
    )


def save_and_retire(root: Path, iteration: int) -> None:
    """What the first save of a run does, retention included."""
    commit._claimed.clear()
    save(root, iteration, contents(iteration), None, retention=Retention(last=1))


def assert_whole(folder: Path, iteration: int) -> None:
    for key, tensor in read_all(folder).items():
        assert (tensor == iteration).all(), f"{key} of iteration {iteration} is mixed"


def loadable(root: Path) -> int | None:
    """The iteration that would be loaded; every byte of it and of the older ones is verified."""
    choice = choose(root)
    if choice is None:
        return None
    for found in (choice.found, *choice.older):
        assert_whole(found.folder, found.iteration)
    return choice.found.iteration


def names_of_published(root: Path) -> list[str]:
    return [TRACKER, *(found.folder.name for found in published(root))]


def run_and_kill(action: Callable[[], object], call: int) -> int:
    """Run ``action`` in a forked process, killed at its ``call``-th function call; exit status."""
    child = os.fork()
    if child == 0:
        left = call

        def count(frame, event, argument):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(count)
            action()
            sys.setprofile(None)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def calls_of(action: Callable[[], object]) -> int:
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    action()
    sys.setprofile(None)
    return calls


def calls_in_a_save(root: Path) -> int:
    save_and_retire(root, 1)
    return calls_of(partial(save_and_retire, root, 2))


@pytest.mark.feature("Checkpoints: a kill at any moment of a save leaves a whole checkpoint")
def test_a_storm_of_kills_never_loses_a_checkpoint_and_never_loads_a_partial_one(tmp_path):
    """SIGKILL at random function calls, in Python or below, all over a save."""
    calls = calls_in_a_save(tmp_path / "counted")
    root = tmp_path / "root"
    save_and_retire(root, 1)
    rng = random.Random(0)
    newest, outcomes = 1, Counter()
    for _ in range(NUM_KILLS):
        iteration = newest + 1
        status = run_and_kill(
            partial(save_and_retire, root, iteration), rng.randrange(1, calls + 50)
        )
        assert status in (0, -signal.SIGKILL)
        found = loadable(root)
        assert found in (newest, iteration)
        if status == 0:
            assert found == iteration
        outcomes[status, found - newest] += 1
        newest = found
    assert outcomes[-signal.SIGKILL, 0] > 5, "no kill came before the publish"
    save_and_retire(root, newest + 1)
    assert loadable(root) == newest + 1
    assert names_in(root) == sorted(names_of_published(root))


def test_a_storm_over_one_step_that_is_saved_again_and_again(tmp_path):
    calls = calls_in_a_save(tmp_path / "counted")
    root = tmp_path / "root"
    save_and_retire(root, 1)
    rng = random.Random(1)
    for _ in range(15):
        run_and_kill(partial(save_and_retire, root, 1), rng.randrange(1, calls))
        assert loadable(root) == 1
    save_and_retire(root, 2)
    assert names_in(root) == ["iter_0000002", TRACKER]


def test_a_kill_while_the_tracker_is_replaced_leaves_the_old_or_the_new_one(tmp_path):
    commit.set_tracker(tmp_path, "100000", "a", 1)
    calls = calls_of(partial(commit.set_tracker, tmp_path, "100000", "a", 1))
    seen = []
    for call in range(1, calls, max(1, calls // 25)):
        replace = partial(commit.set_tracker, tmp_path, "200000", "b", 2)
        assert run_and_kill(replace, call) == -signal.SIGKILL
        seen.append(read_tracker(tmp_path).text)
    assert seen == sorted(seen)
    assert set(seen) == {"100000", "200000"}


def test_a_delete_that_is_killed_leaves_all_of_it_or_rubbish(tmp_path):
    folder = publish_model(tmp_path / "counted", 1)
    calls = calls_of(partial(commit.retire, folder, "b", 2))
    for call in range(1, calls, calls // 20):
        root = tmp_path / str(call)
        folder = publish_model(root, 1)
        assert run_and_kill(partial(commit.retire, folder, "b", 2), call) == -signal.SIGKILL
        for found in published(root):
            assert read_all(found.folder)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_each_named_point_leaves_a_whole_checkpoint(tmp_path, point, monkeypatch):
    save_and_retire(tmp_path, 1)
    monkeypatch.setenv("FAULTS", f"{point}:kill")
    iteration = 1 if point == "save.displaced" else 2
    assert run_and_kill(partial(save_and_retire, tmp_path, iteration), call=0) == -signal.SIGKILL
    monkeypatch.delenv("FAULTS")
    is_published = POINTS.index(point) > POINTS.index("save.displaced")
    assert loadable(tmp_path) == (2 if is_published else 1)
    save_and_retire(tmp_path, 3)
    assert loadable(tmp_path) == 3
    assert not [path for path in tmp_path.iterdir() if ".tmp" in path.name or ".del" in path.name]


@pytest.mark.parametrize("point", POINTS[: POINTS.index("save.displaced")])
@pytest.mark.parametrize("kind", ["raise", "enospc"])
def test_a_failed_save_publishes_nothing_and_says_why(tmp_path, point, kind, monkeypatch):
    save_and_retire(tmp_path, 1)
    limit = "times1" if point == "save.claimed" else "step2"
    monkeypatch.setenv("FAULTS", f"{point}:{kind}:{limit}")
    reason = os.strerror(errno.ENOSPC) if kind == "enospc" else f"injected by FAULTS at {point}"
    with pytest.raises(SaveFailed, match=rf"iteration 2 was not saved in .*{reason}"):
        save_and_retire(tmp_path, 2)
    assert loadable(tmp_path) == 1
    assert names_in(tmp_path) == ["iter_0000001", TRACKER]
    save_and_retire(tmp_path, 3)
    assert loadable(tmp_path) == 3


def test_too_little_space_is_found_before_anything_is_written(tmp_path, monkeypatch):
    class Full:
        f_bavail, f_frsize = 1000, 1000

    save_and_retire(tmp_path, 1)
    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(SaveFailed, match=r"has 1\.00 MB free and the checkpoint needs 1\.05 MB"):
        save_and_retire(tmp_path, 2)
    assert loadable(tmp_path) == 1


def test_a_format_that_is_made_of_another_needs_room_for_both(tmp_path, monkeypatch):
    class AlmostFull:
        f_bavail, f_frsize = 1 << 20, 2  # the spare bytes twice

    wide = from_param("wide", ParamInfo(global_shape=(600, 1024)), torch.zeros(600, 1024).half())
    begun = begin(tmp_path, 1, Contents(tensors=[wide]), None)
    commit.abandon(begun.pending)
    monkeypatch.setattr(os, "statvfs", lambda path: AlmostFull)
    with pytest.raises(SaveFailed, match=r"2\.10 MB free and the checkpoint needs 3\.51 MB"):
        begin(tmp_path, 1, Contents(tensors=[wide]), None, format=FORMATS["torch"])
    begin(tmp_path, 1, Contents(tensors=[]), None, format=FORMATS["torch"])


def test_a_directory_that_cannot_be_made_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveFailed, match="file/root"):
        save(tmp_path / "file" / "root", 1, contents(1), None)


def test_a_file_that_another_rank_reported_but_is_not_there_stops_the_publish(tmp_path):
    pending = commit.create_folder(tmp_path, 1, 0, "a")
    entry = FileEntry(3, 3, 0)
    with pytest.raises(CheckpointError, match="__1_0.safetensors is missing"):
        commit.publish(pending, {}, {"__1_0.safetensors": entry})
    assert published(tmp_path) == []


def test_links_are_not_deleted(tmp_path):
    folder = publish_model(tmp_path / "real", 1)
    link = tmp_path / "iter_0000001"
    link.symlink_to(folder)
    assert not commit.retire(link, "a", 2)
    assert folder.exists()
    assert link.is_symlink()


def test_the_configuration_is_written_beside_the_tensors(tmp_path):
    def write_config(path: Path) -> None:
        path.write_text("{}")

    made = Contents(tensors=[], common={}, write_config=write_config)
    folder = save(tmp_path, 1, made, None).folder
    assert (folder / "config.yaml").read_text() == "{}"
    assert published(tmp_path)[0].manifest.files["config.yaml"].num_bytes == 2


# -- loading --------------------------------------------------------------------------------


def wanted(*keys: str):
    return [
        from_param(key, ParamInfo(global_shape=(8, int(key[1:]))), torch.zeros(8, int(key[1:])))
        for key in keys
    ]


def test_what_was_saved_comes_back(tmp_path):
    folder = save(tmp_path, 3, contents(3), None).folder
    tensors = wanted("t1", "t2", "t3", "t4")
    differences = load(folder, tensors, None)
    assert all((t.pieces[0].data == 3).all() for t in tensors)
    assert (differences.absent, differences.unused) == ((), ())


def test_a_main_parameter_that_is_the_weight_itself_is_loaded_behind_it(tmp_path):
    """As full sharding has them: the file holds the weight in 16 bits."""
    info, main = ParamInfo(global_shape=(100,)), torch.rand(100)

    def records(values: torch.Tensor):
        weight = from_param("w", info, values, dtype=torch.bfloat16)
        return [weight, from_param("optimizer.state.fp32_param.w", info, values)]

    made = Contents(tensors=records(main), common={})
    loaded = torch.zeros(100)
    load(save(tmp_path, 1, made, None).folder, records(loaded), None)
    assert torch.equal(loaded, main)


def test_main_parameters_anywhere_in_their_weights_are_loaded_behind_them():
    """Instances of the optimizer hold a part that begins inside the weight."""
    order: list[str] = []

    class Reader:
        folder = Path("none")
        tensors = dict.fromkeys([f"{kind}w{i}" for i in range(40) for kind in ("", "optimizer.")])

        def load(self, tensor, *, cast):
            order.append(tensor.key)

    info = ParamInfo(global_shape=(9,))
    wanted = [from_param(key, info, torch.empty(9)) for key in reversed(Reader.tensors)]
    fill(wanted, Reader())
    assert [key.startswith("optimizer.") for key in order] == [False] * 40 + [True] * 40


@pytest.mark.parametrize(("num_ranks", "num_threads"), [("1", 4), ("4", 2), ("16", 1)])
def test_the_ranks_of_a_node_share_its_cpus(monkeypatch, num_ranks, num_threads):
    pools: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, size):
            pools.append(size)
            super().__init__(size)

    monkeypatch.setattr(all_ranks, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    fill([], SimpleNamespace(tensors={}, folder=Path("none")))
    assert pools == [num_threads]


def test_missing_and_unexpected_tensors_are_named_and_stop_the_load(tmp_path):
    folder = save(tmp_path, 3, contents(3), None).folder
    with pytest.raises(CheckpointError, match=r"needs 2 tensors that it does not hold: t5, t6;"):
        load(folder, wanted("t1", "t2", "t3", "t4", "t6", "t5"), None)
    with pytest.raises(
        CheckpointError, match=r"holds 2 tensors that this run does not have: t3, t4;"
    ):
        load(folder, wanted("t1", "t2"), None)
    load(folder, wanted("t1", "t2"), None, leave_out=("t3", "t4"))


@pytest.mark.parametrize(
    ("mode", "absent", "unused"),
    [
        ("assume_ok_unexpected", "raise", "raise"),
        ("raise_all", "raise", "raise"),
        ("raise_unexpected", "raise", "ignore"),
        ("log_unexpected", "log", "ignore"),
        ("log_all", "log", "log"),
        ("return_unexpected", "return", "ignore"),
        ("return_all", "return", "return"),
        ("ignore_all", "ignore", "ignore"),
    ],
)
def test_each_strictness_does_what_it_says(tmp_path, mode, absent, unused, caplog):
    folder = save(tmp_path, 3, contents(3), None).folder
    for keys, action, named in (
        (["t1", "t2", "t3", "t4", "t5"], absent, "t5"),
        (["t1", "t2", "t3"], unused, "t4"),
    ):
        caplog.clear()
        tensors = wanted(*keys)
        if action == "raise":
            with pytest.raises(CheckpointError, match=named):
                load(folder, tensors, None, strictness=mode)
            continue
        differences = load(folder, tensors, None, strictness=mode)
        assert named in differences.absent + differences.unused
        assert (named in caplog.text) == (action == "log")
        for tensor in tensors:
            assert (tensor.pieces[0].data == (0 if tensor.key == "t5" else 3)).all()


def test_a_strictness_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="--dist-ckpt-strictness loose is none of"):
        load(tmp_path, [], None, strictness="loose")


def test_all_shapes_that_do_not_fit_are_told_at_once(tmp_path):
    folder = save(tmp_path, 3, contents(3), None).folder
    tensors = [
        from_param(key, ParamInfo(global_shape=(2,)), torch.zeros(2)) for key in ("t1", "t2")
    ]
    with pytest.raises(CheckpointError, match=r"t1 has shape \[8, 1\].* and \[2\].*, t2 has shape"):
        load(folder, tensors, None)


def test_another_dtype_is_an_error_with_the_cure(tmp_path):
    folder = save(tmp_path, 3, contents(3), None).folder
    tensor = from_param("t1", ParamInfo(global_shape=(8, 1)), torch.zeros(8, 1).half())
    with pytest.raises(CheckpointError, match="--load-main-params-from-ckpt converts"):
        load(folder, [tensor], None, leave_out=("t",))
    bf16 = from_param("t1", ParamInfo(global_shape=(8, 1)), torch.zeros(8, 1).bfloat16())
    folder_of_bf16 = save(
        tmp_path / "b", 3, Contents(tensors=[bf16], common={}, layout={}), None
    ).folder
    with pytest.raises(CheckpointError, match="saved with --bf16: give this run the same prec"):
        load(folder_of_bf16, [tensor], None)
    load(folder, [tensor], None, leave_out=("t",), cast=True)
    assert (tensor.pieces[0].data == 3).all()
