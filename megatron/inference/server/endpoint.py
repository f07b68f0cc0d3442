"""What the endpoints of the front end share."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.core.config.errors import MegatronError
from megatron.inference.server.chat_images import ImageFiles
from megatron.inference.server.chat_template import ChatTemplate
from megatron.inference.server.engine_client import EngineClient
from megatron.inference.server.errors import ApiError, as_api_error
from megatron.inference.server.fields import Fields
from megatron.inference.server.generation import Generation, Sample, Wanted, write
from megatron.inference.server.http import DONE, EventStream, event, responses, until_disconnect
from megatron.inference.server.metrics import Metrics
from megatron.inference.server.model import Model
from megatron.inference.server.sampling_fields import WITHOUT_EFFECT
from megatron.inference.text import TextDelta

_LOG = logging.getLogger(__name__)

# Samples with what is new of them -> the objects to send for it.
ToEvents = Callable[[Sample, TextDelta], list[dict[str, Any]]]


@dataclass(eq=False)
class Service:
    """The engine's connection, the model, and the counters."""

    client: EngineClient
    model: Model
    metrics: Metrics
    template: ChatTemplate | None = None
    image_files: ImageFiles = field(default_factory=lambda: ImageFiles(None))
    max_api_tokens: int = 12000
    announced: set[str] = field(default_factory=set)

    def close(self) -> None:
        """End the processes that work on requests."""
        self.model.close()
        if self.template is not None:
            self.template.close()

    def generation(self, wanted: Wanted) -> Generation:
        """Return a generation that is not started yet.  Raises ApiError for a prompt too long."""
        return Generation(self.client, self.model, self.metrics, wanted)

    async def samples(self, wanted: Wanted, request: Any) -> list[Sample]:
        """Generate all samples.  Raises ClientGone if the client leaves before."""
        generation = self.generation(wanted)

        async def work() -> list[Sample]:
            await generation.start()
            return await generation.finish()

        try:
            return await until_disconnect(request.receive, work())
        finally:
            generation.close()

    async def stream(
        self,
        generation: Generation,
        request: Any,
        to_events: ToEvents,
        last: Callable[[list[Sample]], list[dict[str, Any]]],
    ) -> EventStream:
        """Answer with events; ``last`` gives the objects after the last sample."""
        await until_disconnect(request.receive, generation.start())
        return EventStream(_events(generation, to_events, last), generation.close)

    def check_model(self, fields: Fields) -> None:
        """Raise ApiError (404) if the request names another model than the served one."""
        name = fields.text("model", None)
        if name is not None and name != self.model.info.model:
            raise ApiError(
                f"model: {name[:80]!r} is not served here; the model is {self.model.info.model!r}",
                "model",
                status=404,
                code="model_not_found",
            )

    def finish_reading(self, fields: Fields) -> None:
        """Refuse unknown fields, and announce once each field without effect."""
        for name in fields.without_effect(WITHOUT_EFFECT):
            if name not in self.announced:
                self.announced.add(name)
                _LOG.warning("a client sends %s, which has no effect on this server", name)
        fields.refuse_others()


async def _events(
    generation: Generation,
    to_events: ToEvents,
    last: Callable[[list[Sample]], list[dict[str, Any]]],
) -> AsyncIterator[str]:
    begun: set[int] = set()
    try:
        async for sample, delta in generation.deltas():
            # The first event may have the scores of a long prompt.
            num_values = 0 if sample.index in begun else len(sample.prompt_scores)
            begun.add(sample.index)
            for found in await write(num_values, partial(to_events, sample, delta)):
                yield event(found)
        for found in last(list(generation.samples.values())):
            yield event(found)
    except MegatronError as error:
        yield event(as_api_error(error).body)
    yield DONE


def json_answer(content: object, status: int = 200) -> Any:
    """Return a JSON answer."""
    return responses.JSONResponse(content, status)
