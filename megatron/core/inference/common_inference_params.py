"""The name of `SamplingParams` before Megatron Core 0.10."""

from megatron.core.inference.sampling_params import SamplingParams

CommonInferenceParams = SamplingParams
