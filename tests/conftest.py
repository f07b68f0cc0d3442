"""What every test finds: one thread, no network, no trace of other tests."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import random
import socket
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import forked

LONGEST = ("test_compile.py", "test_on_a_gpu.py", "test_storm.py", "test_triton.py")
LOOPBACK = ("127.", "localhost", "::1", "0.0.0.0")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    os.environ |= getattr(config, "workerinput", {}).get("environ", {})


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let the workers of xdist share the process from which programs are forked."""
    node.workerinput["environ"] = {forked.SHARED: forked.python()}


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without the garbage collector, which never again looks at what was collected."""
    gc.disable()
    try:
        _import_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_share(config: pytest.Config) -> None:
    """Import, as one of several xdist workers, a share of the modules before all of them.

    Each worker imports all modules.  So they do not all rewrite the assertions of the same module.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    root = config.rootpath
    paths = sorted(path for given in config.args for path in (root / given).rglob("test_*.py"))
    first = int(worker["workerid"].removeprefix("gw"))
    for path in paths[first :: worker["workercount"]]:
        # pytest reports errors, and what a module skips, when it collects the module.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files with the longest tests first, so that no worker ends with one of them."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """A test leaves the environment variables as it found them."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {k for k in before | after if before.get(k) != after.get(k)}
    changed.discard("PYTEST_CURRENT_TEST")
    if changed:
        os.environ.clear()
        os.environ.update(before)
    changed.discard("TORCHINDUCTOR_CACHE_DIR")  # torch's, from importing its compiler
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def same_root_logger() -> Iterator[None]:
    """A test leaves level and handlers of the root logger as it found them."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    if root.level != level:  # to set it clears a cache in each logger
        root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Whichever tests ran before in this process, a test draws the same numbers."""
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed also formats the stack for each kind of device that is not yet in use.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def no_network(same_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for another machine fails at once, on every machine."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and not str(address[0]).startswith(LOOPBACK):
            raise AssertionError(f"tests reach no other machine, this one tried {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
