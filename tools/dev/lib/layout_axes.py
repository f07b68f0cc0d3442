"""Features that must give the same results in every combination, with their flags.

The fuzzer samples from this table, the pairwise list of cases covers it, and `tools/dev/matrix.py`
writes a page about it.  A feature is one alternative of its group; ``{tp}`` and other names in
braces are `Sizes` or `Case.numbers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

BASE = (
    "--device cpu --hidden-size 32 --num-attention-heads 8 --num-layers {layers} "
    "--train-iters {steps} --mock-data --hidden-dropout 0 --attention-dropout 0 --log-interval 1 "
    "--eval-iters 0 --num-workers 0 --lr-decay-style constant --log-params-norm "
    "--log-num-zeros-in-grad --micro-batch-size {micro} --global-batch-size {batch}"
)
TEXT = (
    "--seq-length {seq} --max-position-embeddings {seq} --tokenizer-type NullTokenizer "
    "--vocab-size {vocab} --make-vocab-size-divisible-by 1"
)

WIDE = "--hidden-size 64"  # 32 values of a quantization block, also when sharded over two ranks
GRAPHS = "--enable-cuda-graph --cuda-graph-warmup-steps 1 --cuda-graph-scope"
VLM = (
    "--model-kind vlm --img-h 8 --patch-dim 4 --vision-num-layers 1 --vision-hidden-size 64 "
    "--vision-num-attention-heads 8"
)
DELTA_NET = (
    "--experimental-attention-variant gated_delta_net --linear-key-head-dim 4 "
    "--linear-value-head-dim 6 --linear-num-key-heads 4 --linear-num-value-heads 8"
)
MAMBA = "--model-kind mamba --mamba-state-dim 4 --mamba-head-dim 4 --mamba-num-groups 4"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Feature that ``flags`` of the command line enable.

    A feature with ``is_layout`` must not change results: the run on one process, to compare with,
    is started without its flags.  ``words`` describe a feature without flags.
    """

    name: str
    group: str
    flags: str = ""
    words: str = "the default"
    is_layout: bool = True
    needs: tuple[str, ...] = ()
    axis: str = ""  # axis of `Sizes` that it enables
    is_of_micro_batch: bool = False  # defined per micro-batch: its size changes results
    is_paired: bool = True  # listed in docs/matrix.md; else only sampled


def _axis(axis: str, name: str, flags: str) -> Feature:
    return Feature(name=name, group=axis.rstrip("4"), flags=flags, axis=axis)


def _layout(group: str, name: str, flags: str = "", *needs: str) -> Feature:
    return Feature(name=name, group=group, flags=flags, needs=needs)


def _model(group: str, name: str, flags: str = "", *needs: str) -> Feature:
    return Feature(name=name, group=group, flags=flags, needs=needs, is_layout=False)


def _of_micro_batch(group: str, name: str, flags: str) -> Feature:
    return Feature(
        name=name,
        group=group,
        flags=flags,
        needs=("experts",),
        is_layout=False,
        is_of_micro_batch=True,
    )


def _drawn(group: str, name: str, flags: str, *needs: str, is_layout: bool = False) -> Feature:
    of_micro_batch = group == "codes"  # tokens of a micro-batch share scales
    return Feature(
        name=name,
        group=group,
        flags=flags,
        needs=needs,
        is_layout=is_layout,
        is_of_micro_batch=of_micro_batch,
        is_paired=False,
    )


