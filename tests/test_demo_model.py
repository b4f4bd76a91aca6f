"""The committed demo model: its files are what they promise to be, and the held-out text can be read from this Python."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from narrowgate.engine.held_out import held_out, held_out_modules, module_path
from narrowgate.errors import FileError

MODEL = Path(__file__).parent.parent / "demo" / "model"
ODD_TEXTS = (
    "",
    "\t\tif x:\r\n\t\t\treturn\r\n",
    "    leading\n\n\n  trailing   \n\t \n",
    "na\u00efve = '\u00dcn\u00ef \u6f22\u5b57 \U0001f40d' # \u200b\u00a0 e\u0301\n",
    "a\x00b\x7f\x1b[0m\u2028\u2029\x85\x0b\x0c\r",
    "____init____(self,*args,**kw)->None:...; 0x1F_ff + 1_000_000.5e-10",
)


@pytest.fixture(scope="module")
def stored():
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("tokenizers").Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_file_is_small_enough():
    assert (MODEL / "model.safetensors").stat().st_size < 16_000_000


def test_every_linear_map_reads_a_multiple_of_128_features(stored):
    widths = {name: tensor.shape[-1] for name, tensor in stored.items() if tensor.ndim == 2}
    assert widths
    assert all(width % 128 == 0 for width in widths.values()), widths


def test_dtypes_are_those_that_qwen3_5_ships(stored):
    kept = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert kept == {name for name in stored if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))}
    assert len(kept) == 12
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in stored.items() if name not in kept)
    assert all(torch.isfinite(tensor).all() for tensor in stored.values())


def test_float32_tensors_hold_more_than_bfloat16_could(stored):
    """Else a loader that rounds them would go unseen."""
    for name, tensor in stored.items():
        if tensor.dtype == torch.float32:
            assert not torch.equal(tensor, tensor.bfloat16().float()), name


def test_both_kinds_of_layer_group_their_heads():
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3_5_text"
    assert config["linear_num_value_heads"] > config["linear_num_key_heads"] > 1
    assert config["num_attention_heads"] > config["num_key_value_heads"] > 1
    assert config["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2
    rotary = config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]
    assert sum(config["rope_parameters"]["mrope_section"]) == rotary / 2


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_tokenizer_gives_back_every_text(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.get_vocab_size() == 4096
    assert ids[0] == 0
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|endoftext|>" + text


def test_indentation_is_one_token(tokenizer):
    for depth in (4, 8, 12, 16):
        assert len(tokenizer.encode("\n" + " " * depth + "return", add_special_tokens=False).ids) == 3


def test_held_out_text_comes_from_the_running_python():
    text = held_out(MODEL)
    assert text.names == tuple(sorted(text.names))
    assert len(text.names) == len(text.documents)
    assert 80_000 < text.nbytes < 200_000
    joined = b"".join(document.encode("utf-8") for document in text.documents)
    assert text.sha256 == hashlib.sha256(joined).hexdigest()
    assert len(joined) == text.nbytes
    assert all(document.strip() and "\r\n" not in document for document in text.documents)


def test_held_out_modules_follow_the_rule():
    for name in held_out_modules(MODEL):
        assert int(hashlib.sha256(name.encode()).hexdigest(), 16) % 28 == 0
        assert not any(part.startswith("_") or part == "test" for part in name.split("."))


def test_held_out_order_and_line_ends_depend_on_nothing_else(tmp_path):
    library, model = tmp_path / "lib", tmp_path / "model"
    (library / "pack").mkdir(parents=True)
    model.mkdir()
    (library / "zed.py").write_bytes(b"z = '\xc3\xa9'\r\n")
    (library / "pack" / "__init__.py").write_bytes(b"p = 1\n")
    (model / "held_out.json").write_text('{"modules": ["zed", "pack"]}')
    text = held_out(model, library)
    assert text.names == ("pack", "zed")
    assert text.documents == ("p = 1\n", "z = '\u00e9'\n")
    assert text.nbytes == 15
    assert text.sha256 == hashlib.sha256(b"p = 1\nz = '\xc3\xa9'\n").hexdigest()


@pytest.mark.parametrize("content", [None, "{", "[]", '{"modules": []}', '{"modules": "heapq"}', '{"modules": [1]}'])
def test_held_out_list_errors(tmp_path, content):
    if content is not None:
        (tmp_path / "held_out.json").write_text(content)
    with pytest.raises(FileError, match=r"held_out: expected .* got"):
        held_out_modules(tmp_path)


def test_held_out_source_errors(tmp_path):
    with pytest.raises(FileError, match=r"source of module 'no\.such' under .* got no such file"):
        module_path("no.such", tmp_path)
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe")
    (tmp_path / "held_out.json").write_text('{"modules": ["bad"]}')
    with pytest.raises(FileError, match=r"expected UTF-8 in .*bad\.py"):
        held_out(tmp_path, tmp_path)


def test_transformers_loads_it_and_it_writes_python():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(MODEL, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = tokenizer("class Stack:\n", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=24)[0], skip_special_tokens=True)
    assert text.startswith("class Stack:\n    def __init__(self"), text
