"""Export a model as ONNX graphs, by torch's exporter on our modules (convert.py --format onnx).

Batch and length are dynamic.  GPT and the decoder of T5 read keys and values of earlier tokens
(``past_key_values.N.key``) and append the new tokens' to them (``present.N.key``), by the names of
Hugging Face's optimum.  A past of length 0 makes the graph process a prompt, so that one graph
serves prompts and single tokens.  Every expert computes all tokens, since the shapes in a graph do
not depend on the choices of the router.

``b`` sequences, ``s`` new tokens, ``p`` earlier tokens, ``g`` key/value heads, ``d`` head width.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import optional
from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.device import cpu_kernels
from megatron.core.dist_checkpointing.manifest import adopt_file, write_text
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.enums import AttnBackend, AttnMaskType
from megatron.core.progress import Progress
from megatron.core.transformer.attention_masks import Window
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.kv_cache import Core, PositionBias
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.routing import RoutingResult
from megatron.core.transformer.moe.token_dispatcher import (
    DispatchedTokens,
    Meanwhile,
    TokenDispatcher,
)
from megatron.training.config.run import RunConfig
from megatron.training.conversion.verify import (
    differences,
    our_model,
    our_outputs,
    synthetic_inputs,
    token_types,
)
from megatron.training.models.registry import model_kind_of

FORMAT = "onnx"
REPORT = "report.json"
Named = dict[str, Tensor]
_FLAG = f"--format {FORMAT}"
_OPERATORS = "onnxscript.function_libs.torch_lib.ops.core"
_PAST = "past_key_values."
_PRESENT = "present."
_IDS = {0: "batch", 1: "sequence"}
# Dimensions of inputs that vary; `_dims_of_past` has those of past keys and values.
_DIMS: dict[str, dict[int, str]] = {
    **dict.fromkeys(("input_ids", "position_ids", "token_type_ids"), _IDS),
    "attention_mask": {0: "batch", 1: "total"},
    "encoder_attention_mask": {0: "batch", 1: "encoder_total"},
    "encoder_hidden_states": {0: "batch", 1: "encoder_sequence"},
    "pixel_values": {0: "batch"},
}
# Sizes in examples.  All differ: the exporter takes equal ones for one dimension.
_BATCH = 2
_LENGTH = 5
_OTHER_LENGTH = 7
_PAST_LENGTH = 3


@dataclass(frozen=True)
class Graph:
    """One ONNX file: ``compute`` maps named inputs to named outputs.

    ``inputs`` returns the inputs for ids [b, s] (or images) that follow a number of earlier tokens,
    without the keys and values of these.
    """

    name: str
    compute: Callable[[Named], Named]
    inputs: Callable[[Tensor, int], Named]

    def past(self, ids: Tensor, length: int) -> Named:
        """Return keys and values of ``length`` tokens, zeros; {} for a graph without a cache."""
        made = self.compute(self.inputs(ids, 0))
        return {
            _PAST + name.removeprefix(_PRESENT): x.new_zeros(*x.shape[:2], length, x.shape[3])
            for name, x in made.items()
            if name.startswith(_PRESENT)
        }


@torch.no_grad()
def export(
    folder: Path,
    config: RunConfig,
    tensors: Mapping[str, LazyTensor],
    vocab_size: int,
    *,
    verify: bool,
) -> JsonObject:
    """Write the graphs and report.json into ``folder``; return the report.

    ``verify``: run the graphs by onnxruntime and compare their outputs with the model's.  Raises
    CheckpointError for a model that has no graph, and if outputs differ.
    """
    for package in ("onnx", "onnxscript", *(("onnxruntime",) if verify else ())):
        optional.require(package, _FLAG)
    plain = config.model.changed(attention_backend=AttnBackend.unfused)
    config = replace(config, model=plain)
    model = our_model(config, tensors, vocab_size)
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = AllTokens(layer.router.num_experts, layer.router.groups)
    ids = synthetic_inputs(config, vocab_size)
    expected = list(our_outputs(model, config, ids))
    graphs = _graphs(model, config)
    examples = ids
    if not model_kind_of(config).classifies_images:
        examples = ids.flatten()[:_LENGTH].repeat(_BATCH, 1)
    report: JsonObject = {"graphs": {}}
    for graph in graphs:
        name = f"{graph.name}.onnx"
        with Progress(f"exporting {name}"):
            report["graphs"][name] = _export(graph, model, examples, folder / name)
    report["bytes"] = sum(adopt_file(path).num_bytes for path in folder.glob("*.onnx*"))
    if verify:
        spent_s: list[float] = []
        found = _outputs(graphs, _runner(folder, spent_s), ids)
        is_text = ids.dim() == 2
        report["unit"] = "tokens" if is_text else "images"
        report["per_second"] = (ids.numel() if is_text else len(ids)) / sum(spent_s)
        names = ("max_logit_error", "mean_logit_error", "largest_logit")
        report |= dict(zip(names, differences(found, expected), strict=True))
        report["compared_inputs"] = list(ids.shape)
    write_text(folder / REPORT, json.dumps(report, indent=2) + "\n")
    return report


def check(config: RunConfig) -> None:
    """Raise CheckpointError unless the model has a graph."""
    kind = model_kind_of(config)
    if kind.reads_images or kind.has_placeholders or config.language_model.model_kind == "mamba":
        reason = f"the model is {kind.title}; exported are GPT, BERT, T5 and the image classifier"
    elif config.model.num_moe_experts is not None and (
        config.model.moe_expert_capacity_factor is not None or config.model.moe_apply_probs_on_input
    ):
        reason = (
            "a graph computes all tokens by every expert and weights the results: it has neither "
            "--moe-expert-capacity-factor nor weights of the experts' inputs"
        )
    elif config.model.experimental_attention_variant is not None:
        reason = "the model has linear attention, whose state the graph has no input for"
    elif config.preference.reward_model:
        reason = "the model is a reward model, which generates no tokens"
    else:
        return
    raise CheckpointError(f"{_FLAG}: {reason}: use --format hf")


def describe(config: RunConfig, vocab_size: int) -> JsonObject:
    """Return a config.json for a model that Hugging Face has no class for."""
    model = config.model
    return {
        "model_type": f"megatron-{config.language_model.model_kind}",
        "vocab_size": vocab_size,
        "max_position_embeddings": config.language_model.max_position_embeddings,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
    }


def summary(report: JsonObject) -> str:
    """Return a message about ``report``, which `export` has verified."""
    return (
        "onnxruntime computes the model's logits within {max_logit_error:.2g} (on average "
        "{mean_logit_error:.2g}, the largest logit is {largest_logit:.3g}); {bytes:,} bytes; "
        "{per_second:.3g} {unit}/s here"
    ).format(**report)


class AllTokens(TokenDispatcher):
    """Gives all tokens to every expert; results of experts that a token did not choose count 0."""

    def dispatch(
        self, x: Tensor, routing: RoutingResult, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        """Return x [n, h] once for each expert."""
        if meanwhile is not None:
            meanwhile()
        num_tokens = x.shape[0]
        weights = routing[0].t().flatten()

        def back(rows: Tensor) -> Tensor:
            return rows.view(self.num_experts, num_tokens, -1).sum(0)

        rows = x.repeat(self.num_experts, 1)
        return _Complete(rows, weights, [num_tokens] * self.num_experts, back)


class _Complete(DispatchedTokens):
    def without_tail(self) -> DispatchedTokens:
        """Return the tokens: there is no tail, and comparing their numbers would fix them."""
        return self


class TracedCache:
    """A `KVCache` whose tensors are inputs and outputs of a graph.

    ``past``: "N.key" and "N.value" -> [b, g, p, d]; ``present`` collects [b, g, p + s, d].  Keys
    and values of the encoder are "N.encoder.key" and "N.encoder.value".  ``padding`` [b, p + s] and
    ``other_padding`` are True for tokens to hide.  ``positions`` are [s] or [s, b].
    """

    def __init__(
        self,
        past: Named,
        positions: Tensor,
        windows: Mapping[Any, Window],
        padding: Tensor | None = None,
        other_padding: Tensor | None = None,
        prefix: str = "",
    ) -> None:
        self.past = past
        self.present: Named = {}
        self.place = positions
        self.windows = windows
        self.prefix = prefix
        self.padding = padding
        self.other_padding = other_padding

    def positions(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the positions, and the length of the complete row as the context of each."""
        past = next(iter(self.past.values())).shape[2] if self.past else 0
        return self.place, self.place.new_ones(1) * (past + num_tokens)

    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        core: Core,
        *,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
    ) -> Tensor:
        """Append to the past and attend, with a mask in place of causality and windows."""
        keys, values = self._joined(f"{layer_index}.{self.prefix}", key, value)
        count = query.shape[0]
        total = keys.shape[0]
        slots = torch.arange(total)
        distance = slots[total - count :, None] - slots
        hidden = distance < 0
        if core in self.windows:
            hidden = hidden | (distance > self.windows[core][0])
        if self.padding is not None:  # a token sees itself: a softmax over nothing is NaN
            hidden = hidden | (self.padding[:, None, None] & (distance != 0))
        table = None if bias is None else bias(total - count, count, total)
        kind = AttnMaskType.arbitrary
        return core(query, keys, values, hidden, attn_mask_type=kind, attention_bias=table)

    def attend_to_other(
        self,
        layer_index: int,
        query: Tensor,
        project: Callable[[], tuple[Tensor, Tensor]],
        core: Core,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to the encoder's output.

        Its projections are appended to the past: a later pass is given the past and no output.
        """
        keys, values = self._joined(f"{layer_index}.encoder.", *project())
        hidden = None if self.other_padding is None else self.other_padding[:, None, None]
        return core(query, keys, values, hidden)

    def output_rows(self, hidden: Tensor) -> Tensor:
        """Return all rows."""
        return hidden

    def _joined(self, name: str, *new: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [p + s, b, g, d] with the past; values None: keys."""
        out = []
        for kind, tensor in zip(("key", "value"), new, strict=True):
            if not tensor.shape[-1]:  # latent attention: keys are the values too
                continue
            now = tensor.permute(1, 2, 0, 3)
            if (past := self.past.get(name + kind)) is not None:
                now = torch.cat([past, now], 2)
            self.present[_PRESENT + name + kind] = now
            out.append(now.permute(2, 0, 1, 3))
        return out[0], out[-1]


def _graphs(model: Any, config: RunConfig) -> list[Graph]:
    """Return the graphs of ``model``, a decoder last."""
    kind = model_kind_of(config)
    if kind.classifies_images:

        def of_images(images: Tensor, _: int) -> Named:
            return {"pixel_values": images}

        return [Graph("model", lambda x: {"logits": model(x["pixel_values"])}, of_images)]

    def of_text(ids: Tensor, past: int) -> Named:
        return {"input_ids": ids, "attention_mask": ids.new_ones(len(ids), past + ids.shape[1])}

    def of_pairs(ids: Tensor, past: int) -> Named:
        types = token_types(config, ids)
        more = {} if types is None else {"token_type_ids": types.contiguous()}
        return of_text(ids, past) | more

    def of_tokens(ids: Tensor, past: int) -> Named:
        places = torch.arange(past, past + ids.shape[1]).repeat(len(ids), 1)
        return of_text(ids, past) | {"position_ids": places}

    def of_decoder(ids: Tensor, past: int) -> Named:
        states = torch.zeros(len(ids), _OTHER_LENGTH, config.model.hidden_size)
        return {
            "input_ids": ids,
            "encoder_hidden_states": states,
            "encoder_attention_mask": ids.new_ones(len(ids), past + _OTHER_LENGTH),
        }

    if kind.has_masked_lm_head:
        return [Graph("model", partial(_bert, model), of_pairs)]
    windows = _take_windows(model)
    if not kind.has_encoder:
        return [Graph("model", partial(_gpt, model, windows), of_tokens)]
    return [
        Graph("encoder_model", partial(_encoder, model), of_text),
        Graph("decoder_model", partial(_decoder, model, windows), of_decoder),
    ]


def _take_windows(model: nn.Module) -> dict[Any, Window]:
    """Remove the windows of attention layers and return them: the cache applies them."""
    windows: dict[Any, Window] = {}
    for core in model.modules():
        if isinstance(core, DotProductAttention) and core.window is not None:
            windows[core] = core.window
            core.window = None
    return windows


def _past_in(inputs: Named) -> Named:
    return {n.removeprefix(_PAST): t for n, t in inputs.items() if n.startswith(_PAST)}


def _gpt(model: Any, windows: Mapping[Any, Window], x: Named) -> Named:
    ids = x["input_ids"]
    places = x["position_ids"]
    cache = TracedCache(_past_in(x), places.t(), windows, padding=x["attention_mask"] == 0)
    return {"logits": model(ids, places, None, inference_context=cache), **cache.present}


def _bert(model: Any, x: Named) -> Named:
    logits, order = model(x["input_ids"], x["attention_mask"], x.get("token_type_ids"))
    return {"logits": logits} | ({} if order is None else {"seq_relationship_logits": order})


def _encoder(model: Any, x: Named) -> Named:
    padding = x["attention_mask"] == 0
    states = model(x["input_ids"], None, padding, output_encoder_hidden_only=True)
    return {"last_hidden_state": states.transpose(0, 1)}


def _decoder(model: Any, windows: Mapping[Any, Window], x: Named) -> Named:
    ids = x["input_ids"]
    past = _past_in(x)
    start = next((t.shape[2] for n, t in past.items() if ".decoder." in n), 0)
    cache = TracedCache(
        past,
        torch.arange(start, start + ids.shape[1]),
        windows,
        other_padding=x["encoder_attention_mask"] == 0,
        prefix="decoder.",
    )
    states = x["encoder_hidden_states"].transpose(0, 1)
    logits = model(None, ids, encoder_hidden_states=states, inference_context=cache)
    return {"logits": logits, **cache.present}


class _Traced(nn.Module):
    """A graph as a module with positional inputs, which torch exports."""

    def __init__(self, model: nn.Module, graph: Graph, names: list[str]) -> None:
        super().__init__()
        self.model = model  # the exporter names weights after it
        self.graph = graph
        self.names = names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(self.names, inputs, strict=True))
        return tuple(self.graph.compute(named).values())


