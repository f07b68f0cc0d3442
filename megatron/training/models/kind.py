"""Model kinds: a description (`ModelKind`) and an implementation (`ModelImplementation`).

Checks, estimates and tools read the description, which imports no model.  The implementation is
imported when a model is built.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.packed_seq_params import PackedBounds
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_hybrid_layer_allocation as letters
from megatron.core.ssm.mamba_hybrid_layer_allocation import layer_pattern
from megatron.core.transformer.config.attention import SPARSE_VARIANT
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    FULL,
    NO_OP,
    LayerShape,
    layer_shapes,
)
from megatron.core.transformer.layer_layout import (
    attends_to_neighbors,
    has_experts,
    has_linear_attention,
    indexer_of_layer,
    stacked_ranges,
)
from megatron.training.config.run import DPO, GRPO, REWARD, SFT, RunConfig

DELTA_NET = "delta_net"  # linear attention


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Parts of one layer.

    ``attention`` and ``mlp`` have the values of `LayerShape`, ``attention`` also DELTA_NET.  A
    layer of a hybrid model has exactly one part: a Mamba mixer, attention or an MLP.
    """

    attention: str = NO_OP
    mlp: str = NO_OP
    ffn_hidden_size: int = 0
    has_experts: bool = False
    has_mixer: bool = False
    has_indexer: bool = False  # of sparse attention
    has_cross_attention: bool = False
    is_encoder: bool = False  # part of the encoder, whose output the decoder attends to
    encoder: tuple[Layer, ...] = ()  # layers of an encoder inside this layer


def stack_of_layers(config: RunConfig) -> list[Layer]:
    """Return the layers of a single stack, followed by those of multi-token prediction."""
    model = config.model
    width = model.ffn_hidden_size or 0
    shapes = list(layer_shapes(model) or [LayerShape(FULL, FULL, width)] * model.num_layers)
    shapes += shapes[-1:] * (model.mtp_num_layers or 0)
    is_sparse = model.experimental_attention_variant == SPARSE_VARIANT
    return [
        Layer(
            attention=DELTA_NET if has_linear_attention(model, i) else shape.attention,
            mlp=shape.mlp,
            ffn_hidden_size=shape.ffn_hidden_size or 0,
            has_experts=has_experts(model, i),
            has_indexer=is_sparse and indexer_of_layer(model, i) == i,
        )
        for i, shape in enumerate(shapes)
    ]


def hybrid_layers(config: RunConfig) -> list[Layer]:
    """Return the layers that the --hybrid-* flags select, then those of multi-token prediction."""
    lm = config.language_model
    model = config.model
    pattern = layer_pattern(
        model.num_layers,
        lm.hybrid_attention_ratio,
        lm.hybrid_mlp_ratio,
        lm.hybrid_override_pattern,
    )
    of_letter = {
        letters.MAMBA: Layer(has_mixer=True),
        letters.ATTENTION: Layer(attention=FULL),
        letters.MLP: Layer(mlp=FULL, ffn_hidden_size=model.ffn_hidden_size or 0),
        letters.EXPERTS: Layer(mlp=FULL, has_experts=True),
    }
    pattern += (model.mtp_hybrid_override_pattern or "") * (model.mtp_num_layers or 0)
    return [of_letter[letter] for letter in pattern]


def encoder_decoder_layers(config: RunConfig) -> list[Layer]:
    """Return the encoder layers, then the decoder layers."""
    width = config.model.ffn_hidden_size or 0
    encoder = Layer(attention=FULL, mlp=FULL, ffn_hidden_size=width, is_encoder=True)
    decoder = replace(encoder, is_encoder=False, has_cross_attention=True)
    depth = config.language_model.decoder_num_layers or 0
    return [encoder] * config.model.num_layers + [decoder] * depth


def retro_layers(config: RunConfig) -> list[Layer]:
    """Return the decoder's layers; the first that attends to neighbors has their encoder."""
    layers = stack_of_layers(config)
    numbers = attends_to_neighbors(config.model.num_layers)
    for number in numbers:
        layers[number - 1] = replace(layers[number - 1], has_cross_attention=True)
    plain = replace(layers[0], has_cross_attention=False, is_encoder=True)
    reading = replace(plain, has_cross_attention=True)
    encoder = [plain if i % 3 else reading for i in range(config.retro.retro_encoder_layers)]
    first = numbers[0] - 1
    layers[first] = replace(layers[first], encoder=tuple(encoder))
    return layers


def stages_of_encoder_decoder(config: RunConfig) -> tuple[range, ...]:
    """Return the range into `encoder_decoder_layers` of each pipeline stage."""
    model = config.model
    num_ranks = config.model.pipeline_model_parallel_size
    depths = model.num_layers, config.language_model.decoder_num_layers or 0
    if num_ranks == 1:
        return (range(sum(depths)),)
    first, found = model.encoder_pipeline_model_parallel_size, []
    for rank in range(num_ranks):
        encoder, decoder = stacked_ranges(depths, first, pp_rank=rank, num_ranks=num_ranks)
        if encoder is not None:
            found.append(encoder)
        if decoder is not None:
            found.append(range(depths[0] + decoder.start, depths[0] + decoder.stop))
    return tuple(found)


