"""Model kinds that the entry scripts train; `register_model_kind` adds one."""

from megatron.training.models.kind import Batch as Batch
from megatron.training.models.kind import BatchTable as BatchTable
from megatron.training.models.kind import Layer as Layer
from megatron.training.models.kind import ModelImplementation as ModelImplementation
from megatron.training.models.kind import ModelKind as ModelKind
from megatron.training.models.kind import TensorSpec as TensorSpec
from megatron.training.models.kind import language_arguments as language_arguments
from megatron.training.models.registry import model_kind as model_kind
from megatron.training.models.registry import register_model_kind as register_model_kind
