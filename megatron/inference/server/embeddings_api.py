"""POST /v1/embeddings: vectors of texts, with OpenAI's fields and some of vLLM's."""

from __future__ import annotations

import base64
import time
from typing import Any

from megatron.core.inference.paged_engine.request import Pooling, RequestError, vector_of
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference.server.fields import ApiError, Body, Fields, as_api_error, renamed
from megatron.inference.server.generation import GenerationRequest, Sample, Service, write
from megatron.inference.server.http import json_answer
from megatron.inference.server.openai_api import WITHOUT_EFFECT, read_prompts
from megatron.inference.text import TextRules

_MAX_VALUES = 1 << 24  # of all vectors of an answer


async def answer_embeddings(service: Service, request: Any, body: Body) -> Any:
    """Answer with a vector of each input: the last hidden states, pooled, with length 1."""
    fields = Fields(body)
    model = service.model
    adapter = service.check_model(fields)
    size = model.info.vector_size
    if not size or model.info.decoder_start is not None:
        raise ApiError("this model has no vectors of texts", "model")
    is_plain = not fields.boolean("add_special_tokens", True)
    normalizes = fields.boolean("use_activation", True)
    asked = fields.choice("pooling", model.info.pooling, ("last", "mean"))
    pooling: Pooling = "mean" if asked == "mean" else "last"
    is_base64 = fields.choice("encoding_format", "float", ("float", "base64")) == "base64"
    if fields.integer("dimensions", size, 1, 1 << 20) != size:
        raise ApiError(
            f"dimensions: vectors of this model have {size} and cannot be shortened: leave it out",
            "dimensions",
        )
    prompts, _ = await read_prompts(fields, model, name="input", has_texts=False, is_plain=is_plain)
    fields.refuse_others(WITHOUT_EFFECT)
    if len(prompts) * size > _MAX_VALUES:
        raise ApiError(f"input: {_MAX_VALUES // size} texts at most in a request", "input")
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=0)
    wanted = GenerationRequest(
        prompts, params, TextRules(), keeps_tokens=False, adapter=adapter, pooling=pooling
    )
    try:
        samples = await service.samples(wanted, request)
    except (ApiError, RequestError) as error:
        raise renamed(as_api_error(error), {"prompt": "input"}) from None

    def of_sample(sample: Sample) -> list[float] | str:
        vector = vector_of(sample.vector, normalize=normalizes)
        return base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()

    def written() -> Any:
        data = [
            {"object": "embedding", "index": index, "embedding": of_sample(sample)}
            for index, sample in enumerate(samples)
        ]
        count = sum(map(len, prompts))
        return json_answer(
            {
                "id": f"embd-{samples[0].generation_id}",
                "object": "list",
                "created": int(time.time()),
                "model": adapter or model.info.model,
                "data": data,
                "usage": {"prompt_tokens": count, "total_tokens": count},
            }
        )

    return await write(len(prompts) * size, written)
