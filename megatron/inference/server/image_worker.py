"""The processes that decode images of requests.  An image comes from a client: no trust.

A message is an image: its name, a zero byte, and the bytes of the file.  The answer is a line of
JSON, [width, height, shape] with pixel values f32 after it, or the reason why there are none.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.images.decode import pillow
from megatron.core.datasets.images.pixels import ImageProcessor, ImageSettings
from megatron.core.limited_processes import (
    LimitedProcesses,
    Limits,
    Work,
    exceeded,
    fork_for_each_connection,
    receive,
    send,
)

_TIME_LIMIT_S = 10.0
_MEMORY_LIMIT_BYTES = 2 << 30
_PATIENCE_S = 60.0  # with a process that is stopped, or has no processor


class LimitedImageProcessor:
    """An `ImageProcessor` that reads each image in a process of its own."""

    def __init__(self, settings: ImageSettings) -> None:
        setup = json.dumps(asdict(settings)).encode()
        self._processes = LimitedProcesses(main, setup)

    def read(self, data: bytes, name: str) -> tuple[np.ndarray, tuple[int, int]]:
        """Return pixels of an image file, and its width and height.  Raises DataError."""
        try:
            with self._processes.open() as connection:
                connection.settimeout(_PATIENCE_S)
                send(connection, name.encode() + b"\0" + data)
                head, _, pixels = receive(connection).partition(b"\n")
        except (EOFError, OSError) as error:
            reason = exceeded(_TIME_LIMIT_S)
            if isinstance(error, TimeoutError):
                self._processes.close()
                reason = f"its process has not answered for {_PATIENCE_S:g} s"
            raise DataError(f"{name}: no image that can be decoded: {reason}") from None
        found = json.loads(head)
        if isinstance(found, str):
            raise DataError(found)
        width, height, shape = found
        return np.frombuffer(bytearray(pixels), np.float32).reshape(shape), (width, height)


def main(control: socket.socket) -> None:
    """Decode images as the setup, fields of `ImageSettings`, says."""
    fork_for_each_connection(control, _prepare, _TIME_LIMIT_S, _MEMORY_LIMIT_BYTES)


def _prepare(setup: bytes) -> Work:
    settings = json.loads(setup)
    settings["resolutions"] = tuple(map(tuple, settings["resolutions"]))
    processor = ImageProcessor(ImageSettings(**settings))
    pillow().init()  # imports the decoders

    def decode(connection: socket.socket, limits: Limits) -> None:
        name, _, data = receive(connection).partition(b"\0")
        with limits.one_of_few(), limits.time():
            try:
                pixels, size = processor.read(data, name.decode())
                head = json.dumps([*size, pixels.shape])
                answer = head.encode() + b"\n" + pixels.tobytes()
            except DataError as error:
                answer = json.dumps(str(error)).encode()
        send(connection, answer)

    return decode
