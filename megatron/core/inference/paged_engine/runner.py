"""Forward passes of the generation engine on one rank: a plan in, sampled tokens out.

Collective over tp (layers), ep (experts) and with pipeline parallelism over pp: every rank of a
replica executes the same plans in the same order.  A stage receives the hidden states of the rows
[N, 1, h] from the stage before it; the last stage samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import device
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.inference.paged_engine.adapters import AdapterStore, LayerAdapters
from megatron.core.inference.paged_engine.cache import BatchView, PagedCache, SlotPositions
from megatron.core.inference.paged_engine.decode_graphs import DecodeGraphs
from megatron.core.inference.paged_engine.draft_model import DraftModel
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.request import (
    FIRST_ID,
    PLACE_BITS,
    Ids,
    Pooling,
    PromptImage,
    Request,
)
from megatron.core.inference.paged_engine.sampler import Sampler
from megatron.core.inference.paged_engine.step_plan import (
    NO_VECTOR,
    Admission,
    Floats,
    Integers,
    StepOutput,
    StepPlan,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.multimodal.splicing import decoder_inputs
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model


def token_of(tokenizer: Any, *roles: str) -> int | None:
    """Return the id of the first of ``roles`` that a tokenizer has; None if it has none."""
    for role in roles:
        found = getattr(tokenizer, role, None)
        if found is not None:
            return int(found)
    return None


@dataclass(frozen=True, kw_only=True)
class GenerationModel:
    """A model to generate with: this rank's stage, in evaluation mode, and its place.

    ``vocab_size``: ids beyond it are padding and are never chosen; those below ``num_logits`` count
    in the sum of probabilities, as in training with --pad-vocab-in-loss.  ``eod``: the token that
    ends a text.  An encoder-decoder has a ``decoder_start``: its encoder reads the prompt, and the
    decoder continues from that token.  ``load_weights(directory)``: replace the weights by those
    of a checkpoint; collective over all ranks.  If it raises CheckpointError, it does so on all
    ranks and the weights are unchanged; so does ``load_adapter(folder)``, which returns an
    adapter of the model in this rank's layers.  A model that ``reads_images`` has on its first
    stage ``encode_images(pixels, sizes)``: [t, 3, H, W] -> [n, h], collective over tp; ``sizes``
    [1, f] or None: size of the image.  ``has_grid``: positions are those of M-RoPE in images.
    ``sees_images_whole``: the embeddings of an image attend to all of their image.
    """

    module: nn.Module
    config: TransformerConfig
    groups: ProcessGroupCollection
    device: torch.device
    vocab_size: int
    max_sequence_length: int
    eod: int | None
    decoder_start: int | None = None
    load_weights: Callable[[str], object] | None = None
    load_adapter: Callable[[str], LayerAdapters] | None = None
    encode_images: Callable[[Tensor, Tensor | None], Tensor] | None = None
    reads_images: bool = False
    has_grid: bool = False
    sees_images_whole: bool = False
    num_logits: int | None = None  # default: vocab_size
    num_heads: int = 0  # draft heads, which predict a token each; a layer of EAGLE-3 is one
    heads_repeat: bool = False  # the last one also drafts the tokens after its own

    def request(self, request_id: str, prompt: list[int], params: SamplingParams) -> Request:
        """Return a request that continues ``prompt``, which an encoder reads if there is one."""
        if self.decoder_start is None:
            return Request(request_id, prompt, params)
        return Request(request_id, [self.decoder_start], params, source=prompt)

    def num_draft_layers(self, options: EngineOptions) -> int:
        """Return how many layers or heads of the model draft tokens.  Raises ConfigError."""
        mtp = self.config.mtp_num_layers or 0
        repeats = self.heads_repeat or options.draft_model == "mtp"
        return options.num_draft_layers(mtp, self.num_heads, repeats=repeats)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    @property
    def samples(self) -> bool:
        """Whether this rank samples the tokens of its replica."""
        return self.is_last_stage and self.groups.tp.rank() == 0


class ModelRunner:
    """Executes plans with a model, a cache and a sampler of ``cache.max_requests`` slots.

    Decoding is captured as graphs, see `DecodeGraphs`; not for models that draft, have stages,
    experts or an encoder, and not with batch invariance.
    """

    def __init__(self, model: GenerationModel, cache: PagedCache, options: EngineOptions) -> None:
        self.model = model
        self.cache = cache
        self._row_invariant = options.batch_invariant
        slots = cache.max_requests + 1
        self._slots = SlotPositions(slots, has_grid=model.has_grid)
        self.adapters = AdapterStore(slots, model.device)
        self._pooler = Pooler()
        self._sampler: Sampler | None = None
        if model.samples:
            self._sampler = Sampler(slots, model.vocab_size, model.device, eod=model.eod)
        self._draft_model: DraftModel | None = None
        num_layers = model.num_draft_layers(options)
        if num_layers and model.is_last_stage:
            sizes = num_layers, options.num_draft_tokens
            self._draft_model = DraftModel(model.module, model.groups, cache, self._sampler, *sizes)
        self._graphs: DecodeGraphs | None = None
        num_graphs = 0 if options.batch_invariant else options.num_cuda_graphs
        if num_graphs and not num_layers and _runs_alone(model):
            self._graphs = DecodeGraphs(model.module, cache, num_graphs, self._decode)
        self._images: ImageStore | None = None
        if model.encode_images is not None:
            self._images = ImageStore(model.encode_images, model.device)
        self._routers: list[TopKRouter] = []
        if options.records_routes:
            decoder = get_attr_wrapped_model(model.module, "decoder")
            self._routers = [m for m in decoder.modules() if isinstance(m, TopKRouter)]
            for router in self._routers:
                assert router.router_replay is not None, "--moe-enable-routing-replay sets it"
                router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
        self._records = options.records_routes and model.groups.tp.rank() == 0
        self._num_steps = 0
        self._sent: tuple[dist.Work, Tensor] | None = None  # the tensor lives until it is sent
        c = model.config
        self._sent_dtype = torch.float32 if c.fp32_residual_connection else c.params_dtype

    @torch.no_grad()
    def execute(self, plan: StepPlan) -> StepOutput | None:
        """Run one step; return the result on the rank that samples, None on the others.

        Collective over tp and pp of the replica, and over ep.
        """
        self._num_steps += 1
        fault_point("inference.step", step=self._num_steps)
        sources = [a for a in plan.admissions if a.source]
        for admission in plan.admissions:
            for holder in (
                *(self._slots, self._sampler, self._images),
                *(self.adapters, self._pooler),
            ):
                if holder is not None:
                    holder.admit(admission)
        self.cache.copy_pages(plan.copies)
        if not plan.segments:
            return None
        view = None
        out = None
        # Of a decode step, whether a row is of an image.
        has_images = self._images is not None and any(
            s.tokens[-1] >= FIRST_ID for s in plan.segments
        )
        # These need more than a graph holds.
        is_special = has_images | self.adapters.begin(plan) | self._pooler.has_part_in(plan)
        if self._graphs is not None and not is_special:
            out = self._graphs.run(plan, self._slots)
        if out is None:
            view = BatchView(
                self.cache,
                plan,
                self.model.device,
                slots=self._slots,
                sources=[(a.slot, len(a.source)) for a in sources],
                row_invariant=self._row_invariant,
                sees_images_whole=self.model.sees_images_whole,
            )
            out = self._forward(view, sources)
        result: StepOutput | None = None
        if self._sampler is not None:
            num_logits = self.model.num_logits or self.model.vocab_size
            result = self._sampler.sample(out[0, :, :num_logits], plan)
            if view is not None:
                result = result._replace(vectors=self._pooler.vectors(plan, view.hidden))
        if self._records:
            result = (result or StepOutput())._replace(routes=self._routes(plan))
        if self._draft_model is not None:
            sampled = None if result is None else result.tokens
            assert view is not None, "a model that drafts has no graphs"
            drafts = self._draft_model.draft(plan, view, sampled, self._slots)
            result = None if result is None else result._replace(drafts=drafts)
        return result

    def _routes(self, plan: StepPlan) -> Integers:
        """Return the experts [N, layers, k] of the rows of a step, in layers of this stage."""
        c = self.model.config
        num_rows = sum(len(segment.tokens) for segment in plan.segments)
        found = torch.zeros(num_rows, c.num_layers, c.moe_router_topk, dtype=torch.int64)
        for router in self._routers:
            assert router.router_replay is not None, "it records"
            experts = router.router_replay.get_recorded_indices()
            assert experts is not None, "the layer has run"
            found[:, router.layer_number - 1] = experts[:num_rows].to(found.device)
        return found.numpy()

    def release(self) -> None:
        """Free what belongs to the weights of now: graphs, and embeddings of images.

        NCCL does not destroy a group while a CUDA graph holds its collectives.
        """
        if self._graphs is not None:
            self._graphs.release()
        if self._images is not None:
            self._images.rows.clear()

    def _decode(self, view: BatchView) -> Tensor:
        """Return the logits of a decode step; a CUDA graph captures this."""
        view.prepare()
        return self._forward(view, [])

    def _forward(self, view: BatchView, sources: list[Admission]) -> Tensor:
        """Return logits [1, r, v] on the last stage; send hidden states on from the others."""
        pp = self.model.groups.pp
        module = self.model.module
        if self.model.decoder_start is not None:
            return self._forward_encoder_decoder(view, sources)
        ids = view.token_ids.unsqueeze(0)
        if pp.rank():
            get_attr_wrapped_model(module, "set_input_tensor")([self._received(ids.shape[1])])
        positions = view.grid
        if positions is None:
            positions = view.positions(ids.shape[1])[0].unsqueeze(0)
        more: dict[str, Any] = {}
        if self._images is not None and (view.host_ids >= FIRST_ID).any():
            embedding = get_attr_wrapped_model(module, "embedding")
            # Ids of text stand in the places of images too.
            text = torch.from_numpy(np.where(view.host_ids >= FIRST_ID, 0, view.host_ids))
            embedded = embedding(text.to(ids.device)[None], positions)
            rows = self._images.put(view.host_ids, embedded)
            more["decoder_input"], added = decoder_inputs(rows, embedded.shape[-1])
            more |= {"extra_block_kwargs": added} if added else {}
        out: Tensor = module(ids, positions, None, inference_context=view, **more)
        if not self.model.is_last_stage:
            self._send_on(out)
        return out

    def _forward_encoder_decoder(self, view: BatchView, sources: list[Admission]) -> Tensor:
        """Return logits, or the hidden states that this stage sends on; the first stages encode.

        A stage of the encoder sends the hidden states [S, 1, h] of all sources, and nothing in a
        step without sources; a stage of the decoder sends these and then the states of the rows.
        """
        pp = self.model.groups.pp
        module = self.model.module
        num_sources = sum(len(a.source) for a in sources)
        encoder_stages: int = get_attr_wrapped_model(module, "encoder_stages")
        if pp.rank() < encoder_stages:
            states = self._encoded(sources)
            if num_sources:
                self._send_on(states)
            return states
        ids = view.token_ids.unsqueeze(0)
        encoded: Tensor | None = None
        if pp.rank() > encoder_stages:
            received = self._received(num_sources + ids.shape[1])
            get_attr_wrapped_model(module, "set_input_tensor")([received])
        elif encoder_stages:
            encoded = self._received(num_sources)
        else:
            encoded = self._encoded(sources)
        out: Tensor = module(None, ids, encoder_hidden_states=encoded, inference_context=view)
        if not self.model.is_last_stage:
            self._send_on(out)
        return out

    def _received(self, num_rows: int) -> Tensor:
        """Return the hidden states [num_rows, 1, h] of the stage before; it sends none for 0."""
        pp = self.model.groups.pp
        shape = (num_rows, 1, self.model.config.residual_width)
        received = torch.empty(shape, dtype=self._sent_dtype, device=self.model.device)
        if num_rows:
            dist.recv(received, group=pp, group_src=pp.rank() - 1)
        return received

    def _send_on(self, hidden: Tensor) -> None:
        """Send to the next stage; it may still be busy, so only the send before is waited for."""
        pp = self.model.groups.pp
        if self._sent is not None:
            self._sent[0].wait()
        hidden = hidden.to(self._sent_dtype).contiguous()
        work = dist.isend(hidden, group=pp, group_dst=pp.rank() + 1)
        assert work is not None, "this rank is in the group"
        self._sent = work, hidden

    def _encoded(self, sources: list[Admission]) -> Tensor:
        """Run this stage's encoder over each source alone; return all their tokens in a row.

        A later stage of the encoder receives the tokens of all sources at once.
        """
        pp = self.model.groups.pp
        lengths = [len(a.source) for a in sources]
        parts: list[Tensor | None] = [None] * len(sources)
        if pp.rank():
            parts = [*self._received(sum(lengths)).split(lengths)]
        hidden = [torch.empty(0, 1, self.model.config.hidden_size, device=self.model.device)]
        for admission, part in zip(sources, parts, strict=True):
            if part is not None:
                get_attr_wrapped_model(self.model.module, "set_input_tensor")([part])
            ids = torch.tensor([admission.source], device=self.model.device)
            hidden.append(self.model.module(ids, None, output_encoder_hidden_only=True))
        return torch.cat([part.to(hidden[-1].dtype) for part in hidden])


def _runs_alone(model: GenerationModel) -> bool:
    """Return whether a forward pass needs no other stage, and no numbers of experts' tokens.

    On a CPU collectives cannot be recorded.
    """
    return (
        model.groups.pp.size() == 1
        and (model.groups.tp.size() == 1 or device.records_graphs())
        and model.groups.ep.size() == 1
        and model.config.num_moe_experts is None
        and model.decoder_start is None
    )


class Pooler:
    """Vectors of the texts of requests with ``pooling``, from the last hidden states.

    A mean is summed over the steps that compute parts of a prompt.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, Pooling] = {}  # by slot
        self._sums: dict[int, Tensor] = {}

    def admit(self, admission: Admission) -> None:
        """Take the kind of a request; its slot forgets the request before it."""
        self._sums.pop(admission.slot, None)
        self._kinds.pop(admission.slot, None)
        if admission.pooling is not None:
            self._kinds[admission.slot] = admission.pooling

    def has_part_in(self, plan: StepPlan) -> bool:
        """Return whether a request of the plan has a vector."""
        return bool(self._kinds) and any(s.slot in self._kinds for s in plan.segments)

    def vectors(self, plan: StepPlan, hidden: Tensor | None) -> Floats:
        """Return the vectors [p, h] of requests that end with this step; ``hidden`` [N, 1, h]."""
        found = []
        first = 0
        for segment in plan.segments if self.has_part_in(plan) else ():
            assert hidden is not None, "the last stage has them"
            end = first + len(segment.tokens)
            kind = self._kinds.get(segment.slot)
            vector = hidden[end - 1, 0].float()
            if kind == "mean":
                vector = self._sums.get(segment.slot, 0) + hidden[first:end, 0].float().sum(0)
                self._sums[segment.slot] = vector
                vector = vector / segment.num_keys
            if kind is not None and len(segment.targets):
                found.append(vector.cpu().numpy())
            first = end
        return np.stack(found) if found else NO_VECTOR.reshape(0, 0)


