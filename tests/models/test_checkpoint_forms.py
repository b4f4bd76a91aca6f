"""The forms in which one model is stored: outer configs, old spellings, experts fused or apart, tied tables, dtypes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_models import COMMON, build, reference, relative, rewrite, tensors_of, tokens

import narrowgate as ng

IDS = tokens(21, seed=6)


def fused(tensors):
    """Per-expert tensors stacked, gate rows before up rows."""
    found = {name: t for name, t in tensors.items() if ".experts." not in name}
    for stem in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        at = [f"{stem}.experts.{e}." for e in range(5)]
        gate_up = [torch.cat([tensors[a + "gate_proj.weight"], tensors[a + "up_proj.weight"]]) for a in at]
        found[f"{stem}.experts.gate_up_proj"] = torch.stack(gate_up)
        found[f"{stem}.experts.down_proj"] = torch.stack([tensors[a + "down_proj.weight"] for a in at])
    return found


def old_spelling(config):
    """As transformers 4 wrote it."""
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types")
    return {**config, "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"],
            "rope_scaling": None, "full_attention_interval": 3}  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "qwen3_next"])
def test_fused_and_separate_experts(kind, tmp_path):
    theirs = build(kind, tmp_path / "apart")
    names = set(tensors_of(tmp_path / "apart"))
    assert any(".experts.0." in name for name in names)
    rewrite(tmp_path / "apart", tmp_path / "fused", tensors=fused)
    expected = reference(theirs, IDS)
    apart, together = ng.load(tmp_path / "apart").logits(IDS), ng.load(tmp_path / "fused").logits(IDS)
    assert relative(expected, apart) < 1e-4
    # Not to the bit: torch's product with a matrix of one row (the shared gate's) depends on where in memory that row lies.
    assert relative(apart, together) < 1e-6


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_old_spelling_of_the_config(kind, tmp_path):
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    assert COMMON["layer_types"] == kinds  # what full_attention_interval 3 says too
    theirs = build(kind, tmp_path / "new")
    folder = rewrite(tmp_path / "new", tmp_path / "old", config=old_spelling)
    assert "rope_parameters" not in json.loads((folder / "config.json").read_text())
    assert relative(reference(theirs, IDS), ng.load(folder).logits(IDS)) < 1e-4


def test_a_wrong_rotary_base_would_be_seen(tmp_path):
    theirs = build("qwen3_5_text", tmp_path / "new")
    folder = rewrite(tmp_path / "new", tmp_path / "old", config=lambda c: {**old_spelling(c), "rope_theta": 10000.0})
    assert relative(reference(theirs, IDS), ng.load(folder).logits(IDS)) > 1e-3


@pytest.mark.parametrize(("kind", "outer"), [("qwen3_5_text", "qwen3_5"), ("qwen3_5_moe_text", "qwen3_5_moe")])
def test_whole_model_with_vision_tower_and_prediction_head(kind, outer, tmp_path):
    theirs = build(kind, tmp_path / "text", tie_word_embeddings=False)

    def wrapped(tensors):
        found = {name.replace("model.", "model.language_model.", 1): t for name, t in fused(tensors).items()}
        found["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(2, 3)
        found["mtp.fc.weight"] = torch.zeros(2, 3)
        return found

    def config(old):
        inner = {**old, "tie_word_embeddings": True}  # the outer one wins
        return {"model_type": outer, "text_config": inner, "vision_config": {}, "tie_word_embeddings": False}

    folder = rewrite(tmp_path / "text", tmp_path / "whole", tensors=wrapped, config=config)
    ours = ng.load(folder)
    assert relative(reference(theirs, IDS), ours.logits(IDS)) < 1e-4
    assert any("mtp" in n for n in ours.notices)
    assert any("visual" in n for n in ours.notices)
    assert ours.report()[0].name == "model.embed_tokens"
    ours.save(tmp_path / "again")
    kept = load_file(tmp_path / "again" / "model.safetensors")
    assert "model.language_model.norm.weight" in kept
    assert "mtp.fc.weight" not in kept
    assert torch.equal(ng.load(tmp_path / "again").logits(IDS), ours.logits(IDS))


def test_tied_table_is_embedding_and_head(tmp_path):
    theirs = build("qwen3_5_text", tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors_of(tmp_path / "tied")
    ours = ng.load(tmp_path / "tied")
    assert relative(reference(theirs, IDS), ours.logits(IDS)) < 1e-4
    packed = ng.load(tmp_path / "tied", "mxfp4", overrides=["lm_head=mxfp8_e4m3"])
    assert [t.name for t in packed.report() if t.scheme == "mxfp8_e4m3"] == ["model.embed_tokens"]
    assert packed.decoder.head.weight is packed.decoder.embed.weight


def test_a_tied_model_may_store_its_head_again(tmp_path):
    build("qwen3_5_text", tmp_path / "tied", tie_word_embeddings=True)
    twice = rewrite(
        tmp_path / "tied", tmp_path / "twice",
        tensors=lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()},
    )  # fmt: skip
    ours = ng.load(twice)
    assert any("lm_head" in n for n in ours.notices)
    assert torch.equal(ours.logits(IDS), ng.load(tmp_path / "tied").logits(IDS))


def test_biases_of_attention(tmp_path):
    theirs = build("qwen3_5_text", tmp_path / "biased", attention_bias=True)
    ours = ng.load(tmp_path / "biased")
    assert "model.layers.2.self_attn.o_proj.bias" in tensors_of(tmp_path / "biased")
    assert relative(reference(theirs, IDS), ours.logits(IDS)) < 1e-4


def test_bfloat16_weights_are_read_exactly(tmp_path):
    """Our float32 activations over bfloat16 weights equal transformers' float32 model made from the same file."""
    import transformers

    build("qwen3_5_text", tmp_path / "half", dtype=torch.bfloat16)
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32).eval()
    assert relative(reference(theirs, IDS), ng.load(tmp_path / "half").logits(IDS)) < 1e-4


def test_activations_may_be_bfloat16(tmp_path):
    theirs = build("qwen3_5_text", tmp_path / "full")
    ours = ng.load(tmp_path / "full", dtype=torch.bfloat16)
    assert ours.logits(IDS).dtype == torch.float32
    assert 1e-4 < relative(reference(theirs, IDS), ours.logits(IDS)) < 0.1


@pytest.mark.spec("G60")
def test_checkpoint_dtypes_survive_load_cast_and_save(tmp_path):
    """A_log and the gated norm stay float32 beside bfloat16 weights (G60), even if somebody casts the module."""
    build("qwen3_5_text", tmp_path / "half", dtype=torch.bfloat16)

    def mixed(tensors):
        wide = ("A_log", "linear_attn.norm.weight")
        return {n: t.float() + 1e-4 if n.endswith(wide) else t for n, t in tensors.items()}

    rewrite(tmp_path / "half", tmp_path / "mixed", tensors=mixed)
    ours = ng.load(tmp_path / "mixed")
    ours.decoder.to(torch.float16)
    ours.save(tmp_path / "again")
    before, after = tensors_of(tmp_path / "mixed"), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert {t.dtype for t in after.values()} == {torch.bfloat16, torch.float32}
    assert all(before[n].dtype == after[n].dtype and torch.equal(before[n], after[n]) for n in before)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(
        (tmp_path / "mixed" / "config.json").read_text()
    )
