"""A tiny hybrid model folder, made once, with a byte-level tokenizer; every axis of another size, K odd multiples of 4."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from narrowgate.cli import main
from narrowgate.models import family
from narrowgate.models.hybrid import slots

CONFIG = {
    "model_type": "qwen3_5_text", "dtype": "bfloat16", "vocab_size": 261, "hidden_size": 36, "intermediate_size": 44,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "attn_output_gate": True, "hidden_act": "silu", "eos_token_id": 260, "max_position_embeddings": 512,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"},
}  # fmt: skip
END = "<|endoftext|>"


def weights(config, seed=0):
    """Random tensors for every slot, in bfloat16 but for A_log and the gated norm."""
    model = family(config)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for slot in slots(model.read_config(config), model.projections):
        value = torch.randn(slot.shape, generator=generator) * (0.3 if len(slot.shape) > 1 else 0.1)
        wide = slot.name.endswith(("A_log", "linear_attn.norm.weight"))
        found[slot.name] = value if wide else value.bfloat16()
    return found


def write_model(folder, config=CONFIG, tensors=None, tokenizer=True):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(config) if tensors is None else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(["<a>", "<b>", "<c>", "<d>", END])
        made.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 260)])
        made.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": END, "chat_template": "U:{{ messages[0].content }}A:"})
        )
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Read only: copy it before changing it."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def broken(tiny, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny, tmp_path / "broken")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("def f(x):\n    return x + 1  # naïve\n\n" * 4, encoding="utf-8")
    return path


@pytest.fixture
def run(capsys):
    """Run a command line in this process: (exit code, stdout, stderr)."""

    def call(*argv):
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return call