class TensorSpec(NamedTuple):
    """Dtype and shape of one tensor of a micro-batch.

    A first size of -1: samples have different numbers of rows, which a batch concatenates to at
    most ``max_rows``.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    max_rows: int = 0

    def empty(self, device: torch.device) -> Tensor:
        """Return the tensor without values, and without rows if samples join theirs."""
        return torch.empty([max(0, size) for size in self.shape], dtype=self.dtype, device=device)

    def largest(self, device: torch.device) -> Tensor:
        """Return the tensor without values, with as many rows as it has at most."""
        shape = (self.max_rows, *self.shape[1:]) if self.is_joined else self.shape
        return torch.empty(shape, dtype=self.dtype, device=device)

    @property
    def is_joined(self) -> bool:
        """Whether a batch concatenates the tensors of its samples, instead of stacking them."""
        return self.shape[0] < 0


class DocumentSpec(NamedTuple):
    """Bounds of the documents of a micro-batch, or the mask of data that has no bounds.

    ``is_trimmed``: rows may be shorter, and the other tensors of a micro-batch join them.
    """

    num_rows: int
    num_tokens: int  # of a row
    is_trimmed: bool = False

    @property
    def mask(self) -> TensorSpec:
        """The mask."""
        return TensorSpec(torch.bool, (self.num_rows, 1, self.num_tokens, self.num_tokens))

    def empty(self, device: torch.device) -> PackedBounds:
        """Return the bounds of one document per row, without values."""
        bounds = TensorSpec(torch.int32, (self.num_rows + 1,))
        return PackedBounds(bounds.empty(device), self.num_tokens)

    def largest(self, device: torch.device) -> PackedBounds:
        """Return the same: a batch has as many rows as a stage reads."""
        return self.empty(device)


# Every tensor of a batch, in broadcast order; None: the stage does not need it.
BatchTable = dict[str, TensorSpec | DocumentSpec | None]
Batch = Mapping[str, Any]  # tensors, None, or the bounds of documents
Loss = Callable[
    [RunConfig, ProcessGroupCollection, Batch, Any], tuple[Tensor, Tensor, dict[str, Tensor]]
]


@dataclass(frozen=True, kw_only=True)
class ModelImplementation:
    """Functions and classes that build a model and its data from a RunConfig.

    ``build(config, *, vocab_size, padded_vocab_size, groups, pre_process, post_process, vp_stage,
    parallel_output)`` returns one pipeline stage on the current device.  ``datasets`` are two
    classes: the first reads files, the second makes mock data.  ``dataset_config(config,
    **common)`` returns their config; ``common`` holds the arguments that all kinds share.
    ``batch(config, stage, num_stages)`` returns the tensors that one stage reads.  ``apply(model,
    batch)`` runs a stage; the entry script's loss function receives what the last stage returns.
    ``splits_sequences``: the model takes complete sequences under context parallelism, and splits
    them itself.  ``loss(config, groups, batch, output)`` returns the loss of a micro-batch from
    what its last stage returns: the sum, what it is divided by, and what is logged.  None: the
    entry script's loss.  ``load_frozen(run)`` loads weights that are not trained and that no
    checkpoint of the run contains.  ``wrap_dataset(run, split, num_samples, dataset)`` returns
    a data set whose samples have more tensors.  ``joins_rows``: the batch table has
    ``packed_seq_params``, the bounds of samples; the model gets all rows of a micro-batch as one
    row [1, b s] with them.  ``prepare_data(run, dataset config)`` runs on every rank before the
    datasets are built, and returns further settings of the config.  ``replace_training(run)`` is
    called in place of the training loop; no optimizer is built.
    """

    build: Callable[..., nn.Module]
    datasets: tuple[type[MegatronDataset], type[MegatronDataset]]
    dataset_config: Callable[..., BlendedMegatronDatasetConfig]
    batch: Callable[[RunConfig, int, int], BatchTable]
    apply: Callable[[nn.Module, Batch], Any]
    splits_sequences: bool = False
    loss: Loss | None = None
    load_frozen: Callable[[Any], None] = lambda run: None
    wrap_dataset: Callable[..., Any] | None = None
    joins_rows: bool = False
    prepare_data: Callable[[Any, Any], dict[str, Any]] | None = None
    replace_training: Callable[[Any], None] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """Description of a model kind; the defaults describe GPT.

    ``implementation`` is a ModelImplementation or its import path ``package.module:NAME``.
    ``objectives``: those beside pretraining, values of `RunConfig.objective`, that this kind can
    have; `register_objectives` registers their implementations.
    ``layers`` returns the parts of each layer; the estimates of FLOPs, parameters and memory use
    it.  ``problems`` yields error messages for runs that this kind does not support.
    """

    title: str  # used in messages
    entry_script: str  # the program that trains it
    implementation: ModelImplementation | str
    objectives: frozenset[str] = frozenset()
    is_causal: bool = True  # False: attention is bidirectional
    has_encoder: bool = False  # encoder and decoder, each with its own depth and length
    is_hybrid: bool = False  # the --hybrid-* and --mamba-* flags describe the layers
    masks_tokens: bool = False  # in training samples, by --mask-prob
    has_masked_lm_head: bool = False  # BERT's output layers: masked tokens, sentence order
    reads_images: bool = False  # with an encoder on the first stage; --img-h and others describe it
    classifies_images: bool = False  # by --num-classes; images are its sequences, without text
    reads_neighbors: bool = False  # of chunks of its text; the --retro-* flags describe them
    has_placeholders: bool = False  # a row has a token for each embedding of an image or sound
    has_linear_attention: bool = False  # layers may have, by --experimental-attention-variant
    writes_text: bool = True  # autoregressively, for tools/text_generation_cli.py
    supports_context_parallel: bool = True
    transformers_class: str = "CausalLM"  # AutoModelFor... of Hugging Face transformers
    layers: Callable[[RunConfig], list[Layer]] = stack_of_layers
    problems: Callable[[RunConfig], Iterable[str]] = lambda config: ()

    def load(self) -> ModelImplementation:
        """Return the implementation; import it if its import path is given."""
        named = self.implementation
        found = pkgutil.resolve_name(named) if isinstance(named, str) else named
        assert isinstance(found, ModelImplementation), f"{named} is no ModelImplementation"
        return found


def language_arguments(
    config: RunConfig,
    *,
    vocab_size: int,
    padded_vocab_size: int,
    groups: ProcessGroupCollection | None = None,
    pre_process: bool = True,
    post_process: bool = True,
    parallel_output: bool = True,
) -> dict[str, Any]:
    """Return the constructor arguments that all language models share."""
    lm = config.language_model
    return {
        "vocab_size": padded_vocab_size,
        "unpadded_vocab_size": None if lm.pad_vocab_in_loss else vocab_size,
        "max_sequence_length": lm.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "fp16_lm_cross_entropy": lm.fp16_lm_cross_entropy,
        "parallel_output": parallel_output,
        "share_embeddings_and_output_weights": not lm.untie_embeddings_and_output_weights,
        "position_embedding_type": lm.position_embedding_type,
        "rotary_percent": lm.rotary_percent,
        "rotary_base": lm.rotary_base,
        "rope_scaling": lm.use_rope_scaling,
        "rope_scaling_factor": lm.rope_scaling_factor,
        "seq_len_interpolation_factor": lm.rotary_seq_len_interpolation_factor,
        "pg_collection": groups,
    }


GPT = ModelKind(
    title="GPT",
    entry_script="pretrain_gpt.py",
    implementation="megatron.training.models.gpt:GPT",
    has_linear_attention=True,
    objectives=frozenset({GRPO, SFT, DPO, REWARD}),
)
BERT = ModelKind(
    title="BERT",
    entry_script="pretrain_bert.py",
    implementation="megatron.training.models.bert:BERT",
    is_causal=False,
    masks_tokens=True,
    has_masked_lm_head=True,
    writes_text=False,
    supports_context_parallel=False,
    transformers_class="MaskedLM",
)
T5 = ModelKind(
    title="T5",
    entry_script="pretrain_t5.py",
    implementation="megatron.training.models.t5:T5",
    has_encoder=True,
    masks_tokens=True,
    supports_context_parallel=False,
    transformers_class="Seq2SeqLM",
    layers=encoder_decoder_layers,
)
MAMBA = ModelKind(
    title="Mamba",
    entry_script="pretrain_mamba.py",
    implementation="megatron.training.models.gpt:MAMBA",
    is_hybrid=True,
    layers=hybrid_layers,
)
RETRO = ModelKind(
    title="RETRO",
    entry_script="pretrain_retro.py",
    implementation="megatron.training.models.retro:RETRO",
    reads_neighbors=True,
    writes_text=False,  # tools/retro/text_generation.py does
    supports_context_parallel=False,
    layers=retro_layers,
)
VIT = ModelKind(
    title="the image classifier",
    entry_script="pretrain_vision_classify.py",
    implementation="megatron.training.models.vit:VIT",
    is_causal=False,
    classifies_images=True,
    writes_text=False,
    supports_context_parallel=False,
    transformers_class="ImageClassification",
)
VLM = ModelKind(
    title="the vision-language model",
    entry_script="pretrain_vlm.py",
    implementation="megatron.training.models.vlm:VLM",
    reads_images=True,
    has_linear_attention=True,
    transformers_class="ImageTextToText",
)
MIMO = replace(
    VLM,
    title="the MiMo model",
    entry_script="examples/mimo/train.py",
    implementation="megatron.training.models.mimo:MIMO",
    has_placeholders=True,
)
