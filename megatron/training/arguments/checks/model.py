"""Checks of the model architecture."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.errors import ConfigError
from megatron.core.device import CPU
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes
from megatron.training.config.run import RunConfig


def heads_divide_the_width(run: RunConfig) -> Iterator[str]:
    """Require that heads divide the hidden size, unless --kv-channels is given."""
    hidden, heads = run.model.hidden_size, run.model.num_attention_heads
    if run.asked["kv_channels"] is None and heads and hidden % heads:
        yield (
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: change "
            "one of them or give the width of a head by --kv-channels"
        )


def query_groups_divide_the_heads(run: RunConfig) -> Iterator[str]:
    """Require equally many query heads per key/value head."""
    heads, groups = run.model.num_attention_heads, run.model.num_query_groups
    if run.asked["group_query_attention"] and (groups < 1 or heads % groups):
        yield (
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}: use a "
            "divisor of it"
        )


def one_activation(run: RunConfig) -> Iterator[str]:
    """Refuse several activations, except --geglu with --openai-gelu."""
    a = run.asked
    gated = ("swiglu", "geglu", "quick_geglu")
    chosen = [f"--{name.replace('_', '-')}" for name in gated if a[name]]
    chosen += [flag for flag in ("--squared-relu", "--relu") if a[flag[2:].replace("-", "_")]]
    chosen += ["--openai-gelu"] if a["openai_gelu"] and chosen != ["--geglu"] else []
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other: keep the model's activation"


def one_kind_of_positions(run: RunConfig) -> Iterator[str]:
    """Refuse --use-rotary-position-embeddings with a type of position embedding that is another."""
    kind = run.asked["position_embedding_type"]
    is_default = kind == "learned_absolute"
    if run.asked["use_rotary_position_embeddings"] and not (is_default or kind in ("rope", "yarn")):
        yield (
            f"--position-embedding-type {kind} and --use-rotary-position-embeddings, which means "
            "--position-embedding-type rope, exclude each other: keep one of them"
        )


def clamps_leave_something(run: RunConfig) -> Iterator[str]:
    """Require a positive activation clamp: 0 would zero every gate."""
    clamp = run.model.activation_func_clamp_value
    if clamp is not None and clamp <= 0:
        yield f"--activation-func-clamp-value {clamp}: a number greater than 0 is needed"


def dropouts_are_probabilities(run: RunConfig) -> Iterator[str]:
    """Require dropout below 1, as the kept values are scaled by 1 / (1 - p)."""
    for flag, value in (
        ("--attention-dropout", run.model.attention_dropout),
        ("--hidden-dropout", run.model.hidden_dropout),
    ):
        if not 0 <= value < 1:
            yield f"{flag} {value}: a probability from 0 up to, but not including, 1 is needed"


def softcaps_are_positive(run: RunConfig) -> Iterator[str]:
    """Require positive soft caps; a cap is the largest magnitude of a logit."""
    for flag, value in (
        ("--attn-logit-softcapping", run.model.attn_logit_softcapping),
        ("--final-logit-softcapping", run.model.final_logit_softcapping),
    ):
        if value is not None and value <= 0:
            yield f"{flag} {value}: use a cap greater than 0; the default is no cap"


def one_query_key_norm(run: RunConfig) -> Iterator[str]:
    """Refuse norms of queries and keys that the attention does not have."""
    m = run.model
    if m.qk_l2_norm and m.multi_latent_attention:
        yield (
            "--qk-l2-norm and --multi-latent-attention exclude each other: use --qk-layernorm, "
            "which normalizes the latent vectors"
        )
    if m.qk_layernorm_full_width and not m.qk_layernorm:
        yield "--qk-layernorm-full-width widens --qk-layernorm, which is not given: add it"


def window_is_a_window(run: RunConfig) -> Iterator[str]:
    """Require a valid attention window, and a window for --window-attn-skip-freq."""
    m = run.model
    if m.window_size is not None and min(m.window_size) < -1:
        left, right = m.window_size
        yield f"--window-size {left},{right}: sides are counts of tokens, or -1 for no limit"
    pattern = m.window_attn_skip_freq
    if pattern is not None and m.window_size is None:
        yield "--window-attn-skip-freq needs --window-size"
    yield from _fits_layers("--window-attn-skip-freq", pattern, m.num_layers)


def no_rope_pattern_fits_the_layers(run: RunConfig) -> Iterator[str]:
    """Require one --no-rope-freq entry per layer."""
    yield from _fits_layers("--no-rope-freq", run.model.no_rope_freq, run.model.num_layers)


def _fits_layers(flag: str, pattern: int | tuple[int, ...] | None, layers: int) -> Iterator[str]:
    if isinstance(pattern, tuple) and layers and len(pattern) != layers:
        yield f"{flag} has {len(pattern)} entries and --num-layers is {layers}: they must agree"
    if isinstance(pattern, int) and pattern < 1:
        yield f"{flag} {pattern}: at least 1 is needed"


def residual_branches_once(run: RunConfig) -> Iterator[str]:
    """Refuse a residual from after the input norm if sublayers have no input norm."""
    m = run.model
    if m.apply_residual_connection_post_layernorm and m.layer_norm_placement == "post":
        yield (
            "--apply-residual-connection-post-layernorm needs a norm at the input of a sublayer, "
            "and --layer-norm-placement is post"
        )


def heterogeneous_layers_agree(run: RunConfig) -> Iterator[str]:
    """Require that the per-layer descriptions agree with the other flags."""
    try:
        layer_shapes(run.model)
    except ConfigError as error:
        yield str(error)


def spec_names_an_object(run: RunConfig) -> Iterator[str]:
    """Require that --spec is `local`, or a module and a name in it."""
    spec = run.language_model.spec
    if spec is not None and len(spec) != 2 and spec != ("local",):
        yield f"--spec {' '.join(spec)}: a module and a name in it, or local, is needed"


def tokens_ahead_have_what_they_need(run: RunConfig) -> Iterator[str]:
    """Refuse options that multi-token prediction does not support.

    Its layers have no learned positions, and they use the embedding and the output layer too.
    """
    m, lm = run.model, run.language_model
    if m.mtp_num_layers is None:
        return
    given = f"--mtp-num-layers {m.mtp_num_layers}"
    if lm.position_embedding_type == "learned_absolute":
        yield (
            f"{given}: multi-token prediction (MTP) does not support learned positions; use "
            "--position-embedding-type rope (or alibi or none)"
        )
    if m.defer_embedding_wgrad_compute and not lm.untie_embeddings_and_output_weights:
        yield (
            f"{given} and --defer-embedding-wgrad-compute need "
            "--untie-embeddings-and-output-weights: the MTP layers' embedding adds to the "
            "gradient of a tied weight"
        )


def transformer_impl_is_possible(run: RunConfig) -> Iterator[str]:
    """Refuse --require-transformer-engine with options that exclude it.

    These options turn it off, or use this program's own layers.
    """
    m, given = run.model, "--require-transformer-engine"
    if not m.require_transformer_engine:
        return
    if m.transformer_impl == "local":
        yield (
            f"{given} and --transformer-impl local exclude each other: keep the first for "
            "Transformer Engine's layers, the second for PyTorch's"
        )
        return
    if run.distributed.device == CPU:
        yield (
            f"{given} and --device cpu exclude each other: Transformer Engine needs a GPU, "
            "which --device cuda selects"
        )
    if m.why_own_matrices is not None:
        yield (
            f"{given}: {m.why_own_matrices}; keep --require-transformer-engine for Transformer "
            "Engine's GEMMs, or the other flag, which runs without it"
        )
