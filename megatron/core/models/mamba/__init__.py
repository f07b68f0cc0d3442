"""Models of Mamba layers, alone or mixed with attention, MLP and expert layers."""

from megatron.core.models.mamba.mamba_model import MambaModel as MambaModel
