"""Datasets, loaders and micro-batches of a run; `register_dataset` adds a dataset."""

from megatron.training.data.datasets import BuildDataset as BuildDataset
from megatron.training.data.datasets import register_dataset as register_dataset
