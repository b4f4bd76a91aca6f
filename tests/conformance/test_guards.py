"""Guards keep strides, watch gaps and both sides, poison what is fresh, and see a change inside a packed tensor."""

import dataclasses
from typing import NamedTuple

import pytest
import torch

from narrowgate.conformance.case import Case
from narrowgate.conformance.guards import CANARY, POISON, clone, guard, map_tensors, poisoned_memory, tensors
from narrowgate.conformance.run import run
from narrowgate.packing import Scale, pack


def test_guard_keeps_strides_and_watches_gaps():
    view = torch.randn(4, 10)[:, 2:7]
    for guarded in (guard(view), guard(view, shifted=True)):
        assert guarded.tensor.stride() == view.stride()
        assert torch.equal(guarded.tensor, view)
        guarded.tensor.mul_(2)
        assert not guarded.broken()
        guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset() + 5).fill_(0.0)
        assert guarded.broken()
    assert torch.equal(clone(view), view)
    assert clone(view).stride() == view.stride()


def test_expanded_inputs_stay_expanded():
    beta = torch.randn(3, 1).expand(3, 5)
    assert guard(beta).tensor.stride() == (1, 0)
    assert torch.equal(guard(beta).tensor, beta)
    assert clone(beta).stride() == (1, 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)])
def test_every_shape_and_dtype(shape, dtype):
    t = torch.ones(shape, dtype=dtype)
    for shifted in (False, True):
        guarded = guard(t, shifted=shifted)
        assert guarded.tensor.shape == t.shape
        assert guarded.tensor.dtype == dtype
        assert torch.equal(guarded.tensor, t)
        if t.numel():
            assert (guarded.tensor.data_ptr() % 64 == 0) != shifted
        for edge in (0, -1):
            beside = POISON if shifted else CANARY
            assert guarded.whole[edge] == beside
            guarded.whole[edge] = 0
            assert guarded.broken()
            guarded.whole[edge] = beside
        assert not guarded.broken()


def test_poison_fills_elements_and_leaves_gaps():
    t = torch.zeros(4, 6, dtype=torch.bfloat16)[:, :5]
    guarded = guard(t, poison=True)
    assert bool(guarded.tensor.isnan().all())
    assert (guarded.tensor.view(torch.uint8) == POISON).all()
    assert float(guarded.tensor.as_strided((1,), (1,), guarded.tensor.storage_offset() + 5)) == 0.0


def test_fresh_memory_is_poisoned_whichever_way_it_comes():
    x = torch.ones(2)
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        for fresh in (torch.empty(2), x.new_empty(2), torch.empty_like(x), torch.empty_strided((2,), (1,))):
            assert bool(fresh.isnan().all())
        assert torch.empty(2, dtype=torch.uint8).tolist() == [255, 255]
        assert torch.empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
    assert torch.are_deterministic_algorithms_enabled() == before


class Pair(NamedTuple):
    w: object
    more: list


def packed():
    scale = Scale.from_codes(torch.arange(4, dtype=torch.uint8).view(2, 2) + 120, "float8_e8m0fnu", (1, 4))
    return pack(torch.arange(14).view(2, 7), "int4", scales=(scale,))


def test_packed_tensors_are_walked():
    w = packed()
    assert len(tensors(w)) == 2
    moved = map_tensors(w, lambda t: guard(t).tensor)
    assert [a.data_ptr() != b.data_ptr() for a, b in zip(tensors(w), tensors(moved), strict=True)] == [True, True]
    assert torch.equal(moved.codes(), w.codes())
    pair = map_tensors(Pair(w, [torch.ones(3)]), lambda t: t + 1)
    assert isinstance(pair, Pair)
    assert pair.more[0].tolist() == [2.0] * 3
    assert map_tensors({"a": [w, 3], "b": (None, "x")}, lambda t: t)["b"] == (None, "x")


CASE = Case(
    "read", "scales of a packed tensor", lambda g: {"w": packed()}, lambda w: {"s": w.scales[0].data.clone()}
)  # fmt: skip


def test_a_change_or_an_overrun_inside_a_packed_tensor_is_seen():
    assert run(CASE, lambda w: w.scales[0].data.clone())

    def changes(w):
        out = w.scales[0].data.clone()
        w.scales[0].data[1, 1] += 1
        return out

    def overruns(w):
        data = w.data
        data.as_strided((1,), (1,), data.storage_offset() + data.numel()).fill_(7)
        return w.scales[0].data.clone()

    assert "w: the input was changed" in run(CASE, changes).detail
    assert "beside a buffer" in run(CASE, overruns).detail
    assert dataclasses.is_dataclass(packed())
