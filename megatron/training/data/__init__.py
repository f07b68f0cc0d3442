"""From data flags to micro-batches on the device; `register_dataset` adds a dataset."""

from megatron.training.data.user_datasets import BuildDataset as BuildDataset
from megatron.training.data.user_datasets import register_dataset as register_dataset
