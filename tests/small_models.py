"""Small random checkpoints of every family, built and saved by transformers: the oracle that shares no code with ours.

Every axis has a size of its own, weights are random everywhere (a norm of zeros could not tell 1 + w from w), and the
sizes allow every scheme that packs blocks of 32.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

COMMON = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    "eos_token_id": 7,
    "bos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
}


def transformers_config(kind: str, **changes):
    import transformers

    values = {**COMMON, **changes}
    if kind == "qwen3_5_text":
        return transformers.Qwen3_5TextConfig(**{"intermediate_size": 96, **values})
    if kind == "qwen3_5_moe_text":
        return transformers.Qwen3_5MoeTextConfig(**EXPERTS, **values)
    return transformers.Qwen3NextConfig(**{**EXPERTS, "intermediate_size": 160, "mlp_only_layers": [1], **values})


CLASSES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
KINDS = tuple(CLASSES)


def build(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes):
    """Save a random model of `kind` into `folder`; gives transformers' own model in eval mode."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, CLASSES[kind])(transformers_config(kind, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scatter = 0.3 if parameter.ndim == 1 else 1.2 / parameter.shape[-1] ** 0.5
            if "conv1d" in name:
                scatter = 0.5
            parameter.normal_(0, scatter)
            if "A_log" in name:
                parameter.uniform_(-2, 0.5)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def reference(model, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits of ids [T] or [B, T]."""
    with torch.no_grad():
        found = model(ids if ids.ndim == 2 else ids[None]).logits
    return found if ids.ndim == 2 else found[0]


def tokens(length: int, seed: int = 0, vocab: int = 131) -> torch.Tensor:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rewrite(source: Path, target: Path, *, tensors=None, config=None) -> Path:
    """A copy of a checkpoint with other tensors or another config (each a function of the old, or None)."""
    target.mkdir()
    old = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config(old) if config else old))
    found = tensors_of(source)
    save_file(tensors(found) if tensors else found, target / "model.safetensors", {"format": "pt"})
    return target


def relative(expected: torch.Tensor, got: torch.Tensor) -> float:
    """The largest difference as a share of the largest value."""
    assert expected.shape == got.shape
    return float((expected - got).abs().max() / expected.abs().max())


def byte_tokenizer(folder: Path, vocab: int = 300) -> None:
    """A byte-level tokenizer of `vocab` tokens, as tokenizer.json: 256 bytes, some merges, <|end|> and <|start|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog ran", "def f(x): return x"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": "<|end|>",
        "bos_token": {"content": "<|start|>"},
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | tojson }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
