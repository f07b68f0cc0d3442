"""Small random models of every family, made and loaded by `transformers`."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.optional import why_missing
from megatron.core.params.param_info import info_of
from megatron.training.config.run import RunConfig
from megatron.training.conversion import hf, hf_folder
from megatron.training.conversion.verify import our_outputs, their_outputs
from tests.support.transformers_release import need_tested_release

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
with pytest.MonkeyPatch.context() as patch:
    if why_missing("transformer_engine") is not None:  # installed without its libraries it raises
        patch.setitem(sys.modules, "transformer_engine", None)
    peft = importlib.import_module("peft") if importlib.util.find_spec("peft") else None

VOCABULARY = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 88,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_FAR = {"max_position_embeddings": 16384}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.5, 3.0, 3.5],
    "factor": 2.0,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA = {
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "full_attention_interval": 2},
}
_LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "v_head_dim": 6},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "first_k_dense_replace": 1},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"max_position_embeddings": 160, "rms_norm_eps": 1e-6},
}
# So many heads that no score of their ReLUs is 0: equal scores have no order.
_INDEXER = {
    **{"index_topk": 5, "index_head_dim": 6, "index_n_heads": 24, "mlp_layer_types": None},
    **{"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "num_nextn_predict_layers": 0},
}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7},
    **{"mscale_all_dim": 0.7, "original_max_position_embeddings": 40},
}
WIDE = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False},
    **{"original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0},
}
_GROWING = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 16},
    "llama_4_scaling_beta": 0.1,
}
_PARTIAL = {
    "head_dim": 16,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    },
}
_BIASES = {"attention_bias": True, "mlp_bias": True}

# name -> class, and what its config has besides the common sizes
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2",
        {
            **{"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        },
    ),
    "llama": ("Llama", {}),
    "llama 3, tied": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True, **_FAR}),
    "llama, biases": ("Llama", {**_BIASES, "head_dim": 16, "rope_parameters": _LINEAR}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": WIDE}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {"original_max_position_embeddings": 32, "sliding_window": 7, "rope_parameters": LONG},
    ),
    "olmo2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 5}),
    "qwen2 moe": (
        "Qwen2Moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 40, "head_dim": 16},
    ),
    "qwen3.5": ("Qwen3_5", {**_DELTA, "head_dim": 16}),
    "qwen3.5 moe": (
        "Qwen3_5Moe",
        {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 40, "head_dim": 16},
    ),
    "deepseek v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek v2, groups": (
        "DeepseekV2",
        {
            **{**_LATENT, "rope_parameters": _YARN, "routed_scaling_factor": 2.0},
            **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "num_experts_per_tok": 4,
        },
    ),
    "deepseek v3": (
        "DeepseekV3",
        {
            **{**_LATENT, "rope_parameters": _YARN, "num_experts_per_tok": 4},
            **{"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0},
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
            **{"sliding_window": 6, "swiglu_limit": 0.5, "rope_parameters": WIDE},
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {**WIDE, "attention_factor": 0.1 * math.log(4) + 1},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "exaone4": ("Exaone4", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "seed-oss": (
        "SeedOss",
        {"head_dim": 16, **dict.fromkeys(("attention_dropout", "residual_dropout"), 0.0)},
    ),
    "granite": (
        "Granite",
        {
            **{"embedding_multiplier": 12.0, "logits_scaling": 6.0},
            **{"residual_multiplier": 0.22, "attention_multiplier": 0.5},
        },
    ),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": _GROWING}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "minimax m2": ("MiniMaxM2", {"num_local_experts": 4, "num_experts_per_tok": 2, **_PARTIAL}),
    "ernie 4.5 moe": (
        "Ernie4_5_Moe",
        {
            **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan moe": (
        "HunYuanMoEV1",
        {
            **{"num_experts": 4, "moe_topk": [2, 2], "head_dim": 16},
            "rope_parameters": {
                **{"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
            },
        },
    ),
    "glm4 moe": (
        "Glm4Moe",
        {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            **{"use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0},
        },
    ),
    "olmo-hybrid": (
        "OlmoHybrid",
        {
            **{**_DELTA, "layer_types": ["linear_attention", "full_attention"]},
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        {
            **{**_LATENT, "q_lora_rank": None, "routed_scaling_factor": 2.0},
            **{"layer_types": ["linear_attention", "full_attention"]},
            **{"mlp_layer_types": ["dense", "sparse"], "num_local_experts": 8},
            **{"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "rms_norm_eps": 1e-5},
            **{"linear_head_dim": 6, "linear_num_heads": 2, "linear_conv_kernel_dim": 3},
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **{**_LATENT, "first_k_dense_replace": 0, "max_position_embeddings": 64},
            "rope_parameters": {**_GROWING, "partial_rotary_factor": 1 / 3},
        },
    ),
}
CASES |= {
    "deepseek v3.2": ("DeepseekV32", {**_LATENT, **_INDEXER, "rope_parameters": _YARN}),
    "glm-5": (
        "GlmMoeDsa",
        {
            **{**_LATENT, **_INDEXER, "rms_norm_eps": 1e-5, "index_topk_freq": 2},
            "index_skip_topk_offset": 1,
        },
    ),
}
OF_TWO_LAYERS = [*CASES][[*CASES].index("olmo3") :]  # the others have three

# Of kinds other than GPT: class of the config, of the model, and what the config has.
_BERT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "layer_norm_eps": 1e-6},
    **{"num_attention_heads": 4, "intermediate_size": 88, "max_position_embeddings": 64},
    **{"pad_token_id": None, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
_T5 = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 88, "num_heads": 4},
    **{"num_layers": 2, "num_decoder_layers": 3, "relative_attention_num_buckets": 8},
    **{"relative_attention_max_distance": 20, "decoder_start_token_id": 0, "pad_token_id": None},
    "dropout_rate": 0.0,
}
_MAMBA = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "n_groups": 2, "chunk_size": 16},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
# The default standard deviation is 0.1: the logits, and with them rounding errors, are large.
_MAMBA_ALONE = {**_MAMBA, "num_hidden_layers": 2, "initializer_range": 0.05}
_NEMOTRON = {
    **{**_MAMBA, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"intermediate_size": 88, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16},
    "max_position_embeddings": 64,
}
_HYBRID_EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24},
    **{"moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.0},
    **{"n_group": 4, "topk_group": 2, "moe_latent_size": 20},
}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "ForPreTraining", _BERT),
    "megatron bert": ("MegatronBert", "ForPreTraining", _BERT),
    "t5": ("T5", "ForConditionalGeneration", _T5),
    "t5 1.1": (
        "T5",
        "ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mamba2": (
        "Mamba2",
        "ForCausalLM",
        {**_MAMBA_ALONE, "num_heads": 8, "head_dim": 8, "state_size": 16},
    ),
    "mamba2, tied": (
        "Mamba2",
        "ForCausalLM",
        {
            **{**_MAMBA_ALONE, "num_heads": 4, "head_dim": 16, "state_size": 8},
            **{"n_groups": 1, "tie_word_embeddings": True},
        },
    ),
    "nemotron-h": ("NemotronH", "ForCausalLM", {**_NEMOTRON, "hybrid_override_pattern": "M-M*-"}),
    "nemotron-h, experts": (
        "NemotronH",
        "ForCausalLM",
        {**_NEMOTRON, **_HYBRID_EXPERTS, "hybrid_override_pattern": "ME*E"},
    ),
}

# Loaded here and not in a test: their modules set environment variables.
_KINDS = {(kind, "LMHeadModel" if kind == "GPT2" else "ForCausalLM") for kind, _ in CASES.values()}
_CONFIGS = {name: f"{name}TextConfig" for name in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")}
CLASSES: dict[str, tuple[Any, Any]] = {
    name: (
        getattr(transformers, _CONFIGS.get(name, f"{name}Config")),
        getattr(transformers, name + task),
    )
    for name, task in (*_KINDS, *((kind, task) for kind, task, _ in OTHERS.values()))
}
BERT_PARTS = {
    task: getattr(transformers, f"Bert{task}")
    for task in ("ForMaskedLM", "Model", "ForPreTraining")
}
AUTO = transformers.AutoModelForCausalLM


def make(case: str, **changes: Any) -> Any:
    """The model of ``case``; norms, biases and matrices are large enough to count."""
    if case == "gpt-oss":
        need_tested_release("GPT-OSS ignores swiglu_limit")
    if case == "mamba2":
        need_tested_release("Mamba-2 normalizes all groups together")
    if case == "phi3" and "rope_parameters" in changes:
        need_tested_release("Phi-3 changes frequencies at another length")
    if case in OTHERS:
        name, _, own = OTHERS[case]
        common: dict[str, Any] = {}
    else:
        name, own = CASES[case]
        common = _COMMON | ({"num_hidden_layers": 2} if case in OF_TWO_LAYERS else {})
    if name == "GPT2":
        ids = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
        common = {key: _COMMON[key] for key in ids}
    config_class, model_class = CLASSES[name]
    torch.manual_seed(3)
    return grown(model_class(config_class(**common | own | changes)))


@torch.no_grad()
def grown(model: Any) -> Any:
    """``model`` with values that are large enough to count, each another."""
    for key, param in model.named_parameters():
        if key.endswith("dt_bias"):
            param.fill_(-3)  # with long steps nothing is kept, and their gradients are noise
        if param.dim() == 1:
            param.add_(0.1 * torch.randn_like(param))
        elif key.startswith("bert.embeddings"):
            param.mul_(10)
        elif "embed" not in key and key != "shared.weight" and not key.endswith("A_log"):
            is_large = key.endswith(".q.weight") or "wi_" in key  # T5 does not scale scores
            param.mul_(0.3 if is_large else 3)
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if "e_score" in key:
            value.normal_(0, 0.2)
    return model.eval()


def write(folder: Path, case: str, **changes: Any) -> Any:
    """Save the model of ``case`` as `transformers` does."""
    model = make(case, **changes)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


def prompts(length: int = 40) -> Tensor:
    """[2, length] ids."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCABULARY, (2, length), generator=generator)


