"""Write the linear layers of a Hugging Face folder as codes and scales.

The scales belong to this program's layers: a calibrated checkpoint has them, else they follow from
the largest magnitudes.  A fused layer (query, key and value; gate and up) has one matrix here and
several there; conversion only selects and permutes rows, so the scale of each row is converted like
the row.  Squares with rows of several squares here, as with narrow heads, get new scales.

    --quant-format      files
    compressed-tensors  `quantization_config` in config.json: for vLLM, SGLang and transformers
    modelopt            hf_quant_config.json: for TensorRT-LLM, vLLM and SGLang
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.dist_checkpointing.validation import INSIDE_QUANTIZER
from megatron.core.params.param_info import info_of
from megatron.core.quantization.formats import (
    FP8_TENSOR,
    RECIPES,
    NumberFormat,
    Recipe,
    codes_of,
    pack_fp4,
    pack_int4,
    scales_of,
)
from megatron.core.quantization.quant_config import LayerRecipes
from megatron.core.tensor_parallel.layers import Linear
from megatron.training.config.run import RunConfig
from megatron.training.conversion.family import Family
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import Rule
from megatron.training.conversion.verify import model_on_meta

COMPRESSED_TENSORS = "compressed-tensors"
MODELOPT = "modelopt"
FORMS = (COMPRESSED_TENSORS, MODELOPT)
BUFFER = INSIDE_QUANTIZER  # in the names of the scales of a calibrated checkpoint


@dataclass(frozen=True)
class Quantization:
    """How linear layers are written; ``buffers``: scales of a calibrated checkpoint, or none."""

    recipe: Recipe
    form: str
    buffers: Mapping[str, LazyTensor]

    @property
    def input(self) -> NumberFormat | None:
        """Format of the inputs.  Without calibration each token has a scale of its own."""
        found = self.recipe.input
        if found is None or self.buffers:
            return found
        if found.has_two_levels:  # its second scale needs calibration
            return None
        return replace(found, block=(1, 0), is_dynamic=True)


def quantization_of(
    name: str | None, form: str, weights: Mapping[str, LazyTensor], recipe_of: LayerRecipes | None
) -> Quantization | None:
    """Return the quantization that --quant asks for or the checkpoint has, or None.

    ``recipe_of``: the recipes of a calibrated checkpoint.  Raises CheckpointError.
    """
    buffers = {key: tensor for key, tensor in weights.items() if BUFFER + "weight_scale" in key}
    if buffers:
        layers = {key.partition(BUFFER)[0] for key in buffers}
        buffers = {key: tensor for key, tensor in weights.items() if BUFFER in key}
        recipes = {recipe_of(layer) if recipe_of else None for layer in layers}
        saved = " and ".join(sorted(recipe.name if recipe else "none" for recipe in recipes))
        if len(recipes) > 1:
            raise CheckpointError(
                f"the checkpoint is calibrated for {saved} by --kitchen-config-file: the layers of "
                "a Hugging Face folder are written by one recipe; calibrate for one, or serve the "
                "checkpoint itself"
            )
        if name not in (None, saved):
            raise CheckpointError(
                f"--quant {name}: the checkpoint is calibrated for {saved}; leave --quant out"
            )
        name = saved
    if name is None:
        return None
    if name not in RECIPES:
        raise CheckpointError(f"--quant {name}: the recipes are {', '.join(RECIPES)}")
    found = Quantization(RECIPES[name], form, buffers)
    if form == MODELOPT:
        _modelopt_name(found)
    return found


def warning_of(found: Quantization, run: RunConfig) -> str | None:
    """Return a message if scales are not found by calibration, or differ from the checkpoint's."""
    recipe = found.recipe
    high = recipe.weight.block[0]
    width = 0 if run.model.multi_latent_attention else run.model.kv_channels or 0
    if found.buffers and high > 1 and width % high:
        return (
            f"WARNING: {recipe.name}: heads have {width} rows, so a square of {high} here mixes "
            "query, key and value: their scales are computed again for the matrices that are "
            "written, and logits differ slightly from the checkpoint's"
        )
    if found.buffers or found.input == recipe.input and recipe.algorithm == "max":
        return None
    return (
        f"WARNING: --quant {recipe.name} without calibration: weights are rounded to the nearest "
        "code, and inputs have no scale found on data; give --calib-data FILE, or calibrate by "
        "examples/post_training/modelopt/quantize.py and convert its checkpoint without --quant"
    )