def _export(graph: Graph, model: nn.Module, ids: Tensor, path: Path) -> JsonObject:
    """Write a graph, with its weights in a file beside it; return the names of its tensors."""
    inputs = graph.inputs(ids, _PAST_LENGTH) | graph.past(ids, _PAST_LENGTH)
    names = list(inputs)
    outputs = list(graph.compute(inputs))
    dims = [_DIMS.get(name) or _dims_of_past(name) for name in names]
    # TopK of ONNX keeps the order of ties: the router's stable sort.
    operators = optional.require(_OPERATORS, _FLAG)
    # A recorded pass reads no values on the host, as a traced one must not.
    with cpu_kernels.recorded_by(lambda *_: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                _Traced(model, graph, names).eval(),
                tuple(inputs.values()),
                dynamo=True,
                verbose=False,
                input_names=names,
                output_names=outputs,
                dynamic_shapes={"inputs": tuple(dims)},
                custom_translation_table={torch.ops.aten.sort.stable: operators.aten_sort},
            )
        except torch.onnx.OnnxExporterError as error:
            cause = str(error.__cause__ or error).strip().splitlines()[0]
            raise CheckpointError(
                f"{_FLAG}: torch's exporter cannot trace this model ({cause}): use --format hf"
            ) from error
    assert program is not None, "the dynamo exporter returns a program"
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # lines of this program, most of the file
    program.save(path, external_data=True)
    return {"inputs": names, "outputs": outputs}


