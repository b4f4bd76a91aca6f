"""Packed tensors in a folder: every scheme goes out and comes back bit for bit, and a description that does not fit is refused."""

import copy
import json

import pytest
import torch

import narrowgate as ng
from narrowgate.errors import FileError
from narrowgate.io import packed
from narrowgate.io.checkpoint import Checkpoint
from narrowgate.io.packed import Store, quantization
from narrowgate.io.writer import TensorWriter

SCHEMES = [name for name in ng.schemes() if name != "bf16"]


def put(folder, tensors):
    """A checkpoint with these packed tensors and one dense one; gives its config."""
    stored = {f"{n}.{suffix}": t for n, w in tensors.items() for suffix, t in packed.parts(w).items()}
    stored["plain.weight"] = torch.ones(2)
    with TensorWriter(folder / "model.safetensors", {n: (t.dtype, tuple(t.shape)) for n, t in stored.items()}) as writer:
        for name, tensor in stored.items():
            writer.write(name, tensor)
    ours = {"quant_method": "narrowgate", "format_version": 1, "default_scheme": None}
    config = {"quantization_config": {**ours, "tensors": {n: packed.entry(w) for n, w in tensors.items()}}}
    return json.loads(json.dumps(config))


def stored(folder, tensors):
    config = put(folder, tensors)
    return Store(Checkpoint(folder), config)


@pytest.mark.parametrize("shape", [(5, 96), (3, 2, 64)])
def test_every_scheme_survives(shape, tmp_path):
    tensors = {f"at.{s}": ng.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(1)), s) for s in SCHEMES}
    store = stored(tmp_path, tensors)
    assert set(store) == {*tensors, "plain.weight"}
    for name, w in tensors.items():
        assert store.packed(name)
        assert store.shape(name) == shape
        for copied in (False, True):
            got = store.read(name, copy=copied)
            assert ng.same_bits(w, got)
            assert got.scheme == name.removeprefix("at.")
    assert store.dtype("plain.weight") == torch.float32


def test_everything_that_a_packed_tensor_can_hold_survives(tmp_path):
    codes = torch.arange(64, dtype=torch.int32).reshape(2, 32) % 16
    scale = ng.Scale.from_values(torch.tensor([[0.5, 2.0], [1.0, 4.0]]), "bfloat16", (1, 16))
    offset = ng.Scale.from_values(torch.tensor([[1.5]]), "float32", (2, 32))
    zero = ng.Scale.from_values(torch.tensor([[3.0, 5.0]]), "uint4", (2, 16))
    w = ng.pack(codes, "uint4", scales=(scale,), zero_points=zero, offset=(offset, offset))
    book = ng.pack(codes, "index4", codebook=torch.linspace(-1, 1, 16))
    store = stored(tmp_path, {"w": w, "book": book})
    assert ng.same_bits(w, store.read("w"))
    assert ng.same_bits(book, store.read("book"))
    assert store.read("w").scheme is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "'fp8'"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors'"),
        ({"quantization_config": {}}, "None"),
        ({"quantization_config": "int4"}, "None"),
        (
            {"quantization_config": {"quant_method": "narrowgate", "format_version": 2, "tensors": {}}},
            "format_version 1, got 2",
        ),
        ({"quantization_config": {"quant_method": "narrowgate", "tensors": {}}}, "got None"),
        ({"quantization_config": {"quant_method": "narrowgate", "format_version": 1}}, "tensors"),
    ],
)
def test_what_we_cannot_read_is_refused_by_name(config, text):
    with pytest.raises(FileError) as caught:
        quantization(config)
    assert text in str(caught.value)
    assert quantization({}) is None


def edits():
    def change(path, value):
        def edit(entry):
            at = entry
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value

        return edit

    yield "another element", change(["element"], "int8"), "storage"
    yield "unknown element", change(["element"], "float3"), "float3"
    yield "unknown layout", change(["layout"], "words@9"), "words@9"
    yield "longer rows", change(["shape"], [4, 4096]), "expected words@1 storage of shape"
    yield "huge shape", change(["shape"], [1 << 47, 1 << 47]), "fewer than 2**48 values"
    yield "large shape", change(["shape"], [1 << 20, 1 << 20]), "storage of shape"
    yield "shape of text", change(["shape"], ["a"]), "shape of 1 to 8 extents"
    yield "negative shape", change(["shape"], [-4, 64]), "shape of 1 to 8 extents"
    yield "no shape", lambda e: e.pop("shape"), "expected element, layout, shape and scales"
    yield "coarser blocks", change(["scales", 0, "block"], [1, 64]), "scales[0]"
    yield "blocks of nothing", change(["scales", 0, "block"], [1, 0]), "positive"
    yield "blocks of three axes", change(["scales", 0, "block"], [1, 1, 32]), "extents"
    yield "another scale element", change(["scales", 0, "element"], "bfloat16"), "scales[0]"
    yield "no scales", change(["scales"], []), "said to be 'mxfp4'"
    yield "a scale more", lambda e: e["scales"].append(e["scales"][0]), "missing tensor 'w.scales.1'"
    yield "scales no list", change(["scales"], {"a": 1}), "list of up to 8 scales"
    yield "zero points of nowhere", lambda e: e.update(zero_points=e["scales"][0]), "missing tensor 'w.zero_points'"
    yield "codebook of nowhere", change(["codebook"], True), "missing tensor 'w.codebook'"
    yield "another scheme's name", change(["scheme"], "nvfp4"), "said to be 'nvfp4', but holds 'mxfp4'"
    yield "scheme no name", change(["scheme"], 4), "scheme's name"


@pytest.mark.parametrize(("edit", "text"), [pytest.param(e, t, id=n) for n, e, t in edits()])
def test_a_description_that_does_not_fit(edit, text, tmp_path):
    config = put(tmp_path, {"w": ng.quantize(torch.randn(4, 64), "mxfp4")})
    wrong = copy.deepcopy(config)
    edit(wrong["quantization_config"]["tensors"]["w"])
    with pytest.raises(FileError) as caught:
        Store(Checkpoint(tmp_path), wrong).read("w")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Store(Checkpoint(tmp_path), config).read("w").scheme == "mxfp4"


def test_a_tensor_that_is_there_twice(tmp_path):
    config = put(tmp_path, {"plain": ng.quantize(torch.randn(4, 64), "mxfp4")})
    with pytest.raises(FileError, match="twice, packed and dense"):
        Store(Checkpoint(tmp_path), config)
