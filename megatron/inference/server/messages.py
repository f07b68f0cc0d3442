"""Messages between the front end and the engine: JSON objects, one a line, over a Unix socket.

To the engine: add, abort, stats, ping, update_weights.  From it: hello (first), accepted, refused,
outputs (one for each step, and one for each output that may be long), stats, pong, updated, failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.request import (
    BeamParams,
    PromptImage,
    Request,
)
from megatron.core.inference.sampling_params import SamplingParams

VERSION = 3
MAX_BYTES = 64 << 20  # of one message; a request body is smaller
_REQUEST_FIELDS = ("request_id", "prompt", "source", "grammar", "fork_of")


class ProtocolError(MegatronError):
    """A message that this version does not understand."""


@dataclass(frozen=True)
class EngineInfo:
    """What the front end must know of the engine and its model.

    ``tokenizer``: fields of `TokenizerSpec`.  ``modules``: user modules to import, which may
    register tokenizers.  ``decoder_start``: the first token of a decoder whose encoder reads the
    prompt.  ``features``: those of "grammar" and "update_weights" that the engine has.  ``images``:
    fields of `ImageInput`, for models that read images.
    """

    model: str
    tokenizer: dict[str, Any]
    vocab_size: int
    max_sequence_length: int
    eod: int | None
    decoder_start: int | None = None
    modules: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    images: dict[str, Any] | None = None


def encode(kind: str, **content: object) -> bytes:
    """Return one line.  Raises ProtocolError if it is too long."""
    line = json.dumps({"type": kind, **content}, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_BYTES:
        raise ProtocolError(f"a {kind} message has {len(line)} bytes, at most {MAX_BYTES}")
    return line


def decode(line: bytes) -> dict[str, Any]:
    """Return the message of one line.  Raises ProtocolError."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message is no JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise ProtocolError("a message is no object with a type")
    return found


@dataclass
class LineBuffer:
    """Bytes of a socket, cut into lines."""

    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def add(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes.  Raises ProtocolError for one too long."""
        if b"\n" not in data:
            self._keep(data)
            return []
        *lines, rest = data.split(b"\n")
        lines[0] = b"".join([*self._parts, lines[0]])
        self._parts.clear()
        self._size = 0
        self._keep(rest)
        return lines

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_BYTES:
            raise ProtocolError(f"a message has more than {MAX_BYTES} bytes")
        self._parts.append(data)


def hello(info: EngineInfo) -> bytes:
    """Return the first message of the engine."""
    return encode("hello", version=VERSION, info=asdict(info))


def read_hello(message: Mapping[str, Any]) -> EngineInfo:
    """Return what `hello` wrote.  Raises ProtocolError for another version."""
    if message["type"] != "hello" or message.get("version") != VERSION:
        raise ProtocolError(
            f"the engine speaks version {message.get('version')} of the messages, this front end "
            f"{VERSION}: start both from one installation"
        )
    info = dict(message["info"])
    return EngineInfo(
        **{**info, "modules": tuple(info["modules"]), "features": tuple(info["features"])}
    )


def request_to_json(request: Request) -> dict[str, Any]:
    """Return a request as JSON values."""
    fields = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    params = request.params.to_json()
    images = [image.to_json() for image in request.images]
    beam = request.beam and asdict(request.beam)
    return {**fields, "params": params, "beam": beam, "images": images}


def request_from_json(found: Mapping[str, Any]) -> Request:
    """Return the request that `request_to_json` wrote.  Raises ConfigError for bad parameters."""
    fields = {name: found[name] for name in _REQUEST_FIELDS}
    if fields["grammar"] is not None:
        fields["grammar"] = tuple(fields["grammar"])
    beam = found["beam"] and BeamParams(**found["beam"])
    images = tuple(map(PromptImage.from_json, found["images"]))
    params = SamplingParams.from_json(found["params"])
    return Request(**fields, params=params, beam=beam, images=images)
