"""Programs that tests fork: they run and end as programs of an interpreter of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import forked

PROGRAM = """
import os, signal, sys
print("torch" in sys.modules, __name__, sys.argv[1:], os.environ["WORD"], os.getcwd(), flush=True)
print("to stderr", file=sys.stderr)
if "exit" in sys.argv:
    sys.exit(7)
if "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "raise" in sys.argv:
    raise ValueError("the reason")
if "handle" in sys.argv:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))
print(os.getpid(), flush=True)
while "wait" in sys.argv:
    signal.pause()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def started(program: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [forked.python(), program.name, *words],
        cwd=program.parent,
        env={**os.environ, "WORD": "a word"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("word", "status", "error"),
    [
        ("end", 0, "to stderr"),
        ("exit", 7, "to stderr"),
        ("raise", 1, "ValueError: the reason"),
        ("kill", -signal.SIGKILL, "to stderr"),
    ],
)
def test_a_program_has_its_own_arguments_streams_and_status(
    program: Path, word: str, status: int, error: str
) -> None:
    with started(program, word, "2") as process:
        out, errors = process.communicate()
    assert out.splitlines()[0] == f"True __main__ ['{word}', '2'] a word {program.parent}"
    assert errors.splitlines()[-1] == error
    assert process.returncode == status


@pytest.mark.parametrize(
    ("words", "number", "status"),
    [(["wait"], signal.SIGTERM, -signal.SIGTERM), (["wait", "handle"], signal.SIGUSR1, 9)],
)
def test_a_signal_reaches_the_program(
    program: Path, words: list[str], number: int, status: int
) -> None:
    with started(program, *words) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(60) == status


def test_a_program_ends_with_its_command(program: Path) -> None:
    with started(program, "wait") as process:
        assert process.stdout is not None
        process.stdout.readline()
        number = int(process.stdout.readline())
        assert forked.program_of(process.pid) == number
        descriptor = os.pidfd_open(number)
        process.kill()
        ended, _, _ = select.select([descriptor], [], [], 60)
        os.close(descriptor)
    assert ended


def test_a_module_runs_by_its_name() -> None:
    command = [forked.python(), "-m", "calendar", "2000", "2"]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    assert said.stdout.split()[:2] == ["February", "2000"]
    assert said.stderr == ""


def test_code_of_the_command_line_gets_the_file_descriptors_that_are_passed() -> None:
    source, sink = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), b'torch' if 'torch' in sys.modules else b'')"
    command = [forked.python(), "-c", code, str(sink)]
    subprocess.run(command, check=True, pass_fds=[sink])
    os.close(sink)
    with open(source, "rb") as file:
        assert file.read() == b"torch"