def quantize(
    tensors: Sequence[LazyTensor],
    ours: Mapping[str, LazyTensor],
    wanted: Quantization,
    run: RunConfig,
    shape: ModelShape,
    family: Family,
) -> tuple[list[LazyTensor], JsonObject]:
    """Replace the weights of linear layers in ``tensors``; return also quantization_config.

    ``ours``: the weights by our names.  Raises CheckpointError for a layer that the format cannot
    represent.
    """
    layers: dict[str, list[LazyTensor]] = {}
    by_name = {tensor.name: tensor for tensor in tensors}
    for name in _layers_of(run, shape, wanted):
        rule = family.rule(name, shape)
        for index, theirs in enumerate(rule.theirs):
            _check(by_name.get(theirs), theirs, rule, wanted)
            scales = partial(_scales, ours[name], by_name[theirs], rule, index, shape, wanted)
            buffer = wanted.buffers.get(name.removesuffix(".weight") + BUFFER + "input_scale")
            layers[theirs] = list(_parts(by_name[theirs], scales, wanted, buffer))
    out = [part for tensor in tensors for part in layers.get(tensor.name, [tensor])]
    out += _of_cache(wanted, shape, family)
    cache = FP8_TENSOR if any(key.endswith("k_scale") for key in wanted.buffers) else None
    plain = [t.name for t in tensors if t.name not in layers and len(t.shape) == 2]
    ignored = [name.removesuffix(".weight") for name in plain if name.endswith(".weight")]
    if wanted.form == MODELOPT:
        algorithm = _modelopt_name(wanted)
        size = wanted.recipe.weight.block[1]
        settings: JsonObject = {"quant_algo": algorithm, "kv_cache_quant_algo": cache and "FP8"}
        settings |= {"group_size": size} if size else {}
        return out, {"quant_method": MODELOPT, **settings, "ignore": ignored}
    form = _form_of(wanted)
    group = {
        "targets": ["Linear"],
        "format": form,
        "weights": _described(wanted.recipe.weight),
        "input_activations": wanted.input and _described(wanted.input, is_input=True),
        "output_activations": None,
    }
    return out, {
        "quant_method": COMPRESSED_TENSORS,
        "quantization_status": "compressed",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": cache and _described(cache),
    }


def modelopt_file(settings: JsonObject) -> JsonObject:
    """Return hf_quant_config.json for a ``quantization_config`` of the form of ModelOpt."""
    inside = {k: v for k, v in settings.items() if k not in ("quant_method", "ignore")}
    inside["exclude_modules"] = settings["ignore"]
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inside}


def _of_cache(wanted: Quantization, shape: ModelShape, family: Family) -> Iterator[LazyTensor]:
    """Yield the scales of keys and values, by names of their attention layer."""
    is_modelopt = wanted.form == MODELOPT
    for key, scale in wanted.buffers.items():
        layer, _, own = key.partition(BUFFER)
        if own in ("k_scale", "v_scale"):
            theirs = family.rule(f"{layer}.linear_qkv.weight", shape).theirs[0]
            attention = theirs.rsplit(".", 2)[0] + (f".{own[0]}_proj" if is_modelopt else "")
            size = () if is_modelopt else (1,)
            yield LazyTensor(
                f"{attention}.{own}", torch.float32, size, partial(_reshaped, scale.make, size)
            )


