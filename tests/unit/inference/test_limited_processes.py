"""Processes for untrusted work: what they answer, and what remains when one is lost."""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron.core import limited_processes
from megatron.core.config.errors import DataError
from megatron.core.datasets.images import ImageSettings
from megatron.core.limited_processes import LimitedProcesses
from megatron.inference.server.fields import ApiError
from megatron.inference.server.model import (
    ChatTemplate,
    LimitedImageProcessor,
    render_templates,
)

Image = pytest.importorskip("PIL.Image")
SETTINGS = ImageSettings(img_h=24, img_w=24, tiling="dynamic", max_num_tiles=4)


def encoded(size: tuple[int, int], kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, kind)
    return file.getvalue()


def test_images_of_several_threads_have_the_pixels_of_this_process() -> None:
    limited = LimitedImageProcessor(SETTINGS)
    files = [encoded((24 * i, 24), kind) for i in (1, 2, 3) for kind in ("PNG", "JPEG", "WEBP")]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda data: limited.read(data, "image 0"), files))
    for data, (pixels, size) in zip(files, found, strict=True):
        expected, expected_size = SETTINGS.read(data, "a")
        assert np.array_equal(pixels, expected)
        assert size == expected_size


def test_a_file_that_is_no_image_has_the_error_of_this_process() -> None:
    settings = ImageSettings(img_h=24, img_w=24, max_pixels=1 << 12)
    limited = LimitedImageProcessor(settings)
    for data in (b"", b"\0" * 100, encoded((24, 24))[:60], encoded((40000, 1))):
        with pytest.raises(DataError) as expected:
            settings.read(data, "image 3")
        with pytest.raises(DataError) as found:
            limited.read(data, "image 3")
        assert str(found.value) == str(expected.value)


def test_an_image_whose_process_is_lost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = LimitedImageProcessor(SETTINGS)

    def lost() -> socket.socket:
        mine, other = socket.socketpair()
        other.close()
        return mine

    monkeypatch.setattr(limited._processes, "open", lost)
    with pytest.raises(DataError, match="image 0: .* more than 10 s, or too much memory"):
        limited.read(b"", "image 0")


def test_an_image_whose_process_is_stopped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = LimitedImageProcessor(SETTINGS)
    mine, _other = socket.socketpair()
    mine.settimeout(0.01)
    monkeypatch.setattr(limited._processes, "open", lambda: mine)
    monkeypatch.setattr(limited_processes, "_PATIENCE_S", 0.01)
    with pytest.raises(DataError, match="image 0: .* its process has not answered for 0.01 s"):
        limited.read(b"", "image 0")


def test_connections_are_opened_although_the_first_process_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limited_processes, "_CONTROL_LIMIT_S", 0.1)
    before = {*multiprocessing.active_children()}
    processes = LimitedProcesses(render_templates, b'"x"')
    processes.start()
    (process,) = {*multiprocessing.active_children()} - before
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    while not {*multiprocessing.active_children()} - before - {process}:
        processes.open().close()  # nobody takes it
    with processes.open() as connection:
        limited_processes.send(connection, b"{}")
        assert limited_processes.receive(connection) == b'[true, "x"]'
    process.join()
    processes.close()


def test_a_stopped_first_process_ends_with_its_owner() -> None:
    before = {*multiprocessing.active_children()}
    processes = LimitedProcesses(render_templates, b'"x"')
    processes.start()
    (process,) = {*multiprocessing.active_children()} - before
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    processes.close()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_template_is_rendered_again_after_its_process_was_killed() -> None:
    template = ChatTemplate("{{ a }}\ud800{{ b }}", {"a": "x"})

    async def render() -> str:
        return await template.render({"b": "y"})

    assert asyncio.run(render()) == "x\ud800y"
    children = ""
    for process in multiprocessing.active_children():
        children += Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    for child in children.split():
        os.kill(int(child), signal.SIGKILL)
    with pytest.raises(ApiError, match="more than 2 s, or too much memory"):
        asyncio.run(render())
    assert asyncio.run(render()) == "x\ud800y"
    template.close()
