"""Megatron-LM's import path of the datasets of --sft."""

from megatron.post_training.sft.dataset import MockSFTDataset as MockSFTDataset
from megatron.post_training.sft.dataset import SFTDataset as SFTDataset
from megatron.post_training.sft.dataset import SFTDatasetConfig as SFTDatasetConfig
from megatron.post_training.sft.dataset import SFTLowLevelDataset as SFTLowLevelDataset
