"""Writes a Transformers folder as a bf16 GGUF file: `python export_gguf.py MODEL FILE`, in the project's environment.

Only for what is benchmarked here: the plain llama architecture with a byte-level BPE tokenizer. Prompts are token ids,
so how the tokenizer splits text is not written.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def main() -> None:
    """Converts the model that the command line names."""
    model, target = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise SystemExit(f"only llama models are written as GGUF here, this is {config['model_type']!r}")
    temporary = target.with_suffix(".writing")
    writer = gguf.GGUFWriter(temporary, "llama")
    write_settings(writer, config)
    write_tokens(writer, json.loads((model / "tokenizer.json").read_text(encoding="utf-8")), config)
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            write_tensor(writer, name, tensor, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(temporary, target)


def write_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Writes the sizes of the model.

    Args:
        writer (`gguf.GGUFWriter`):
            The file.
        config (`dict[str, Any]`):
            The model's config.json.
    """
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def write_tokens(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Writes the vocabulary.

    Args:
        writer (`gguf.GGUFWriter`):
            The file.
        tokenizer (`dict[str, Any]`):
            The model's tokenizer.json.
        config (`dict[str, Any]`):
            The model's config.json.
    """
    vocabulary = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    by_id = {token_id: token for token, token_id in vocabulary.items()}
    tokens = [by_id.get(index, f"[unused {index}]") for index in range(config["vocab_size"])]
    control = {t["id"] for t in tokenizer["added_tokens"] if t["special"]}
    kinds = [gguf.TokenType.CONTROL if i in control else gguf.TokenType.NORMAL for i in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config.get("bos_token_id") or 0)
    writer.add_eos_token_id(config.get("eos_token_id") or 0)


def write_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, config: dict[str, Any]) -> None:
    """Writes one tensor under its GGUF name: matrices in bf16, vectors in float32.

    Args:
        writer (`gguf.GGUFWriter`):
            The file.
        name (`str`):
            Its name in Transformers.
        tensor (`torch.Tensor`):
            Its values.
        config (`dict[str, Any]`):
            The model's config.json.
    """
    if name in OTHER_NAMES:
        target = OTHER_NAMES[name]
    else:
        _, _, layer, rest = name.split(".", 3)
        target = f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
        if target.endswith("attn_q.weight"):
            tensor = interleave_halves(tensor, config["num_attention_heads"])
        elif target.endswith("attn_k.weight"):
            tensor = interleave_halves(tensor, config["num_key_value_heads"])
    values = tensor.float().numpy()
    if values.ndim == 1:
        writer.add_tensor(target, np.ascontiguousarray(values))
        return
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def interleave_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns a projection for a rope that turns neighbours, from one for a rope that turns the two halves of a head.

    Args:
        weight (`torch.Tensor` of shape `(num_heads * head_dim, hidden_size)`):
            The projection.
        num_heads (`int`):
            Its heads.
    """
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    main()
