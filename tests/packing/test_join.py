"""Matrices under one another in lanes: the values of both, views that are the parts, and what does not fit."""

import pytest
import torch

import narrowgate as ng
from narrowgate.packing.join import join_rows


def prepared(rows, scheme, k=128, **options):
    g = torch.Generator().manual_seed(rows)
    return ng.prepare(ng.quantize(torch.randn(rows, k, generator=g) * rows, scheme, **options))


@pytest.mark.parametrize("scheme", ng.schemes())
def test_values_and_views(scheme):
    parts = [prepared(n, scheme) for n in (48, 16, 5)]
    whole, views = join_rows(parts)
    assert whole.shape == (69, 128)
    assert torch.equal(whole.dequantize(), torch.cat([p.dequantize() for p in parts]))
    for part, view in zip(parts, views, strict=True):
        assert ng.same_bits(part, view)
        assert view.data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()
    x = torch.randn(3, 128)
    assert torch.equal(ng.linear(x, whole), torch.cat([ng.linear(x, p) for p in parts], dim=-1))


def test_what_does_not_fit():
    a = prepared(32, "int4_g32")
    for b in (
        prepared(32, "int4_g64"),
        prepared(32, "int8_g32"),
        prepared(32, "int4_g32", k=64),
        ng.quantize(torch.randn(32, 128), "int4_g32"),
    ):
        assert join_rows([a, b]) is None
    assert join_rows([prepared(24, "int4_g32"), a]) is None  # it would begin in the middle of a vector
    assert join_rows([a, prepared(24, "int4_g32")]) is not None
    stack = ng.prepare(ng.quantize(torch.randn(2, 32, 128), "int4_g32"), op="grouped_linear")
    assert join_rows([stack, stack]) is None
