"""Take the place of a Python interpreter: ask the server for the program, and end as it ends.

`tests.support.forked` writes this file, as an executable, beside the server's socket.  It forwards
signals, and the server kills the program when this process is killed.  It imports little: each
program of a test starts it.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SERVER_ENDED = 70  # EX_SOFTWARE


def main() -> None:
    if sys.argv[1] == "-B":  # multiprocessing repeats it; it came from the environment
        del sys.argv[1]
    if not sys.argv[1].endswith(".py") and sys.argv[1] not in ("-c", "-m", "-u"):
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "socket"))
    command = {"argv": sys.argv[1:], "cwd": os.getcwd(), "environ": dict(os.environ)}
    descriptors = sorted({0, 1, 2, *inherited()})
    content = json.dumps({**command, "descriptors": descriptors}).encode()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # no signal inside the command
    for number in FORWARDED:
        signal.signal(number, lambda number, _: forward(connection, number))
    socket.send_fds(connection, [len(content).to_bytes(8, "big")], descriptors)
    connection.sendall(content)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    answers = connection.makefile()
    with open("/proc/self/comm", "w") as name:  # see `tests.support.forked.program_of`
        name.write(answers.readline())
    status = int(answers.readline() or SERVER_ENDED)
    if status < 0:
        if status != -signal.SIGKILL:  # which has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def inherited() -> list[int]:
    """Return the file descriptors that the command was given: Python's own are not inheritable."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.get_inheritable(number):
                found.append(number)
        except OSError:
            continue  # it belonged to the listing
    return found


def forward(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(bytes([number]))
    except OSError:
        return  # the program has ended


main()
