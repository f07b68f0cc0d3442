"""Messages between the front end and the engine: JSON objects, one a line, over a Unix socket.

To the engine: add, abort, stats, ping, update_weights.  From it: hello (first), accepted, refused,
outputs (one for each step, and one for each output that may be long), stats, pong, updated, failed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.prompt_images import PromptImage
from megatron.core.inference.paged_engine.request import (
    Beam,
    BeamParams,
    Request,
    RequestOutput,
    TokenOutput,
)
from megatron.core.inference.sampling_params import SamplingParams

VERSION = 2
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
    images = [_image_to_json(image) for image in request.images]
    beam = request.beam and asdict(request.beam)
    return {**fields, "params": params, "beam": beam, "images": images}


def request_from_json(found: Mapping[str, Any]) -> Request:
    """Return the request that `request_to_json` wrote.  Raises ConfigError for bad parameters."""
    fields = {name: found[name] for name in _REQUEST_FIELDS}
    if fields["grammar"] is not None:
        fields["grammar"] = tuple(fields["grammar"])
    beam = found["beam"] and BeamParams(**found["beam"])
    images = tuple(_image_from_json(image) for image in found["images"])
    params = SamplingParams.from_json(found["params"])
    return Request(**fields, params=params, beam=beam, images=images)


def _image_to_json(image: PromptImage) -> list[object]:
    """Return number of rows, size, shape, and pixels as base64 of little-endian float32."""
    pixels = np.ascontiguousarray(image.pixels, "<f4")
    data = base64.b64encode(pixels.tobytes()).decode()
    return [image.num_rows, list(image.size), list(pixels.shape), data]


def _image_from_json(found: Sequence[Any]) -> PromptImage:
    num_rows, size, shape, data = found
    pixels = np.frombuffer(bytearray(base64.b64decode(data)), "<f4").reshape(shape)
    return PromptImage(pixels.astype(np.float32, copy=False), num_rows, tuple(size))


def output_to_json(output: RequestOutput) -> dict[str, Any]:
    """Return an output as JSON values, without the fields that have their defaults."""
    found: dict[str, Any] = {"id": output.request_id, "new": _tokens_to_json(output.new)}
    if output.prompt_scores:
        found["prompt"] = _tokens_to_json(output.prompt_scores)
    if output.finish_reason is not None:
        found["finish"] = output.finish_reason
    if output.error:
        found["error"] = output.error
        found["error_param"] = output.error_param
    if output.beams:
        found["beams"] = [
            [_tokens_to_json(b.tokens), b.score, b.finish_reason] for b in output.beams
        ]
    if output.num_cached_prompt_tokens:
        found["cached"] = output.num_cached_prompt_tokens
    if output.weight_version:
        found["version"] = output.weight_version
    return found


def output_from_json(found: Mapping[str, Any]) -> RequestOutput:
    """Return the output that `output_to_json` wrote."""
    return RequestOutput(
        request_id=found["id"],
        new=_tokens_from_json(found["new"]),
        prompt_scores=_tokens_from_json(found.get("prompt", ())),
        finish_reason=found.get("finish"),
        num_cached_prompt_tokens=found.get("cached", 0),
        weight_version=found.get("version", 0),
        error=found.get("error", ""),
        error_param=found.get("error_param"),
        beams=tuple(
            Beam(_tokens_from_json(tokens), score, reason)
            for tokens, score, reason in found.get("beams", ())
        ),
    )


def _tokens_to_json(tokens: tuple[TokenOutput, ...]) -> list[list[object]]:
    return [[int(t.token), float(t.log_prob), [list(pair) for pair in t.top]] for t in tokens]


def _tokens_from_json(found: Any) -> tuple[TokenOutput, ...]:
    return tuple(TokenOutput(t, p, tuple((i, q) for i, q in top)) for t, p, top in found)
