"""Derive depths and lengths of models that read or classify images; see `derive`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron.core.config.errors import ConfigError
from megatron.core.models.vision.kinds import KINDS, get_num_image_embeddings
from megatron.core.parallel.context_parallel_partition import sequence_divisor
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.vision import largest_image
from megatron.training.models.registry import model_kind


def image_classes(ns: Namespace) -> Iterator[str]:
    """Derive the length of an image classifier's sequences, which tensor-parallel ranks divide.

    ``--data-path TRAIN VALID`` names a folder of each split, as in Megatron-LM's
    pretrain_vision_classify.py.
    """
    if not model_kind(ns.model_kind).classifies_images:
        return
    part = sequence_divisor(
        cp=ns.context_parallel_size,
        tp=ns.tensor_model_parallel_size,
        sequence_parallel=ns.sequence_parallel,
    )
    side = max(1, ns.patch_dim)  # a check reports 0
    length = (ns.img_h // side) * (ns.img_w // side) + 1
    for flag, given in (
        ("--seq-length", ns.seq_length),
        ("--encoder-seq-length", ns.encoder_seq_length),
        ("--max-position-embeddings", ns.max_position_embeddings),
    ):
        if given not in (None, length):
            yield (
                f"{flag} {given} is without effect: an image has {length} positions, its patches "
                "and the class token"
            )
    ns.seq_length = -(-length // part) * part
    ns.encoder_seq_length = None
    ns.max_position_embeddings = length  # the table must not depend on the layout
    words: tuple[str, ...] = tuple(ns.data_path or ())
    if len(words) == 2 and not _is_number(words[0]):
        ns.train_data_path = words[:1]
        ns.valid_data_path = words[1:]
        ns.data_path = None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def images(ns: Namespace) -> Iterator[str]:
    """Derive the encoder's depth and the lengths of a model that reads images.

    --encoder-num-layers is the encoder's depth and --decoder-num-layers the language model's; both
    default to --num-layers.  --dataloader-seq-length is the length of texts; --seq-length becomes
    that of the text with the embeddings of its images in their places, or --decoder-seq-length if
    that is more, in parts of equal length for the ranks that share a row.  Format torch, the only
    one of Megatron-LM's pretrain_vlm.py, becomes the default format.
    """
    has_placeholders = model_kind(ns.model_kind).has_placeholders
    if not has_placeholders:
        ns.model_provider = "mock"
        ns.num_frames = 1
        ns.encoder_tp = None
    if not model_kind(ns.model_kind).reads_images:
        return
    if ns.vision_model_type not in KINDS:
        ns.vision_model_type = None  # a value that is reported as refused
    if ns.ckpt_format == "torch":
        ns.ckpt_format = CheckpointConfig.ckpt_format
        yield (
            f"--ckpt-format torch is without effect: this run saves in format {ns.ckpt_format}, "
            "which has a place for the encoder of images; tools/checkpoint/convert.py writes "
            "torch_dist"
        )
    if ns.num_layers is None:
        ns.num_layers = ns.encoder_num_layers
    if ns.vision_num_layers is None:
        ns.vision_num_layers = ns.encoder_num_layers or ns.num_layers
    ns.num_layers = ns.decoder_num_layers or ns.num_layers
    ns.encoder_num_layers = None
    if has_placeholders:
        _mimo_defaults(ns)
    text = ns.dataloader_seq_length or ns.seq_length or ns.encoder_seq_length
    if text is None:
        return
    try:
        of_tile = get_num_image_embeddings(
            *(ns.img_h, ns.img_w, ns.patch_dim, ns.vision_model_type or "clip"),
            *(ns.disable_vision_class_token, 1, ns.pixel_shuffle),
        )
    except (ConfigError, ZeroDivisionError):  # a check reports it
        of_tile = 0
    of_image = largest_image(ns, of_tile) if ns.decoder_seq_length is None else of_tile
    num_images = 2 if ns.use_packed_sequence and ns.decoder_seq_length is None else 1
    length = max(text + num_images * of_image, ns.decoder_seq_length or 0)
    if has_placeholders:
        length = text
        text -= of_tile * ns.num_frames + ns.audio_seq_length * (ns.model_provider == "llava_avlm")
    part = sequence_divisor(
        cp=ns.context_parallel_size,
        tp=ns.tensor_model_parallel_size,
        sequence_parallel=ns.sequence_parallel,
    )
    ns.dataloader_seq_length = text
    ns.row_length = length
    ns.seq_length = -(-length // part) * part
    ns.decoder_seq_length = None
    # The table of positions must not depend on the layout.
    ns.max_position_embeddings = max(ns.max_position_embeddings or 0, length)
    ns.tp_comm_overlap |= ns.decoder_tp_comm_overlap


def _mimo_defaults(ns: Namespace) -> None:
    """Set the flags of the encoder of images, the data and the length by those of MiMo.

    All providers but mock have the layers of CLIP and drop its class token; only video_llava_vlm
    has several frames.  --total-seq-length is --seq-length, which counts placeholders.
    """
    if ns.model_provider != "mock":
        ns.vision_model_type = ns.vision_model_type or "clip"
        ns.disable_vision_class_token = True
    if ns.model_provider != "video_llava_vlm":
        ns.num_frames = 1
    if ns.image_size is not None:
        ns.img_h = ns.img_w = ns.image_size
    ns.dataloader_seq_length = ns.total_seq_length or ns.seq_length or ns.encoder_seq_length
    sources = ns.data_path or ns.data_args_path or ns.train_data_path or ns.per_split_data_args_path
    ns.mock_data |= ns.dataset_provider == "mock" or (ns.dataset_provider is None and not sources)