class ImageStore:
    """Embeddings of the images of running requests, on a rank of the first stage.

    ``encode(pixels [t, 3, H, W], sizes)`` returns the rows [n, h]; collective over the
    tensor-parallel group; see `GenerationModel`.  An image is encoded when a step first has rows of
    it: never if the prefix cache has all.
    """

    def __init__(
        self, encode: Callable[[Tensor, Tensor | None], Tensor], device: torch.device
    ) -> None:
        self._encode = encode
        self._device = device
        self._of_slot: dict[int, tuple[PromptImage, ...]] = {}
        self.rows: dict[int, Tensor] = {}  # by key of the image

    def admit(self, admission: Admission) -> None:
        """Take the images of a request; its slot forgets the request before it."""
        self._of_slot[admission.slot] = admission.images
        self.rows = {key: self.rows[key] for key in self._images() if key in self.rows}

    def put(self, ids: Ids, embedded: Tensor) -> Tensor:
        """Put the embeddings of images into the rows ``ids`` of ``embedded`` [N, 1, h].

        They may be wider; the result is then as wide, see `decoder_inputs`.
        """
        of_image = np.flatnonzero(ids >= FIRST_ID)
        keys, places = np.divmod(ids[of_image] - FIRST_ID, 1 << PLACE_BITS)
        for key in dict.fromkeys(keys.tolist()):
            if key not in self.rows:
                image = self._images()[key]
                sizes = torch.tensor([image.size], device=self._device) if image.size else None
                pixels = torch.from_numpy(image.pixels).to(self._device)
                self.rows[key] = self._encode(pixels, sizes)
                assert len(self.rows[key]) == image.num_rows, "the ids have been counted"
            mine = keys == key
            rows = self.rows[key][torch.from_numpy(places[mine]).to(self._device)]
            embedded = F.pad(embedded, (0, rows.shape[-1] - embedded.shape[-1]))
            at = torch.from_numpy(of_image[mine]).to(self._device)
            embedded[at, 0] = rows.to(embedded.dtype)
        return embedded

    def _images(self) -> dict[int, PromptImage]:
        return {image.key: image for held in self._of_slot.values() for image in held}
