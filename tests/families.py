"""Two-layer models with random weights, one per family."""

from __future__ import annotations

import copy
import functools

import torch
import transformers

_COMMON = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# Configuration class and the fields that matter; windows and caps are small, so that they bite.
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 9, "layer_types": None}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 16, "sliding_window": 9, **_EXPERTS}),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "sliding_window": None}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 9, "hidden_size": 96}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.25}),
    "glm": ("GlmConfig", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 20,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}
# Families that take the other way: Transformers' own loop.
OTHER_FAMILIES: dict[str, tuple[str, dict]] = {
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", {"num_kv_heads": 4, "alibi": False}),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 1}),
}


@functools.lru_cache(maxsize=64)
def _built(family: str, dtype: torch.dtype, overrides: tuple) -> transformers.PreTrainedModel:
    name, fields = {**FAMILIES, **OTHER_FAMILIES}[family]
    config = getattr(transformers, name)(**{**_COMMON, **fields, **dict(overrides)})
    torch.manual_seed(1234)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(-5, 5)
            elif parameter.ndim > 1 and parameter.float().std() < 0.1:
                parameter.normal_(std=0.2)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # SDPA leaves the soft cap out before Transformers 5.24
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def copy_config(model: transformers.PreTrainedModel) -> transformers.PreTrainedConfig:
    """A copy of a model's configuration that keeps its attention implementation."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = model.config._attn_implementation
    return config


def tiny_model(family: str, dtype: torch.dtype = torch.float32, **overrides) -> transformers.PreTrainedModel:
    """A fresh copy of a family's tiny model, not paged."""
    built = _built(family, dtype, tuple(sorted(overrides.items())))
    fresh = type(built)(copy_config(built)).to(dtype).eval()
    fresh.load_state_dict(built.state_dict())
    fresh.generation_config = copy.deepcopy(built.generation_config)
    return fresh


def greedy(model: transformers.PreTrainedModel, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Each prompt's greedy answer by Transformers' own generate, one by one."""
    return [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens, do_sample=False
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