def _reshaped(make: Callable[[], Tensor], size: tuple[int, ...]) -> Tensor:
    return make().reshape(size)


def _layers_of(run: RunConfig, shape: ModelShape, wanted: Quantization) -> Iterator[str]:
    """Yield our name of the weight of each linear layer that is quantized.

    These are the layers with scales, else the recipe's.
    """
    for layer in model_on_meta(run, shape.vocab_size).modules():
        if not isinstance(layer, Linear) or layer.weight is None:
            continue
        info = info_of(layer.weight)
        scale = info.name.removesuffix(".weight") + BUFFER + "weight_scale"
        is_skipped = info.is_embedding_or_output or any(
            fnmatchcase(info.name, pattern) for pattern in wanted.recipe.skipped
        )
        if scale in wanted.buffers if wanted.buffers else not is_skipped:
            yield info.name


def _check(tensor: LazyTensor | None, name: str, rule: Rule, wanted: Quantization) -> None:
    flag = f"--quant {wanted.recipe.name}: {name}"
    if tensor is None or rule.transposed:
        raise CheckpointError(
            f"{flag} is no matrix [out, in] of a linear layer in this family: the folders of "
            "quantized models have no form for it; write it without --quant"
        )
    to = wanted.recipe.weight
    problem = to.problem(tensor.shape)
    if problem is None and to.bits == 4 and to.kind == "int" and tensor.shape[1] % 8:
        problem = f"its {tensor.shape[1]} columns are no multiple of 8, which share a word"
    if problem is not None:
        raise CheckpointError(
            f"{flag} {list(tensor.shape)}: {problem}; the recipes are {', '.join(RECIPES)}"
        )


