"""Python programs in processes forked from one that has imported torch and megatron.

`python` returns the path of an executable that takes the place of ``sys.executable`` in a command:
the imports, which are most of a short program's time, are done.  A torchrun of the same kind is in
its folder.  Each program has its own arguments, environment, folder and standard streams, gets the
signals sent to its command, and ends with it.  Tests of the imports themselves, of the parent of a
process or of a killed supervisor start ``sys.executable``.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support import host_gpu

SHARED = "TESTS_FORKED_PYTHON"  # variable: what `python` returns, for the workers of xdist
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]


def python() -> str:
    """Return the executable that takes the place of ``sys.executable``."""
    return os.environ.get(SHARED) or _started(None)


def python_on_host_gpu(compiled: Path) -> str:
    """Return the executable whose programs find the device of `tests.support.host_gpu`."""
    return _started(str(compiled))


def torchrun(num_ranks: int, executable: str | None = None) -> list[str]:
    """Return a command that starts ``num_ranks`` forked ranks; a script and its flags follow.

    The launcher runs in a forked process too.  ``executable``: of `python`, the default, or of
    `python_on_host_gpu`.
    """
    program = str(Path(executable or python()).with_name("torchrun"))
    return [program, "--standalone", f"--nproc-per-node={num_ranks}"]


def program_of(command: int) -> int:
    """Return the process of the program for which the process ``command`` asked."""
    return int(Path(f"/proc/{command}/comm").read_text())


def _preloaded(folder: Path) -> dict[str, str]:
    """Compile gloo_yield.c into ``folder``; return the variable that loads it into the server.

    Without it, or without gcc, ranks that wait for each other use more CPU time.
    """
    library = folder / "gloo_yield.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", str(_HERE / "gloo_yield.c"), "-o", str(library)]
    if shutil.which("gcc") is None or subprocess.run(command).returncode != 0:
        return {}
    return {"LD_PRELOAD": " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))}


@cache
def _started(device: str | None) -> str:
    """Start the server and return its client; the server ends with this process."""
    client = Path(tempfile.mkdtemp(prefix="forked-")) / "python"  # the server removes the folder
    launcher = f'PYTHON_EXEC={client} exec {client} -m torch.distributed.run "$@"'
    programs = {
        client: f"#!{sys.executable} -IS\n{(_HERE / 'client.py').read_text()}",
        client.with_name("torchrun"): f"#!/bin/sh\n{launcher}\n",
    }
    for path, text in programs.items():
        path.write_text(text)
        path.chmod(0o755)
    held, session = os.pipe()  # the server ends when ``session`` is closed
    environ = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    environ["OMP_WAIT_POLICY"] = "passive"  # of programs that set a number of threads
    environ.pop(host_gpu.ASKED, None)
    environ |= {} if device is None else {host_gpu.ASKED: device}
    environ |= _preloaded(client.parent)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(client.with_name("socket")))
        listener.listen(64)
        descriptors = listener.fileno(), held
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked.server", *map(str, descriptors)],
            cwd=_ROOT,
            env=environ,
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
        )
    os.close(held)

    def end() -> None:
        os.close(session)
        server.wait()

    atexit.register(end)
    return str(client)
