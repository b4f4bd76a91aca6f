"""Calls made ready: the second of its kind gives the first's bits, raises what the first raises, and sees whatever may have changed."""

import copy
import pickle

import pytest
import torch

import narrowgate as ng
from narrowgate import dispatch
from narrowgate.ops import ready
from narrowgate.ops.host import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason="no CPU kernels here")
SCHEMES = ("int4_g32", "mxfp4", "nvfp4", "mxfp6_e3m2", "q4_0", "nf4_g64", "int8_channel", "bf16")


def _weight(scheme: str, n: int = 40, k: int = 96, seed: int = 0) -> ng.PackedTensor:
    return ng.prepare(ng.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)), scheme))


def _calls(w: ng.PackedTensor, op: str = "linear") -> list:
    return [call for call in w.__dict__.get(f"_ready_{op}", {}).values() if call is not None]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("input_scheme", [None, "int8_g32"])
@pytest.mark.parametrize("shape", [(1, 96), (96,), (5, 96), (2, 3, 96)])
def test_a_product_made_ready_has_the_bits_of_the_first(scheme, input_scheme, shape):
    w, bias = _weight(scheme), torch.randn(40)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(shape).to(dtype)
        for b in (None, bias, bias.to(torch.bfloat16)):
            first = ng.linear(x, w, b, input_scheme=input_scheme)
            again, slow = (ng.linear(x, w, b, input_scheme=input_scheme, impl=impl) for impl in (None, "cpu"))
            assert again.dtype == slow.dtype
            assert torch.equal(again, slow)
            assert torch.equal(first, slow)
    if _calls(w):  # with other values of x too
        x = torch.randn(shape)
        assert torch.equal(ng.linear(x, w, input_scheme=input_scheme), ng.linear(x, w, input_scheme=input_scheme, impl="cpu"))


def test_such_calls_are_made_ready():
    w, x = _weight("int4_g32"), torch.randn(1, 96)
    ng.linear(x, w), ng.linear(x, w, input_scheme="int8_g32"), ng.embedding(torch.tensor([1]), w)
    assert len(_calls(w)) == 2
    assert len(_calls(w, "embedding")) == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_made_ready_have_the_bits_of_the_first(scheme):
    table = ng.quantize(torch.randn(40, 96), scheme)
    for w in (table, ng.prepare(table, op="embedding")):
        for ids in (
            torch.tensor([3]),
            torch.tensor([[39, 0], [7, 7]]),
            torch.tensor([2, 38], dtype=torch.int32),
            torch.tensor(5),
        ):
            for dtype in (torch.float32, torch.bfloat16):
                first, again = ng.embedding(ids, w, dtype=dtype), ng.embedding(ids, w, dtype=dtype)
                slow = ng.embedding(ids, w, dtype=dtype, impl="reference")
                assert first.shape == again.shape == slow.shape
                assert torch.equal(first, slow)
                assert torch.equal(again, slow)
        other = torch.tensor([11])
        assert torch.equal(ng.embedding(other, w), ng.embedding(other, w, impl="reference"))


@pytest.mark.parametrize("wrong", [-1, 40])
def test_an_id_outside_the_table_raises_the_same_after_one_inside(wrong):
    table = ng.quantize(torch.randn(40, 96), "mxfp4")
    ng.embedding(torch.tensor([3]), table)
    with pytest.raises(ng.InputError, match=rf"ids in \[0, 40\), got {wrong}"):
        ng.embedding(torch.tensor([wrong]), table)


def test_what_a_first_call_refuses_a_second_refuses_too():
    w, x = _weight("int4_g32"), torch.randn(1, 96)
    ng.linear(x, w), ng.linear(x, w, input_scheme="int8_g32")
    with pytest.raises(ng.InputError, match="expected x of shape"):
        ng.linear(torch.randn(1, 64), w)
    with pytest.raises(ng.UnsupportedError, match="inference only"):
        ng.linear(x.clone().requires_grad_(), w)
    with pytest.raises(ng.InputError, match="NaN"):
        ng.linear(torch.full((1, 96), torch.nan), w, input_scheme="int8_g32")
    with pytest.raises(ng.InputError, match="expected bias"):
        ng.linear(x, w, torch.randn(39))


def test_codes_that_change_in_place_or_move_are_read_anew():
    w, other, x = _weight("int4_g32"), _weight("int4_g32", seed=1), torch.randn(1, 96)
    ng.linear(x, w), ng.linear(x, w)
    w.data.copy_(other.data), w.scales[0].data.copy_(other.scales[0].data)
    assert torch.equal(ng.linear(x, w), ng.linear(x, other))
    third = _weight("int4_g32", seed=2)
    w.data.data, w.scales[0].data.data = third.data.clone(), third.scales[0].data.clone()
    assert torch.equal(ng.linear(x, w), ng.linear(x, third))


def test_a_zero_point_that_changes_is_read_anew():
    table, ids = ng.quantize(torch.randn(40, 96), "q4_0"), torch.tensor([3])
    ng.embedding(ids, table), ng.embedding(ids, table)
    assert _calls(table, "embedding")
    table.zero_points.data.fill_(3)
    assert torch.equal(ng.embedding(ids, table), ng.embedding(ids, table, impl="reference"))


def test_copies_start_without_ready_calls():
    w, x = _weight("int4_g32"), torch.randn(1, 96)
    y = ng.linear(x, w)
    for made in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert not _calls(made)
        assert torch.equal(ng.linear(x, made), y)
        made.data.zero_()
        assert not torch.equal(ng.linear(x, made), y)
        assert torch.equal(ng.linear(x, w), y)


def test_a_kernel_put_in_the_place_of_ours_is_used(monkeypatch):
    w, x = _weight("int4_g32"), torch.randn(1, 96)
    ng.linear(x, w), ng.linear(x, w)
    operator = dispatch.OPERATORS["linear"]
    theirs = dispatch.Kernel("cpu", f"{__name__}:_filled")
    monkeypatch.setitem(operator.kernels, "cpu", theirs)
    operator.passed.clear()
    assert ng.linear(x, w).eq(7).all()
    operator.passed.clear()


def _filled(*args, out, **kwargs):
    out.fill_(7)


def test_views_and_other_tensors_take_the_long_way():
    w = _weight("int4_g32")
    wide = torch.randn(3, 192)
    for x in (wide[:, :96], wide[:, ::2], torch.randn(96, 3).T):
        if x.stride(1) != 1:
            with pytest.raises(ng.InputError):
                ng.linear(x, w)
        else:
            assert torch.equal(ng.linear(x, w), ng.linear(x.contiguous(), w))
    assert not ready.plain(wide[:, :96])
    assert not ready.plain(torch.empty(1, device="meta"))
    assert not ready.plain(torch.ones(2, 2).to_sparse())
