"""Linear layers and norms that compute with Transformer Engine; by our code where it cannot run.

Shapes and parameters are those of the base classes.  The parameters of a norm fused into a linear
layer have the names of a separate norm (`param_info.name_parameters`).  Collectives are the same
too, but the package runs them: it overlaps them with GEMMs, and gathers quantized inputs.

Without the package, or without a GPU, the layers have the same parameters and compute as their base
classes do: specs and converters that name these classes and parameters work everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.extensions.transformer_engine.delayed_scaling import EngineAmax
from megatron.core.extensions.transformer_engine.engine import (
    Engine,
    package,
    recipe_of,
    unsupported_reason,
)
from megatron.core.parallel.default_groups import library_call
from megatron.core.params.param_info import info_of
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    Linear,
    ReplicatedLinear,
    RowParallelLinear,
)
from megatron.core.tensor_parallel.quantized_linear import Recipe
from megatron.core.transformer.norms import Norm, PendingSum, normalize
from megatron.core.transformer.transformer_config import TransformerConfig


class _Computed(Linear):
    """Base of linear layers whose GEMMs an `Engine` computes, in place of the quantizer.

    ``engine`` is None if the package cannot run here.
    """

    config: TransformerConfig
    bias: nn.Parameter | None
    engine: Engine | None = None

    def __init__(self, *sizes: int, config: TransformerConfig, **arguments: Any) -> None:
        # The other base class of a layer takes these arguments.
        super().__init__(*sizes, config=config, **arguments)  # type: ignore[call-arg]
        self.config = config
        if self.weight is not None and unsupported_reason() is None:
            self.create_engine()

    def create_engine(self) -> None:
        """Call `use_engine` for the layer."""
        self.use_engine("Linear", "", None, bias=self.bias is not None)

    def use_engine(self, kind: str, mode: str, group: ProcessGroup | None, **more: object) -> None:
        """Create the engine, of the package's class ``kind``.

        ``mode`` is "column" or "row"; ``group``: the ranks over which the weight is sharded, with
        which the package communicates; None for a layer without communication.
        """
        assert self.weight is not None, "the engine of a layer without a weight"
        out_features, in_features = self.weight.shape
        if group is not None:
            out_features *= group.size() if mode == "column" else 1
            in_features *= group.size() if mode == "row" else 1
            more |= {"parallel_mode": mode, "tp_group": group, "tp_size": group.size()}
        self.quantizer = self.engine = Engine(
            kind,
            self.config,
            self.engine_parameters,
            in_features=in_features,
            out_features=out_features,
            **more,
        )

    def engine_parameters(self) -> dict[str, nn.Parameter | None]:
        """Return the parameters by the package's names."""
        return {"weight": self.weight, "bias": self.bias}

    def quantize(self, recipe: Recipe, amax_group: ProcessGroup) -> None:
        """Run the GEMMs in fp8 or fp4 by the package."""
        if self.engine is None:
            if self.weight is not None:
                super().quantize(recipe, amax_group)
            return
        self.engine.recipe = recipe_of(self.config)
        if recipe.history:
            assert self.weight is not None, "the engine has one"
            is_expert = info_of(self.weight).is_expert
            self.quantizer = self.engine.amax = EngineAmax(
                self.engine.run, recipe, self.weight, amax_group=amax_group, is_expert=is_expert
            )

    @staticmethod
    def product_of_all(linears: Sequence[_Computed]) -> Callable[[Tensor, Sequence[int]], Tensor]:
        """Return a grouped GEMM of these layers: (rows [m, i], rows per layer) -> [m, o].

        Rows are sorted by layer.  The caller adds biases.
        """
        first = linears[0]
        total = len(linears)
        config = first.config
        assert first.weight is not None, "experts have weights of their own"
        assert first.engine is not None, "it comes with the weight"
        of_first = first.engine
        engine = Engine(
            "GroupedLinear",
            config,
            lambda: {f"weight{i}": linear.weight for i, linear in enumerate(linears)},
            num_gemms=total,
            in_features=first.weight.shape[1],
            out_features=first.weight.shape[0],
            bias=False,
        )
        rows_each = 128 if config.fp4 is not None else config.width_multiple
        pad = package().Fp8Padding(num_gemms=total, align_size=rows_each)
        cut = package().Fp8Unpadding(num_gemms=total, align_size=rows_each)

        def product(rows: Tensor, counts: Sequence[int]) -> Tensor:
            engine.recipe = of_first.recipe
            sizes = list(counts)
            if engine.recipe is None:
                return engine.run(rows, sizes)
            padded, wider = pad(rows, sizes)
            y: Tensor = cut(engine.run(padded, wider), sizes)
            return y

        return product


