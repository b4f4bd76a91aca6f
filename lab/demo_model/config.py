"""The demo model's shape, and how it is saved: what a published Qwen3.5 checkpoint looks like, at 7.9 million parameters.

Eight layers, three gated delta layers to one gated attention layer; 2 key heads serve 4 value heads of 128, and 2 key-value
heads serve 4 query heads of 64. Every linear map reads a multiple of 128 features. A_log and the gated norm stay float32 in
the file, as Qwen3.5 ships them; everything else is bfloat16."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

CONTEXT = 2048
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "full_attention_interval": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 4096,
}
GENERATION = {"bos_token_id": 0, "eos_token_id": [0], "pad_token_id": 0, "do_sample": False, "max_new_tokens": 256}
KEPT_IN_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")


def build(seed: int) -> Qwen3_5ForCausalLM:
    """A float32 model with transformers' initial weights, but decays that start between 1 and thousands of tokens.

    A = exp(A_log) is uniform in 1..16 and softplus(dt_bias) log-uniform in 0.001..0.1, as in Mamba2 and the gated delta rule's
    authors' code; transformers' own start (dt_bias = 1) forgets within a token or two.
    """
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{k: v for k, v in CONFIG.items() if k != "dtype"})).float()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(1, 16).log_()
        elif name.endswith("dt_bias"):
            step = torch.exp(torch.empty_like(parameter).uniform_(torch.tensor(1e-3).log(), torch.tensor(0.1).log()))
            parameter.data.copy_(step + torch.log(-torch.expm1(-step)))
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            parameter.data.mul_((2 * CONFIG["num_hidden_layers"]) ** -0.5)
    return model


def save(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors; the tied head is not stored twice."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, tensor in sorted(weights.items()):
        if name != "lm_head.weight":
            dtype = torch.float32 if name.endswith(KEPT_IN_FLOAT32) else torch.bfloat16
            stored[name] = tensor.detach().to("cpu", dtype).contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config.json", CONFIG), ("generation_config.json", GENERATION)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