_FEATURES = (
    _axis("tp", "tp", "--tensor-model-parallel-size {tp}"),
    _layout("sequence", "sp", "--sequence-parallel", "tp"),
    _axis("pp", "pp", "--pipeline-model-parallel-size {pp}"),
    _layout("schedule", "interleaved", "{virtual}", "pp"),
    _layout("schedule", "zb-h1", "--pipeline-schedule zb-h1", "pp"),
    _layout("schedule", "zb-v", "--pipeline-schedule zb-v {virtual}", "pp"),
    _layout("stages", "uneven-stages", "--decoder-first-pipeline-num-layers {first}", "pp"),
    _layout("stages", "embedding-and-loss-as-layers",
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", "pp"),
    _layout("stages", "auto-split", "--pipeline-split auto", "pp"),
    _layout("stages", "layout-string", "--pipeline-model-parallel-layout {layout}", "pp"),
    _layout("transfers", "no-overlap-p2p", "--no-overlap-p2p-communication", "pp"),
    _layout("transfers", "overlap-p2p-warmup-flush",
            "--overlap-p2p-communication-warmup-flush", "pp"),
    _layout("in a row", "microbatch-groups",
            "--microbatch-group-size-per-virtual-pipeline-stage {group}", "interleaved"),
    _layout("mapping", "tp-pp-dp", "--use-tp-pp-dp-mapping", "pp"),
    _layout("output gradient", "defer-embedding-wgrad", "--defer-embedding-wgrad-compute", "pp"),
    _layout("output gradient", "deferral-limit",
            "--defer-embedding-wgrad-compute --wgrad-deferral-limit 1", "pp"),
    _layout("output gradient", "loss-in-chunks", "--loss-chunk-size 5"),
    Feature(name="dp", group="dp", axis="dp", words="more ranks than a replica needs"),
    _axis("cp", "cp-p2p", "--context-parallel-size {cp}"),
    _axis("cp", "cp-a2a", "--context-parallel-size {cp} --cp-comm-type a2a"),
    _axis("cp", "cp-allgather", "--context-parallel-size {cp} --cp-comm-type allgather"),
    _axis("cp", "cp-per-layer",
          "--context-parallel-size {cp} --cp-comm-type a2a{later_layers_p2p}"),
    _axis("cp4", "cp-a2a+p2p",
          "--context-parallel-size {cp4} --cp-comm-type a2a+p2p "
          "--hierarchical-context-parallel-sizes 2 2"),
    _layout("sharding", "zero-1", "--use-distributed-optimizer", "dp"),
    Feature(name="instances", group="instances", axis="instances", needs=("zero-1",),
            flags="--num-distributed-optimizer-instances {instances}"),
    _layout("gather", "overlap-param-gather", "--overlap-param-gather",
            "zero-1", "overlap-grad-reduce"),
    _layout("gather", "gather-with-step",
            "--overlap-param-gather --overlap-param-gather-with-optimizer-step",
            "zero-1", "overlap-grad-reduce"),
    _layout("reduce", "overlap-grad-reduce", "--overlap-grad-reduce", "dp"),
    _layout("buckets", "buckets", "--ddp-bucket-size 700", "dp"),
    _layout("buckets", "num-buckets", "--ddp-num-buckets 3", "dp"),
    _layout("bucket ends", "padded-buckets", "--ddp-pad-buckets-for-high-nccl-busbw", "dp"),
    _layout("alignment", "reduce-unaligned", "--no-align-grad-reduce",
            "pp", "overlap-grad-reduce"),
    _layout("average", "average-in-collective", "--ddp-average-in-collective", "dp"),
    _layout("sharded", "fsdp2", "--use-torch-fsdp2", "dp"),
    _layout("sharded", "fsdp2-kept",
            "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "dp"),
    Feature(name="hsdp", group="sharded", axis="instances", needs=("dp",),
            flags="--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
            "--num-distributed-optimizer-instances {instances}"),
    _layout("recompute", "recompute-full",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    _layout("recompute", "recompute-block",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1"),
    _layout("recompute", "recompute-selective",
            "--recompute-granularity selective --recompute-modules core_attn mlp layernorm"),
    _layout("recompute", "recompute-experts",
            "--recompute-granularity selective --recompute-modules moe", "experts"),
    _layout("recompute", "recompute-in-experts",
            "--recompute-granularity selective "
            "--recompute-modules moe_act layernorm shared_experts", "shared-expert"),
    _layout("recompute", "recompute-latent",
            "--recompute-granularity selective --recompute-modules mla_up_proj layernorm", "mla"),
    _layout("recompute", "recompute-distributed",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
            "--distribute-saved-activations", "tp"),
    _layout("fusion", "no-accumulation-fusion", "--no-gradient-accumulation-fusion"),
    _layout("processes", "virtual-ranks", "--virtual-ranks {ranks}"),
    _layout("deterministic", "deterministic", "--deterministic-mode"),
    _model("optimizer", "adam", "--optimizer adam --adam-eps 1e-3 --lr 0.01"),
    _model("optimizer", "sgd", "--optimizer sgd --lr 0.1"),
    _model("clip", "clip", "--clip-grad 0.5"),
    _model("clip", "no-clip", "--clip-grad 0"),
    _model("loss", "mean-of-microbatches"),
    _model("loss", "per-token-loss", "--calculate-per-token-loss"),
    _model("output", "tied"),
    _model("output", "untied", "--untie-embeddings-and-output-weights"),
    _model("heads", "gqa", "--group-query-attention --num-query-groups 4"),
    _model("positions", "learned"),
    _model("positions", "rope", "--position-embedding-type rope"),
    _model("positions", "yarn",
           "--position-embedding-type rope --rope-type yarn --rotary-scaling-factor 4 "
           "--yarn-original-max-position-embeddings 8"),
    _model("positions", "alibi", "--position-embedding-type alibi"),
    _model("softmax", "sinks", "--softmax-type learnable"),
    _model("softmax", "off-by-one", "--softmax-type off-by-one"),
    _model("window", "windows", "--window-size 5,0"),
    _model("window", "every-other-window", "--window-size 5,0 --window-attn-skip-freq 2"),
    _model("ahead", "tokens-ahead",
           "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5", "rope"),
    _model("ahead", "repeated-ahead",
           "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 --mtp-use-repeated-layer "
           "--mtp-detach-heads", "rope"),
    _model("ahead", "hybrid-ahead",
           "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 --mtp-hybrid-override-pattern M*-",
           "hybrid", "rope"),
    _model("ahead", "experts-ahead",
           "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 --mtp-use-repeated-layer "
           "--mtp-hybrid-override-pattern *E", "hybrid-experts", "rope"),
    _model("norm", "rms-norm", "--normalization RMSNorm"),
    _model("mlp", "swiglu", "--swiglu --ffn-hidden-size 64"),
    _model("mlp", "clamped-geglu",
           "--quick-geglu --ffn-hidden-size 64 --activation-func-clamp-value 0.05 "
           "--glu-linear-offset 1"),
    _model("bias", "no-bias", "--disable-bias-linear"),
    _model("precision", "bf16", "--bf16"),
    _model("precision", "fp16", "--fp16 --loss-scale 256"),
    _layout("reduced in", "grad-reduce-in-bf16", "--grad-reduce-in-bf16", "bf16", "dp"),
    _model("experts", "experts",
           "--num-experts {experts} --moe-router-topk {topk} --moe-ffn-hidden-size 64"),
    _layout("ep", "ep", "--expert-model-parallel-size {ep}", "experts", "dp"),
    _layout("ep", "ep-in-tp", "--expert-model-parallel-size {ep} --expert-tensor-parallel-size 1",
            "experts", "tp", "sp"),
    _layout("etp", "etp", "--expert-tensor-parallel-size {etp}", "experts", "dp"),
    _layout("dispatcher", "alltoall", "--moe-token-dispatcher-type alltoall", "experts"),
    _layout("dispatcher", "flex", "--moe-token-dispatcher-type flex", "experts"),
    _layout("travel", "tokens-beside-work", "--overlap-moe-expert-parallel-comm", "ep", "alltoall"),
    _layout("travel", "weights-beside-travel",
            "--overlap-moe-expert-parallel-comm --delay-wgrad-compute", "ep", "alltoall"),
    _of_micro_batch("balance", "aux-loss",
                    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.05"),
    _model("balance", "seq-aux-loss",
           "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.05", "experts"),
    _of_micro_batch("balance", "two-aux-losses",
                    "--moe-router-load-balancing-type seq_aux_loss aux_loss "
                    "--moe-aux-loss-coeff 0.05 0.02"),
    _of_micro_batch("balance", "global-aux-loss",
                    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.05"),
    _of_micro_batch("balance", "sinkhorn", "--moe-router-load-balancing-type sinkhorn"),
    _model("balance", "no-balance", "--moe-router-load-balancing-type none", "experts"),
    _of_micro_batch("balance", "dealt-out", "--moe-router-force-load-balancing"),
    _model("z-loss", "z-loss", "--moe-z-loss-coeff 0.01", "experts"),
    _model("scores", "sigmoid", "--moe-router-score-function sigmoid", "experts"),
    _model("scores", "expert-bias",
           "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
           "--moe-router-bias-update-rate 0.01", "experts"),
    _model("scores", "sqrtsoftplus", "--moe-router-score-function sqrtsoftplus", "experts"),
    _model("scores", "pre-softmax", "--moe-router-pre-softmax", "experts"),
    _model("choice", "hash-routing", "--moe-num-hash-layers {later}", "experts"),
    _model("width of experts", "latent-experts", "--moe-latent-size 16", "experts"),
    _model("groups of experts", "expert-groups",
           "--moe-router-num-groups 2 --moe-router-group-topk 1 "
           "--moe-router-topk-scaling-factor 1.5", "experts"),
    _of_micro_batch("capacity", "capacity", "--moe-expert-capacity-factor 0.7"),
    _of_micro_batch("capacity", "capacity-by-position",
                    "--moe-expert-capacity-factor 0.8 --moe-token-drop-policy position"),
    _of_micro_batch("capacity", "padded-capacity",
                    "--moe-expert-capacity-factor 0.9 --moe-pad-expert-input-to-capacity"),
    _model("shared", "shared-expert", "--moe-shared-expert-intermediate-size 32", "experts"),
    _layout("shared overlap", "shared-expert-overlap", "--moe-shared-expert-overlap",
            "shared-expert", "alltoall"),
    _model("gate", "shared-expert-gate", "--moe-shared-expert-gate", "shared-expert"),
    _model("which layers", "every-other-layer", "--moe-layer-freq 2", "experts"),
    _model("which layers", "dense-first-layer", "--moe-layer-freq [0]+[1]*{later}", "experts"),
    _model("attention", "mla",
           "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 12 "
           "--qk-pos-emb-head-dim 4 --v-head-dim 8", "rope"),
    _model("selected keys", "sparse-attention",
           "--experimental-attention-variant dsa --dsa-indexer-topk 6 --dsa-indexer-n-heads 4 "
           "--dsa-indexer-head-dim 6 --dsa-indexer-loss-coeff 0.1 --init-method-std 0.3", "mla"),
    _model("selecting layers", "shared-selection",
           "--dsa-indexer-topk-freq 2 --dsa-indexer-skip-topk-offset 1", "sparse-attention"),
    _model("layers", "linear-attention", f"{DELTA_NET} --linear-attention-freq 2 "
           "--attention-output-gate"),
    _model("streams", "mhc", "--enable-mhc-connections --mhc-num-residual-streams 3 "
           "--mhc-init-gating-factor 0.5 --mhc-sinkhorn-iterations 4"),
    _layout("recompute", "recompute-streams", "--mhc-recompute-layer-num 2", "mhc"),
    _model("layers", "kda", "--experimental-attention-variant kda --linear-attention-freq 2 "
           "--linear-key-head-dim 4 --linear-value-head-dim 8 --linear-num-key-heads 4 "
           "--linear-num-value-heads 4", "mla"),
    _model("layers", "mamba", "{mamba}"),
    _model("layers", "hybrid", "{mamba} --is-hybrid-model --hybrid-override-pattern {pattern}"),
    _model("layers", "hybrid-experts",
           "{mamba} --hybrid-override-pattern {pattern_of_experts}", "experts"),
    Feature(name="bert", group="layers", flags="--model-kind bert", is_layout=False,
            is_of_micro_batch=True),  # its two losses are means per micro-batch
    _model("layers", "t5", "--model-kind t5 --decoder-num-layers {deeper}"),
    _model("positions", "t5-relative", "--position-embedding-type relative", "t5"),
    _layout("halves", "encoder-stages",
            "--encoder-pipeline-model-parallel-size {encoder_ranks}", "t5", "pp"),
    _drawn("layers", "images", f"{VLM} --img-w 32 --disable-vision-class-token"),
    _drawn("layers", "rows-of-tiles", f"{VLM} --img-w 8 --disable-vision-class-token "
           "--image-grid-pinpoints 8 16 16 8"),
    _drawn("layers", "images-of-any-size", f"{VLM} --img-w 32 --vision-model-type qwen2_vl"),
    _drawn("positions", "mrope",
           "--position-embedding-type mrope --kv-channels 8 --mrope-section 1 1 2",
           "images-of-any-size"),
    _drawn("samples", "packed-images", "--use-packed-sequence", "images"),
    _drawn("samples", "packed-tiles", "--use-packed-sequence", "rows-of-tiles"),
    _drawn("samples", "packed-any-size", "--use-packed-sequence", "images-of-any-size"),
    _drawn("layers", "image-classes",
           "--model-kind vit --img-h 8 --img-w 12 --patch-dim 4 --num-classes 7"),
    _drawn("layers", "images-and-sound",
           "--model-kind mimo --model-provider llava_avlm --image-size 8 --patch-dim 4 "
           "--audio-seq-length 3 --vision-num-layers 1 --vision-hidden-size 64 "
           "--vision-num-attention-heads 8"),
    _drawn("trained", "frozen-encoder", "--freeze-ViT", "images"),
    _drawn("trained", "frozen-language-model", "--freeze-LM", "images"),
    _drawn("projector", "affine-projector", "--vision-projection-type affine", "images"),
    _model("attention", "plain-attention", "--attention-backend unfused"),
    _model("largest scores", "qk-clip", "--qk-clip --qk-clip-threshold 0.02"),
    _model("documents", "reset-mask", "--reset-attention-mask"),
    _model("masked", "eod-mask", "--eod-mask-loss"),
    Feature(name="padded", group="padded", words="samples that end early", is_layout=False),
    # Lion uses signs: that of a key bias's gradient, rounding noise, depends on the layout.
    _drawn("optimizer", "lion", "--optimizer lion --lr 1e-3", "no-bias"),
    _drawn("optimizer", "muon", "--optimizer muon --adam-eps 1e-3 --lr 0.01"),
    _drawn("optimizer", "muon-nesterov",
           "--optimizer muon --adam-eps 1e-3 --lr 0.01 --muon-nesterov --muon-no-split-qkv"),
    _drawn("cut matrices", "muon-distributed", "--muon-tp-mode distributed", "muon", "tp",
           is_layout=True),
    _drawn("width", "mup", "--use-mup --mup-base-hidden-size 8 --mup-output-mult 2"),
    _drawn("state", "moments-in-16-bits", "--use-precision-aware-optimizer "
           "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp16", "adam"),
    _drawn("state", "moments-in-8-bits", "--use-precision-aware-optimizer "
           "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", "adam"),
    _drawn("state", "main-in-16-bits", "--use-precision-aware-optimizer", "bf16", "adam"),
    _drawn("state", "gradients-in-16-bits",
           "--use-precision-aware-optimizer --main-grads-dtype bf16", "bf16"),
    _drawn("host", "state-on-host", "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
           is_layout=True),
    _drawn("host", "state-on-host-beside-work",
           "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d", is_layout=True),
    _drawn("activations", "activations-on-host",
           "--cpu-offloading --cpu-offloading-num-layers 1", is_layout=True),
    _drawn("activations", "modules-on-host",
           "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules "
           "attn_norm qkv_linear core_attn attn_proj mlp_norm", is_layout=True),
    _drawn("graphs", "graphs", f"{GRAPHS} full", is_layout=True),
    _drawn("graphs", "graphs-of-attention", f"{GRAPHS} attn", is_layout=True),
    _drawn("codes", "fp8-delayed", f"{WIDE} --fp8-format hybrid --fp8-amax-history-len 2"),
    _drawn("codes", "fp8-tensorwise", f"{WIDE} --fp8-format hybrid --fp8-recipe tensorwise"),
    _drawn("codes", "fp8-blockwise", f"{WIDE} --fp8-format e4m3 --fp8-recipe blockwise"),
    _drawn("codes", "mxfp8", f"{WIDE} --fp8-format e4m3 --fp8-recipe mxfp8"),
    _drawn("codes", "nvfp4", f"{WIDE} --fp4-format e2m1"),
    _drawn("left out", "plain-weight-gradients", "--no-fp8-wgrad", "fp8-delayed"),
    _drawn("ends", "ends-in-bf16", "--first-last-layers-bf16", "fp8-delayed"),
    _drawn("codes gathered", "gathered-as-codes", "--fp8-param-gather", "fp8-tensorwise", "bf16",
           "zero-1", is_layout=True),
    _drawn("codes gathered", "gathered-as-delayed-codes", "--fp8-param-gather", "fp8-delayed",
           "bf16", "zero-1", is_layout=True),
)  # fmt: skip
AXES = ("tp", "cp", "cp4", "pp", "dp", "instances")
FEATURES = {feature.name: feature for feature in _FEATURES}

CHUNKS = 2  # of a rank with virtual pipeline stages

# Features of a command line that has no flag of their group.
DEFAULTS = ("adam", "clip", "mean-of-microbatches", "tied", "learned")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Degrees of the parallel axes, where enabled, and sizes of the model and the batch."""

    tp: int = 2
    cp: int = 2
    cp4: int = 4  # hierarchical, two levels
    pp: int = 2
    dp: int = 2  # data-parallel ranks; per optimizer instance unless context parallelism is on
    instances: int = 2
    experts: int = 4
    ep: int = 2
    etp: int = 2
    topk: int = 2
    depth: int = 2  # layers of a virtual stage, and of the model without a pipeline
    seq: int = 16
    vocab: int = 96  # 97 with EOD, a prime
    micro: int = 2
    microbatches: int = 2  # per data-parallel rank and step


@dataclass(frozen=True)
class Case:
    """Combination of a parallel layout and a model."""

    features: frozenset[str]
    sizes: Sizes = Sizes()

    @property
    def num_processes(self) -> int:
        """Number of processes to start."""
        return 1 if "virtual-ranks" in self.features else self.world_size

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout."""
        return prod(self._degree(axis) for axis in AXES)

    @property
    def has_alternatives(self) -> bool:
        """Whether two features are of one group, which is a contradiction."""
        return len({FEATURES[name].group for name in self.features}) < len(self.features)

    @property
    def is_of_micro_batch(self) -> bool:
        """Whether results depend on the micro-batch size.

        The loss is a mean over means of unequal micro-batches, or a feature is defined per
        micro-batch.
        """
        differ = {"padded", "eod-mask", "t5"} & self.features  # in the number of tokens with loss
        by_definition = any(FEATURES[name].is_of_micro_batch for name in self.features)
        return by_definition or bool(differ and "per-token-loss" not in self.features)

    @property
    def batch(self) -> int:
        """Samples per step."""
        replicas = self._degree("dp") * self._degree("instances")
        return self.sizes.micro * self.sizes.microbatches * replicas

    def command(self) -> list[str]:
        """Return the arguments of ``pretrain_gpt.py`` for `world_size` ranks."""
        return self._words(self.features, self.sizes.micro)

    def command_alone(self) -> list[str]:
        """Return the arguments for the same model and batch in one process.

        There is one micro-batch unless results depend on the micro-batch size.
        """
        kept = {name for name in self.features if not FEATURES[name].is_layout}
        return self._words(kept, self.sizes.micro if self.is_of_micro_batch else self.batch)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps: the second reads what the first has updated and stored.

        The third step replays the captured graph, and scales by a history of several steps.
        """
        has_third = any(FEATURES[name].group in ("graphs", "codes") for name in self.features)
        return 3 if has_third else 2

    def numbers(self) -> dict[str, object]:
        """Return the values of the names in braces in flags."""
        ranks = self._degree("pp")
        chunks = CHUNKS if self.features & {"interleaved", "zb-v"} else 1
        layers = ranks * chunks * self.sizes.depth
        if "uneven-stages" in self.features:
            layers += chunks
        if "auto-split" in self.features:
            layers += 1
        if "embedding-and-loss-as-layers" in self.features:
            layers -= 2
        middle = f"{'t' * self.sizes.depth}|" * (ranks * chunks - 2)
        has_string = "layout-string" in self.features
        ahead = "mm" if any(FEATURES[name].group == "ahead" for name in self.features) else ""
        return {
            **vars(self.sizes),
            "batch": self.batch,
            "ranks": self.world_size,
            "steps": self.num_steps,
            "virtual": "" if has_string else f"--num-virtual-stages-per-pipeline-rank {chunks}",
            "layout": f"E|{middle}{'t' * 2 * self.sizes.depth}{ahead}L",
            "first": chunks * (self.sizes.depth + 1),
            "group": ranks + 1,
            "layers": layers,
            "later_layers_p2p": " p2p" * (layers - 1),
            "later": max(0, layers - 1),
            "deeper": layers + 1,
            "encoder_ranks": ranks - ranks // 2,
            "mamba": MAMBA,
            "pattern": ("M*-M" * layers)[:layers],
            "pattern_of_experts": ("EM*" * layers)[:layers],
        }

    def _degree(self, axis: str) -> int:
        on = {FEATURES[name].axis for name in self.features}
        is_on = axis in on and not (axis == "instances" and on & {"cp", "cp4"})
        return int(vars(self.sizes)[axis]) if is_on else 1

    def _words(self, features: Iterable[str], micro: int) -> list[str]:
        numbers = {**self.numbers(), "micro": micro}
        chosen = set(features)
        texts = [BASE, *(f.flags for f in _FEATURES if f.name in chosen)]
        if "image-classes" not in chosen:
            texts.append(TEXT)
        if not {"image-classes", "reset-mask"} & chosen:
            texts.append("--no-create-attention-mask-in-dataloader")
        return " ".join(texts).format(**numbers).split()


def with_needs(names: Iterable[str]) -> frozenset[str]:
    """Return ``names`` and all features that they need."""
    chosen: set[str] = set()
    missing = set(names)
    while missing:
        chosen |= missing
        missing = {need for name in missing for need in FEATURES[name].needs} - chosen
    return frozenset(chosen)


def case_of(names: Iterable[str], sizes: Sizes | None = None) -> Case:
    """Return the case with these features, those they need, and defaults of other groups."""
    chosen = with_needs(names)
    taken = {FEATURES[name].group for name in chosen}
    defaults = {name for name in DEFAULTS if FEATURES[name].group not in taken}
    return Case(chosen | defaults, sizes or Sizes())