def _scales(
    ours: LazyTensor,
    theirs: LazyTensor,
    rule: Rule,
    index: int,
    shape: ModelShape,
    wanted: Quantization,
) -> tuple[Tensor, Tensor | None]:
    """Return the scales of matrix ``index`` of a layer, and its second scale for nvfp4."""
    to = wanted.recipe.weight
    layer = ours.name.removesuffix(".weight") + BUFFER
    high = to.block[0] or ours.shape[0]
    numbers = rule.to_theirs(torch.arange(ours.shape[0]) // high, shape)[index]
    if high < ours.shape[0] and not torch.equal(numbers[::high].repeat_interleave(high), numbers):
        return scales_of(theirs.make(), to)
    if layer + "weight_scale" in wanted.buffers:
        scale = wanted.buffers[layer + "weight_scale"].make()
        second = wanted.buffers.get(layer + "weight_scale_2")
        scale_2 = None if second is None else second.make()
    else:
        scale, scale_2 = scales_of(ours.make(), to)
    return scale[numbers[::high]], scale_2


def _parts(
    weight: LazyTensor,
    scales: Callable[[], tuple[Tensor, Tensor | None]],
    wanted: Quantization,
    input_scale: LazyTensor | None,
) -> Iterator[LazyTensor]:
    """Yield the tensors of one layer; each is computed from the weight when it is written."""
    to = wanted.recipe.weight
    is_modelopt = wanted.form == MODELOPT
    rows, columns = weight.shape
    layer = weight.name.removesuffix("weight")

    def part(
        own: str, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], Tensor]
    ) -> LazyTensor:
        return LazyTensor(
            layer + own, dtype, shape, lambda: make().to(dtype).reshape(shape).contiguous()
        )

    def codes() -> Tensor:
        scale, scale_2 = scales()
        found = codes_of(weight.make(), scale, to, scale_2)
        if to.has_two_levels:
            return pack_fp4(found)
        if not is_packed:
            return found
        return pack_int4(found) if to.bits == 4 else (found.int() + 128).byte().view(torch.int32)

    def second() -> Tensor:
        scale_2 = scales()[1]
        assert scale_2 is not None, "nvfp4 has it"
        return scale_2 if is_modelopt else 1 / scale_2

    is_packed = _form_of(wanted) == "pack-quantized" and not is_modelopt
    high, wide = (block or size for block, size in zip(to.block, weight.shape, strict=True))
    size: tuple[int, ...] = (rows // high, columns // wide)
    if to.block == (0, 0):
        size = () if is_modelopt else (1,)
    elif is_modelopt and high > 1:
        size = (rows // high, 1, columns // wide, 1)
    elif is_modelopt and to.block == (1, 0):
        size = (rows,)
    if to.has_two_levels:
        own = "weight" if is_modelopt else "weight_packed"
        yield part(own, torch.uint8, (rows, columns // 2), codes)
        yield part("weight_scale", torch.float8_e4m3fn, size, lambda: scales()[0])
        own = "weight_scale_2" if is_modelopt else "weight_global_scale"
        yield part(own, torch.float32, () if is_modelopt else (1,), second)
    else:
        dtype = weight.dtype if is_packed else torch.float32
        yield part("weight_scale", dtype, size, lambda: scales()[0])
        if is_packed:
            yield part("weight_packed", torch.int32, (rows, columns * to.bits // 32), codes)
            yield part("weight_shape", torch.int64, (2,), lambda: torch.tensor([rows, columns]))
        else:
            kind = torch.int8 if to.kind == "int" else torch.float8_e4m3fn
            yield part("weight", kind, (rows, columns), codes)
    if wanted.input is not None and input_scale is not None:
        is_inverse = to.has_two_levels and not is_modelopt
        make = input_scale.make
        own = "input_global_scale" if is_inverse else "input_scale"
        shape = () if is_modelopt else (1,)
        yield part(own, torch.float32, shape, (lambda: 1 / make()) if is_inverse else make)


def _form_of(wanted: Quantization) -> str:
    """Return the name of compressed-tensors' format."""
    to = wanted.recipe.weight
    if to.has_two_levels:
        return "nvfp4-pack-quantized"
    if to.kind == "float":
        return "float-quantized"
    return "pack-quantized" if to.bits == 4 or wanted.input is None else "int-quantized"


def _described(to: NumberFormat, *, is_input: bool = False) -> JsonObject:
    """Return the arguments of compressed-tensors for weights or inputs."""
    found: JsonObject = {"num_bits": to.bits, "type": to.kind, "symmetric": to.is_symmetric}
    found["dynamic"] = to.is_dynamic
    high, wide = to.block
    if to.has_two_levels:
        found |= {"strategy": "tensor_group", "group_size": wide}
        found |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        found["dynamic"] = "local" if to.is_dynamic else False
    elif high > 1:
        found |= {"strategy": "block", "block_structure": [high, wide]}
    elif wide:
        found |= {"strategy": "group", "group_size": wide}
    elif high:
        found["strategy"] = "token" if is_input else "channel"
    else:
        found["strategy"] = "tensor"
    return found


def _modelopt_name(wanted: Quantization) -> str:
    """Return ModelOpt's quant_algo.  Raises CheckpointError where its files have none."""
    to = wanted.recipe.weight
    source = wanted.input
    is_static = source is not None and not source.is_dynamic
    if to.has_two_levels:
        return "W4A16_NVFP4" if source is None else "NVFP4"
    if to.block == (128, 128):
        return "FP8_PB_WO"
    if to.kind == "float" and to.block == (0, 0) and is_static:
        return "FP8"
    if to.kind == "float" and to.block == (1, 0) and source is not None and source.is_dynamic:
        return "FP8_PER_CHANNEL_PER_TOKEN"
    raise CheckpointError(
        f"--quant-format modelopt with --quant {wanted.recipe.name}: written are nvfp4, "
        "fp8_blockwise, fp8_dynamic, and fp8 with --calib-data FILE or of a calibrated checkpoint; "
        "use --quant-format compressed-tensors"
    )