def _dims_of_past(name: str) -> dict[int, str]:
    return {0: "batch", 2: "encoder_past" if ".encoder." in name else "past"}


def _runner(folder: Path, spent_s: list[float]) -> Callable[[Graph, Named], list[Tensor]]:
    """Return a function that runs a graph in ``folder`` by onnxruntime on the CPU, and times it."""
    runtime = optional.require("onnxruntime", _FLAG)

    @cache
    def session(name: str) -> Any:
        path = str(folder / f"{name}.onnx")
        return runtime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(graph: Graph, inputs: Named) -> list[Tensor]:
        values = {name: tensor.numpy() for name, tensor in inputs.items()}
        loaded = session(graph.name)
        started_s = perf_counter()
        found = loaded.run(None, values)
        spent_s.append(perf_counter() - started_s)
        return [torch.from_numpy(out) for out in found]

    return run


def _outputs(
    graphs: list[Graph], run: Callable[[Graph, Named], list[Tensor]], ids: Tensor
) -> list[Tensor]:
    """Return the graphs' outputs for ``ids``, to compare with `our_outputs`.

    A model with a cache gets its tokens in three passes: some, one, and the rest.
    """
    *encoder, graph = graphs
    past = graph.past(ids, 0)
    if not past:
        return run(graph, graph.inputs(ids, 0))
    more: Named = {}
    if encoder:
        states = run(encoder[0], encoder[0].inputs(ids, 0))[0]
        more = {"encoder_hidden_states": states, "encoder_attention_mask": torch.ones_like(ids)}
        ids = ids.flip(1)
    logits = []
    length = ids.shape[1]
    for start, stop in pairwise((0, length // 2, length // 2 + 1, length)):
        out, *present = run(graph, graph.inputs(ids[:, start:stop], start) | more | past)
        logits.append(out)
        past = dict(zip(past, present, strict=True))
        if encoder:  # the past holds its keys and values now
            more["encoder_hidden_states"] = more["encoder_hidden_states"][:, :0]
    return [torch.cat(logits, 1)]
