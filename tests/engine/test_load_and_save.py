"""Loading, quantizing, saving: what goes out comes back bit for bit, three roads to one packed model, and every refusal."""

import json
import os
import weakref
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file
from small_models import EXPERTS, KINDS, build, byte_tokenizer, rewrite, tensors_of, tokens

import narrowgate as ng
from narrowgate.engine import quantize as streaming
from narrowgate.errors import FileError, InputError

IDS = tokens(15, seed=9)
SCHEMES = [s for s in ng.schemes() if s != "bf16"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One checkpoint a family, bfloat16, with a tokenizer beside it."""
    made = {}
    for kind in KINDS:
        made[kind] = tmp_path_factory.mktemp(kind)
        build(kind, made[kind], dtype=torch.bfloat16, seed=2)
        byte_tokenizer(made[kind])
    return made


def names(folder):
    return sorted(os.listdir(folder))


def same_model(a, b):
    left, right = a.packed_tensors(), b.packed_tensors()
    assert left.keys() == right.keys()
    assert all(ng.same_bits(left[n], right[n]) for n in left)
    assert torch.equal(a.logits(IDS), b.logits(IDS))


@pytest.mark.parametrize("kind", KINDS)
def test_save_without_a_scheme_gives_the_same_file_again(kind, folders, tmp_path):
    ng.load(folders[kind]).save(tmp_path / "again")
    before, after = tensors_of(folders[kind]), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(before[n].dtype == after[n].dtype and torch.equal(before[n], after[n]) for n in before)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((folders[kind] / name).read_text()) == json.loads((tmp_path / "again" / name).read_text())
    assert names(tmp_path) == ["again"]


@pytest.mark.parametrize(("kind", "scheme"), [*[("qwen3_5_text", s) for s in SCHEMES], *[(k, "nvfp4") for k in KINDS[1:]]])
def test_three_roads_to_one_packed_model(kind, scheme, folders, tmp_path):
    """Quantizing while loading; saving that and loading it; streaming file to file and loading that."""
    loaded = ng.load(folders[kind], scheme)
    loaded.save(tmp_path / "saved")
    ng.quantize_checkpoint(folders[kind], tmp_path / "streamed", scheme)
    assert {t.scheme for t in loaded.report() if t.packable} == {scheme}
    for folder in (tmp_path / "saved", tmp_path / "streamed"):
        again = ng.load(folder)
        same_model(loaded, again)
        assert again.scheme == scheme
        assert again.report() == loaded.report()
        assert (folder / "tokenizer.json").read_bytes() == (folders[kind] / "tokenizer.json").read_bytes()
    one, two = ((tmp_path / f / "model.safetensors").read_bytes() for f in ("saved", "streamed"))
    assert one == two
    one, two = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("saved", "streamed"))
    assert one == two
    assert one["quantization_config"]["default_scheme"] == scheme
    assert one["quantization_config"]["quant_method"] == "narrowgate"


def test_what_is_never_packed_keeps_its_bits(folders, tmp_path):
    for kind in KINDS:
        ng.quantize_checkpoint(folders[kind], tmp_path / kind, "int2_g32")
        before, after = tensors_of(folders[kind]), tensors_of(tmp_path / kind)
        kept = [n for n in after if not n.rpartition(".")[2].isdigit() and n.rpartition(".")[2] not in ("data", "codebook")]
        ends = ("norm.weight", "conv1d.weight", "A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")
        ends += ("mlp.gate.weight", "shared_expert_gate.weight")
        assert kept
        assert all(n.endswith(ends) for n in kept)
        assert all(before[n].dtype == after[n].dtype and torch.equal(before[n], after[n]) for n in kept)
        assert not any(n.removesuffix(".weight") + ".data" in after for n in before if n.endswith(ends))


def test_packed_bytes_are_those_of_the_scheme(folders):
    model = ng.load(folders["qwen3_next"], "int4_g32")
    for tensor in model.report():
        if tensor.packed:
            assert tensor.bits_per_value == 4 + 16 / 32
    assert model.nbytes == sum(t.nbytes for t in model.report())
    assert model.nbytes < ng.load(folders["qwen3_next"]).nbytes / 2
    assert "int4_g32" in repr(model)


def test_bf16_is_an_ordinary_checkpoint(tmp_path):
    build("qwen3_5_text", tmp_path / "full")
    ng.quantize_checkpoint(tmp_path / "full", tmp_path / "half", "bf16")
    before, after = tensors_of(tmp_path / "full"), tensors_of(tmp_path / "half")
    assert before.keys() == after.keys()
    packable = {t.name for t in ng.load(tmp_path / "full").report() if t.packable}
    for name, tensor in after.items():
        wanted = torch.bfloat16 if name.removesuffix(".weight") in packable else torch.float32
        assert tensor.dtype == wanted
        assert torch.equal(tensor, before[name].to(wanted))
    assert "quantization_config" not in json.loads((tmp_path / "half" / "config.json").read_text())
    same_model(ng.load(tmp_path / "full", "bf16"), ng.load(tmp_path / "half"))


# ---- overrides
def schemes_of(model):
    return {t.name: t.scheme for t in model.report()}


@pytest.mark.spec("B39")
def test_the_first_override_that_matches_wins(folders):
    rules = ("*.1.mlp.down_proj=int8_g32", "model.layers.2.self_attn.q_proj.weight=nf4_g64", "*.down_proj=bf16", "*mlp*=mxfp8_e5m2",
             "lm_head=mxfp8_e4m3", "layers.0.linear_attn.*=q8_0")  # fmt: skip
    got = schemes_of(ng.load(folders["qwen3_5_text"], "mxfp4", overrides=rules))
    assert got["model.layers.1.mlp.down_proj"] == "int8_g32"
    assert got["model.layers.2.self_attn.q_proj"] == "nf4_g64"
    assert got["model.layers.2.self_attn.k_proj"] == "mxfp4"
    assert got["model.layers.0.mlp.down_proj"] == "bf16"
    assert got["model.layers.0.mlp.up_proj"] == "mxfp8_e5m2"
    assert got["lm_head"] == "mxfp8_e4m3"
    assert got["model.embed_tokens"] == "mxfp4"
    assert got["model.layers.0.linear_attn.in_proj_qkv"] == "q8_0"
    assert got["model.layers.0.linear_attn.in_proj_a"] == "bf16"  # never packed
    swapped = schemes_of(
        ng.load(folders["qwen3_5_text"], "mxfp4", overrides=("*.down_proj=bf16", "*.1.mlp.down_proj=int8_g32"))
    )
    assert swapped["model.layers.1.mlp.down_proj"] == "bf16"


def test_overrides_without_a_default_and_in_a_stream(folders, tmp_path):
    rules = ["*.experts.*=mxfp4"]
    got = schemes_of(ng.load(folders["qwen3_next"], overrides=rules))
    assert got["model.layers.0.mlp.experts.gate_up_proj"] == "mxfp4"
    assert got["model.layers.0.mlp.shared_expert.up_proj"] == "bf16"
    ng.quantize_checkpoint(folders["qwen3_next"], tmp_path / "out", "mxfp4", overrides=["*.experts.*=bf16", "lm_head=nvfp4"])
    model = ng.load(tmp_path / "out")
    assert schemes_of(model)["lm_head"] == "nvfp4"
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in tensors_of(tmp_path / "out")
    same_model(model, ng.load(folders["qwen3_next"], "mxfp4", overrides=["*.experts.*=bf16", "lm_head=nvfp4"]))


@pytest.mark.spec("B39")
@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (["lm_head=mxfp5"], "mxfp5"),
        (["=mxfp4"], "a pattern before '='"),
        (["lm_head"], "expected 'pattern=scheme'"),
        ([5], "expected 'pattern=scheme'"),
        ("lm_haed=mxfp4", "expected to match a tensor"),
        (["*.A_log=mxfp4"], "expected to match a tensor that can be packed"),
    ],
)
def test_wrong_overrides(rules, text, folders):
    with pytest.raises(InputError) as caught:
        ng.load(folders["qwen3_5_text"], "mxfp4", overrides=rules)
    assert text in str(caught.value)


def test_wrong_arguments(folders, tmp_path):
    with pytest.raises(InputError, match=r"expected one of the schemes mxfp4.*got 'mxfp5'"):
        ng.load(folders["qwen3_5_text"], "mxfp5")
    with pytest.raises(InputError, match="expected dtype"):
        ng.load(folders["qwen3_5_text"], dtype=torch.int8)
    with pytest.raises(InputError, match="mxfp5"):
        ng.quantize_checkpoint(folders["qwen3_5_text"], tmp_path / "out", "mxfp5")
    assert not names(tmp_path)


# ---- a packed checkpoint is what it is
def test_a_packed_checkpoint_is_not_packed_again(folders, tmp_path):
    ng.quantize_checkpoint(folders["qwen3_5_text"], tmp_path / "packed", "mxfp4", overrides=["lm_head=q8_0"])
    same_model(ng.load(tmp_path / "packed"), ng.load(tmp_path / "packed", "mxfp4"))
    for scheme, rules in (("nvfp4", ()), (None, ["lm_head=mxfp4"]), ("mxfp4", ["lm_head=mxfp4"])):
        with pytest.raises(InputError, match="already packed as mxfp4"):
            ng.load(tmp_path / "packed", scheme, overrides=rules)
    with pytest.raises(InputError, match="already packed"):
        ng.quantize_checkpoint(tmp_path / "packed", tmp_path / "out", "mxfp4")
    ng.load(tmp_path / "packed").save(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "packed" / name).read_bytes()


def test_a_device_s_layout_does_not_reach_the_file(folders, tmp_path):
    model = ng.load(folders["qwen3_5_text"], "mxfp4")
    for bound in model._bound.values():
        if bound.weight.packed:
            w = bound.weight.stored()
            bound.weight.__init__(w.with_layout("bytes@1", scales="swizzle_128x4@1"))
    model.save(tmp_path / "one")
    ng.load(folders["qwen3_5_text"], "mxfp4").save(tmp_path / "two")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "two" / "model.safetensors").read_bytes()


# ---- streaming
def test_a_stream_holds_one_tensor_at_a_time(folders, tmp_path, monkeypatch):
    alive, most, seen = [], 0, []
    pack = streaming.pack_dense

    def watched(value, scheme, name):
        nonlocal most
        alive[:] = [ref for ref in alive if ref() is not None]
        most = max(most, len(alive))
        alive.append(weakref.ref(value))
        found = pack(value, scheme, name)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(streaming, "pack_dense", watched)
    ng.quantize_checkpoint(folders["qwen3_5_moe_text"], tmp_path / "out", "mxfp4", progress=lambda *a: seen.append(a))
    assert most == 0  # whenever a tensor is packed, none before it is alive
    report = ng.load(tmp_path / "out").report()
    assert [name for name, _, _ in seen] == [t.name for t in report]
    assert seen[-1][1] == seen[-1][2] == sum(torch.Size(t.shape).numel() for t in report)
    assert all(a[1] < b[1] for a, b in pairwise(seen))


def poisoned(value):
    def change(tensors):
        tensors["model.layers.3.mlp.down_proj.weight"][5, 7] = value
        return tensors

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value, folders, tmp_path):
    folder = rewrite(folders["qwen3_5_text"], tmp_path / "bad", tensors=poisoned(value))
    text = r"'model.layers.3.mlp.down_proj.weight'.*1 of 6144 values are not finite, the first at index \[5, 7\]"
    with pytest.raises(InputError, match=text):
        ng.load(folder, "mxfp4")
    with pytest.raises(InputError, match=text):
        ng.quantize_checkpoint(folder, tmp_path / "out", "mxfp4")
    assert names(tmp_path) == ["bad"]


def test_k_that_a_scheme_cannot_take(tmp_path):
    build("qwen3_5_text", tmp_path / "odd", intermediate_size=100)
    for scheme in ("q8_0", "q4_0", "iq4_nl"):
        text = rf"'model.layers.0.mlp.down_proj.weight': quantize: {scheme} needs K divisible by 32, got 100"
        with pytest.raises(InputError, match=text):
            ng.load(tmp_path / "odd", scheme)
        with pytest.raises(InputError, match=text):
            ng.quantize_checkpoint(tmp_path / "odd", tmp_path / "out", scheme)
    ng.quantize_checkpoint(tmp_path / "odd", tmp_path / "out", "q8_0", overrides=["*.mlp.down_proj=mxfp4"])
    same_model(ng.load(tmp_path / "out"), ng.load(tmp_path / "odd", "q8_0", overrides=["*.mlp.down_proj=mxfp4"]))


def test_the_source_is_never_written_to(folders, tmp_path):
    folder = rewrite(folders["qwen3_5_text"], tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()
    for target in (folder, tmp_path / "." / "model"):
        with pytest.raises(FileError, match="the source itself"):
            ng.quantize_checkpoint(folder, target, "mxfp4")
        with pytest.raises(FileError, match="the source itself"):
            ng.load(folder, "mxfp4").save(target)
    with pytest.raises(FileError, match="holds something"):
        ng.load(folder).save(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == before
    assert names(tmp_path) == ["model"]


# ---- folders that do not hold what they should
def without(*keys):
    return lambda tensors: {n: t for n, t in tensors.items() if n not in keys}


def shaped(name, *shape):
    return lambda tensors: {**tensors, name: torch.zeros(shape, dtype=torch.bfloat16)}


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.experts.2.down_proj.weight"
TENSORS = {
    "missing": (without(NORM), f"missing tensor '{NORM}'"),
    "several missing": (without(NORM, "lm_head.weight"), f"missing tensor '{NORM}' and 1 more"),
    "an expert missing": (without(DOWN), f"missing tensor '{DOWN}'"),
    "unexpected": (lambda t: {**t, "model.layers.9.x": torch.ones(1)}, "unexpected tensor 'model.layers.9.x'"),
    "wrong shape": (shaped(NORM, 65), f"'{NORM}': expected shape [64], got [65]"),
    "wrong rank": (shaped("model.layers.0.linear_attn.conv1d.weight", 288, 4), "expected shape [288, 1, 4], got [288, 4]"),
    "an expert of another shape": (shaped(DOWN, 64, 31), f"'{DOWN}': expected shape [64, 32], got [64, 31]"),
    "integers": (lambda t: {**t, NORM: torch.ones(64, dtype=torch.int8)}, "float32, bfloat16, float16, got int8"),
    "float8 without a config": (
        lambda t: {**t, "lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}, "got float8_e4m3fn",
    ),
    "experts of two dtypes": (lambda t: {**t, DOWN: t[DOWN].float()}, "got bfloat16, float32"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(case, folders, tmp_path):
    change, text = TENSORS[case]
    folder = rewrite(folders["qwen3_next"], tmp_path / "bad", tensors=change)
    for go in (lambda: ng.load(folder), lambda: ng.quantize_checkpoint(folder, tmp_path / "out", "mxfp4")):
        with pytest.raises(FileError) as caught:
            go()
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["bad"]


def put(**changes):
    return lambda config: {k: v for k, v in {**config, **changes}.items() if v is not Ellipsis}


CONFIGS = {
    "unknown type": (put(model_type="llama"), "expected model_type to be one of qwen3_5, .*got 'llama'"),
    "no type": (put(model_type=...), "got None"),
    "type is a list": (put(model_type=["qwen3_next"]), "got .'qwen3_next'."),
    "no hidden size": (put(hidden_size=...), "missing key 'hidden_size'"),
    "no rope theta": (put(rope_parameters=...), "missing key 'rope_theta'"),
    "size is text": (put(hidden_size="64"), "hidden_size: expected a whole number"),
    "size is true": (put(num_hidden_layers=True), "num_hidden_layers: expected a whole number"),
    "no layers": (put(num_hidden_layers=0), "at least 1, got 0"),
    "absurdly many layers": (put(num_hidden_layers=1 << 30), "at most 4096"),
    "layer types too few": (put(layer_types=["linear_attention"]), "layer_types: expected 4 of"),
    "layer types unknown": (put(layer_types=["mamba"] * 4), "layer_types"),
    "another activation": (put(hidden_act="gelu"), "hidden_act: expected 'silu', got 'gelu'"),
    "no output gate": (put(attn_output_gate=False), "attn_output_gate: expected True, got False"),
    "yarn": (put(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope_type: expected 'default', got 'yarn'"),
    "odd rotary part": (
        put(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.1}),
        "even rotary part of head_dim 32",
    ),
    "heads not divisible": (put(num_attention_heads=5), "expected heads divisible by kv_heads, got 5 and 2"),
    "value heads not divisible": (put(linear_num_value_heads=3), "expected v_heads divisible by k_heads, got 3 and 2"),
    "more experts a token than experts": (put(num_experts_per_tok=6), "expected 6 of at most 65536 experts, got 5"),
    "epsilon": (put(rms_norm_eps=-1), "rms_norm_eps: expected a positive number"),
    "tied is text": (put(tie_word_embeddings="no"), "tie_word_embeddings: expected true or false"),
    "text_config no object": (put(text_config=[1]), "text_config: expected an object"),
    "quantized by others": (put(quantization_config={"quant_method": "awq"}), "method 'awq'"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_we_cannot_read(case, folders, tmp_path):
    change, text = CONFIGS[case]
    folder = rewrite(folders["qwen3_next"], tmp_path / "bad", config=change)
    with pytest.raises(FileError, match=text) as caught:
        ng.load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_packed_tensor_where_none_may_be(folders, tmp_path):
    ng.quantize_checkpoint(folders["qwen3_next"], tmp_path / "packed", "mxfp4")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    described = config["quantization_config"]["tensors"]
    tensors = tensors_of(tmp_path / "packed")
    w = ng.quantize(tensors.pop("model.layers.0.mlp.gate.weight"), "mxfp4")
    tensors["model.layers.0.mlp.gate.data"], tensors["model.layers.0.mlp.gate.scales.0"] = w.data, w.scales[0].data
    described["model.layers.0.mlp.gate"] = {**described["lm_head"], "shape": [EXPERTS["num_experts"], 64]}
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileError, match="is packed, expected a dense one"):
        ng.load(tmp_path / "packed")


def test_what_a_model_tells(folders):
    model = ng.load(folders["qwen3_5_moe_text"], "mxfp4")
    assert model.config.layers == 4
    assert model.raw_config["model_type"] == "qwen3_5_moe_text"
    assert "linear" in str(model.plan("lm_head"))
    assert "grouped_linear" in str(model.plan("model.layers.0.mlp.experts.down_proj", tokens=3))
    with pytest.raises(InputError, match="name of a matrix"):
        model.plan("model.norm")
    cache = model.new_cache(2)
    model.step(torch.stack([IDS, IDS]), cache)
    assert cache.lengths == [15, 15]
    assert str(cache.nbytes) in repr(cache)