@torch.no_grad()
def logits_of(folder: Path, ids: Tensor) -> tuple[Tensor, str]:
    """The logits of the model in ``folder``, and what `transformers` had to say about it."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        (name,) = json.loads((folder / "config.json").read_text())["architectures"]
        model_class = getattr(transformers, name)  # the auto class does not know each of them
        model = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    finally:
        logger.removeHandler(handler)
    return model.eval()(ids, use_cache=False).logits, "\n".join(heard)


def outputs_of(model: Any, run: RunConfig, ids: Tensor) -> list[Tensor]:
    """What the model of `transformers` answers, computed plainly."""
    model.set_attn_implementation("eager")
    return list(their_outputs(model.float(), run, ids))


def assert_gradients_agree(
    mine: torch.nn.Module, theirs: Any, run: RunConfig, ids: Tensor, folder: Path
) -> None:
    """Of sum(outputs * random factors); ``folder`` is for theirs, under their names."""
    answers = list(our_outputs(mine, run, ids)), outputs_of(theirs, run, ids)
    factors = [torch.randn(each.shape) for each in answers[0]]
    for of_one in answers:
        sum((a * f).sum() for a, f in zip(of_one, factors, strict=True)).backward()
    _save_gradients(theirs, folder)
    read = hf_folder.read_weights(folder)
    expected = hf.import_model(hf_folder.read_config(folder), read).tensors
    wanted = {  # indexers are frozen on both sides
        info_of(p).name or name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in mine.named_parameters()
        if p.requires_grad or "indexer" in name
    }
    made = {name: expected[name].make() for name in wanted}
    smallest = 1e-6 * sum(float(grad.norm()) ** 2 for grad in made.values()) ** 0.5
    for name, grad in made.items():
        apart = float((wanted[name] - grad).norm())
        assert apart <= 1e-4 * max(float(grad.norm()), smallest), name


def _save_gradients(model: Any, folder: Path) -> None:
    """In the place of the weights."""
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    model.save_pretrained(folder)


def weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder."""
    out: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        out |= safetensors.load_file(path)
    return out


def assert_same_weights(found: Path, expected: Path) -> None:
    """Name by name and bit by bit, where transformers may write other names than it publishes."""
    spellings = hf.family_of(hf_folder.read_config(expected)).spellings
    mine, theirs = weights(found), weights(expected)
    for old, new in spellings.items():
        theirs = {name.replace(old, new): tensor for name, tensor in theirs.items()}
    for each in (mine, theirs):  # transformers splits convolutions into equal parts
        for name in [name for name in each if "q_conv1d" in name]:
            parts = [each.pop(name.replace("q_conv", f"{letter}_conv")) for letter in "qkv"]
            each[name] = torch.cat(parts)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name
