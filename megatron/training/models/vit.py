"""Build an image classifier (ViT), its datasets and its batch table from a RunConfig."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.datasets.image_folder_dataset import (
    ImageFolderDataset,
    ImageFolderDatasetConfig,
    MockImageFolderDataset,
)
from megatron.core.models.bert.bert_layer_specs import (
    get_bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.vision.vit_classifier import ViTClassifier
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import Batch, BatchTable, ModelImplementation, TensorSpec


def build_vit_model(
    config: RunConfig,
    *,
    vp_stage: int | None = None,
    groups: ProcessGroupCollection,
    pre_process: bool = True,
    post_process: bool = True,
    **_of_text: Any,
) -> ViTClassifier:
    """Build one pipeline stage on the current device.  ``_of_text``: sizes of a vocabulary."""
    is_local = config.model.transformer_impl == "local"
    spec = get_bert_layer_local_spec if is_local else get_bert_layer_with_transformer_engine_spec
    return ViTClassifier(
        config.model,
        spec(config.model),
        config.image_classifier.num_classes,
        patch_dim=config.vision.patch_dim,
        img_h=config.vision.img_h,
        img_w=config.vision.img_w,
        sequence_length=config.data.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=groups,
    )


def vit_dataset_config(config: RunConfig, **common: Any) -> ImageFolderDatasetConfig:
    """Return the config of folders of images."""
    classes = config.image_classifier
    return ImageFolderDatasetConfig(
        img_h=config.vision.img_h,
        img_w=config.vision.img_w,
        num_classes=classes.num_classes,
        classes_fraction=classes.classes_fraction,
        data_per_class_fraction=classes.data_per_class_fraction,
        broken_samples=config.vision.broken_samples,
        **common,
    )


def vit_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads, None for those it does not.

    The first stage reads images [b, 3, H, W], the last labels and loss_mask [b].
    """
    vision = config.vision
    b = config.training.micro_batch_size
    is_first = stage == 0
    is_last = stage == num_stages - 1
    images = TensorSpec(torch.float32, (b, 3, vision.img_h, vision.img_w))
    return {
        "images": images if is_first else None,
        "labels": TensorSpec(torch.int64, (b,)) if is_last else None,
        "loss_mask": TensorSpec(torch.float32, (b,)) if is_last else None,
    }


def apply_vit(model: nn.Module, batch: Batch) -> Tensor:
    """Run one stage: the last returns logits [b, c], others hidden states."""
    output: Tensor = model(batch["images"])
    return output


VIT = ModelImplementation(
    build=build_vit_model,
    datasets=(ImageFolderDataset, MockImageFolderDataset),
    dataset_config=vit_dataset_config,
    batch=vit_batch,
    apply=apply_vit,
)
