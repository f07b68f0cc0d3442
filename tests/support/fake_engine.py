"""An engine without a model, for tests of the server; as a program, a server with it.

A text is the prompt's tokens again and again, and ends after the first repetition unless the
request says ``ignore_eos``.  The log-probability of token i is -(i + 1) / 4, of the j-th likely
token -j.  With a gate file, a request whose first token is 0 waits until the file exists.
"""

from __future__ import annotations

import argparse
import base64
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core.config.errors import CheckpointError
from megatron.core.inference.paged_engine.request import (
    QueueFullError,
    Request,
    RequestError,
    RequestOutput,
    TokenOutput,
)
from megatron.inference.server.engine_link import EngineInfo
from tools.lib.front_end_process import FrontEndProcess, add_front_end_flags

LIMITS = ("drain_limit_s", "header_limit_s", "unread_limit_s")


@dataclass(frozen=True)
class FakeStats:
    """Numbers for /metrics."""

    num_running: int
    num_added: int
    num_resets: int  # of the prefix cache


class FakeEngine:
    """Keeps the contract of `megatron.core.inference.paged_engine.engine.Engine`."""

    def __init__(self, info: EngineInfo, max_requests: int = 64, gate: Path | None = None) -> None:
        self.info = info
        self.max_requests = max_requests
        self.gate = gate
        self.open: dict[str, Request] = {}
        self._num_tokens: Counter[str] = Counter()  # that were generated, by request
        self.num_added = 0
        self.num_resets = 0

    def prepare(self, request: Request) -> bool:
        return True

    def add(self, request: Request) -> None:
        if len(self.open) >= self.max_requests:
            raise QueueFullError(f"{self.max_requests} requests wait: try again later")
        if request.grammar is not None and request.grammar[1] == '{"type": "impossible"}':
            raise RequestError("the schema allows no text", "response_format")
        self.open[request.request_id] = request
        self.num_added += 1

    def load_adapter(self, name: str, folder: str) -> None:
        if folder == "/nowhere":
            raise CheckpointError(f"{folder} holds no checkpoint")

    def unload_adapter(self, name: str) -> bool:
        return True

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def update_weights(self, checkpoint: str) -> int:
        return 1

    def abort(self, request_id: str) -> bool:
        return self.open.pop(request_id, None) is not None

    @property
    def has_unfinished(self) -> bool:
        return bool(self.open)

    def stats(self) -> FakeStats:
        return FakeStats(len(self.open), self.num_added, self.num_resets)

    def step(self) -> list[RequestOutput]:
        return [out for r in [*self.open.values()] if (out := self._next(r)) is not None]

    def _next(self, request: Request) -> RequestOutput | None:
        if self.gate and request.prompt[0] == 0 and not self.gate.exists():
            return None
        if request.pooling:
            values = np.array(request.prompt + [float(request.pooling == "mean")], "<f4")
            text = base64.b64encode(values[-4:].tobytes()).decode()
            return self._end(request, (), (), "length")._replace(vector=text)
        params = request.params
        count = self._num_tokens[request.request_id]
        source = request.source or request.prompt
        top = tuple((j, -float(j)) for j in range(params.top_n_logprobs))
        scores: tuple[TokenOutput, ...] = ()
        if count == 0 and params.return_prompt_log_probs:
            scores = tuple(TokenOutput(t, -1.0, top) for t in request.prompt[1:])
        if params.num_tokens_to_generate == 0:
            return self._end(request, (), scores, "length")
        token = source[count % len(source)]
        eod = self.info.eod
        if count == len(source) and not params.ignore_eos and eod is not None:
            token = eod
        self._num_tokens[request.request_id] += 1
        new = (TokenOutput(token, -(count + 1) / 4, top),)
        if token in params.stop_token_ids or (token == eod and not params.ignore_eos):
            return self._end(request, new, scores, "stop")
        if count + 1 == params.num_tokens_to_generate:
            return self._end(request, new, scores, "length")
        return RequestOutput(request.request_id, new, scores)

    def _end(self, request, new, scores, reason) -> RequestOutput:
        del self.open[request.request_id]
        return RequestOutput(request.request_id, new, scores, reason)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_front_end_flags(parser)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--eod", type=int, required=True)
    parser.add_argument("--max-requests", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=1000)
    parser.add_argument("--features", nargs="*", default=["grammar"])
    parser.add_argument("--decoder-start", type=int)
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--chat-template")
    for name in LIMITS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    args = parser.parse_args()
    limits = {name: value for name in LIMITS if (value := vars(args)[name]) is not None}
    front_end = FrontEndProcess(
        args.host,
        args.port,
        api_key_file=args.api_key_file,
        chat_template=args.chat_template,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        **limits,
    )
    info = EngineInfo(
        model="fake",
        tokenizer={"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": args.tokenizer},
        vocab_size=args.vocab_size,
        max_sequence_length=args.max_length,
        eod=args.eod,
        decoder_start=args.decoder_start,
        features=tuple(args.features),
        vector_size=4,
    )
    engine = FakeEngine(info, args.max_requests, args.gate)
    print(f"engine {os.getpid()}", flush=True)
    status = front_end.serve(engine, info)
    print(f"open {len(engine.open)}", flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