class TEColumnParallelLinear(_Computed, ColumnParallelLinear):
    """`ColumnParallelLinear` by Transformer Engine; with a weight from the caller, by our code."""

    kind = "Linear"

    def create_engine(self) -> None:
        self.use_engine(
            self.kind,
            "column",
            self.grad_group,
            sequence_parallel=self.sequence_parallel,
            bias=self.bias is not None and not self.skip_bias_add,
            **self.norm_arguments(),
        )

    def norm_arguments(self) -> dict[str, object]:
        """Return the package's arguments for a fused norm before the GEMM."""
        return {}


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    """Norm of hidden states, fused with the `TEColumnParallelLinear` that follows it."""

    kind = "LayerNormLinear"

    def __init__(self, *sizes: int, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(*sizes, config=config, **arguments)
        norm = Norm(config, self.input_size, config.layernorm_epsilon)
        self.layer_norm_weight = norm.weight
        self.layer_norm_bias = norm.bias

    def forward(self, input_: Tensor, *more: Any, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Normalize, and multiply as `ColumnParallelLinear` does."""
        x = input_ if self.engine is not None else self.normalized(input_)
        return super().forward(x, *more, **arguments)

    def normalized(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` alone, by our code."""
        c = self.config
        weight: Tensor = self.layer_norm_weight
        if c.layernorm_zero_centered_gamma:
            weight = weight + 1
        return normalize(x, weight, self.layer_norm_bias, c.layernorm_epsilon)

    def norm_arguments(self) -> dict[str, object]:
        """See `TEColumnParallelLinear.norm_arguments`."""
        return {
            "eps": self.config.layernorm_epsilon,
            "normalization": self.config.normalization,
            "zero_centered_gamma": self.config.layernorm_zero_centered_gamma,
        }

    def engine_parameters(self) -> dict[str, nn.Parameter | None]:
        """Return the parameters of norm and linear layer by the package's names."""
        of_norm = {"layer_norm_weight": self.layer_norm_weight}
        return {**super().engine_parameters(), **of_norm, "layer_norm_bias": self.layer_norm_bias}


class TERowParallelLinear(_Computed, RowParallelLinear):
    """`RowParallelLinear` by Transformer Engine."""

    def create_engine(self) -> None:
        is_alone = self.tp_group.size() == 1
        self.use_engine(
            "Linear",
            "row",
            None if is_alone or self.is_expert else self.tp_group,
            sequence_parallel=self.sequence_parallel,
            bias=is_alone and not self.skip_bias_add and self.bias is not None,
        )

    def summed_product(self, x: Tensor) -> Tensor:
        """Return x W^T, reduced over the ranks; see `RowParallelLinear.summed_product`."""
        return super().summed_product(x) if self.engine is None else self.engine.run(x)


class TELinear(_Computed, ReplicatedLinear):
    """`ReplicatedLinear` by Transformer Engine."""

    parallel_mode = "duplicated"

    @library_call(
        unused="tp_comm_buffer_name symmetric_ar_type is_expert skip_weight_param_allocation "
        "tp_group"
    )
    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None = None,
        config: TransformerConfig,
        init_method: Any,
        bias: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        """Create the layer.  Raises ConfigError for sharded ones, which have their own classes."""
        if parallel_mode not in (None, "duplicated"):
            raise ConfigError(
                f"TELinear with parallel_mode {parallel_mode!r}: build a TEColumnParallelLinear or "
                "a TERowParallelLinear"
            )
        super().__init__(input_size, output_size, config=config, init_method=init_method, bias=bias)
        self.skip_bias_add = skip_bias_add

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Multiply: [.., i] -> [.., o], and the bias if its addition is left to the caller."""
        if self.skip_bias_add:
            return self._product(x, None), self.bias
        return super().forward(x)


class TENorm(Norm):
    """`Norm` by Transformer Engine; of a float32 residual stream and of sums, by our code."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **more: Any
    ) -> None:
        super().__init__(config, hidden_size, eps, **more)
        self._engine: Engine | None = None
        if unsupported_reason() is None:
            self._engine = Engine(
                "RMSNorm" if self.is_rms else "LayerNorm",
                config,
                lambda: {"weight": self.weight, "bias": self.bias},
                normalized_shape=hidden_size,
                eps=eps,
                zero_centered_gamma=self.is_zero_centered,
            )

    def forward(self, x: Tensor | PendingSum) -> Tensor | tuple[Tensor, Tensor]:
        """See `Norm`."""
        engine = self._engine
        if engine is not None and isinstance(x, Tensor) and x.dtype == self.weight.dtype:
            return engine.run(x)
        return super().forward(x)
