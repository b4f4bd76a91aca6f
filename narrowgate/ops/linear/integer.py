"""Integer activations, `input_scheme="int8_g32"` on a weight of integers: the contract, in plain torch.

A weight qualifies if its codes are integers up to one factor: int and uint elements, E2M1 (counted in halves), IQ4_NL's table;
with one scale for 16 values or for a multiple of 32 (or the whole row). Then, with q the activations' codes, t their scale
(one for 32 values), s the weight's block scale and a run the 32 (or 16) values that share both:
    whole = sum over the run of q[m, k] * code[n, k]                 (an exact integer, below 2^24)
    total = f32(total + f32(f32(whole * unit) * f32(s * t)))         run by run, k ascending; unit is 1, or 1/2 for E2M1
and finally total * outer scale, + bias, one rounding. Integers make the sum within a run free of order, so batch sizes,
threads and implementations agree bit for bit. A weight that does not qualify meets the activations' values exactly."""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from narrowgate.errors import UnsupportedError
from narrowgate.formats import codebook, element
from narrowgate.ops.linear.reading import PAIR4, SIGNED8, TABLE2, TABLE4, Weight, reading
from narrowgate.packing import PackedTensor

NAME = "int8_g32"


@lru_cache(maxsize=4096)
def integer_reading(described: str) -> tuple[Weight | None, str]:
    """(the weight as integers, "") or (None, why the activations' values are multiplied instead)."""
    weight, reason = reading(described)
    if weight is None:
        return None, reason
    if weight.kind not in (TABLE4, PAIR4, TABLE2, SIGNED8):
        return None, f"{weight.element} is no element of small integers"
    if weight.blocks > 1 and weight.block != 16 and weight.block % 32:
        return None, f"scale blocks of {weight.block} values, neither 16 nor a multiple of 32"
    return weight, ""


def integer_weight(w: list[Tensor], described: str, input_scheme: str | None) -> tuple[Weight | None, str]:
    """`integer_reading`, the codebook looked at too, where the input scheme asks for it."""
    if input_scheme != NAME:
        return None, "no integer activations asked for"
    weight, reason = integer_reading(described)
    if weight is not None and weight.table_index is not None:
        try:
            integer_table(weight, w)
        except UnsupportedError as refusal:
            return None, str(refusal)
    return weight, reason


def run_length(w: Weight) -> int:
    """Values that share a scale on both sides."""
    return 16 if w.blocks > 1 and w.block == 16 else 32


def integer_table(w: Weight, tensors: list[Tensor]) -> tuple[Tensor, float]:
    """(int32 [2**bits]: every code as an integer, the unit they count in). Raises UnsupportedError for other codebooks."""
    zero = 0 if w.zero_index is None else int(tensors[w.zero_index].item())
    if w.table_index is not None and not torch.equal(tensors[w.table_index].view(torch.float32), _iq4_nl()):
        raise UnsupportedError("a codebook that is not one of integers")
    return _integers(w.element, zero)


@cache
def _iq4_nl() -> Tensor:
    return codebook("iq4_nl")


@lru_cache(maxsize=256)
def _integers(name: str, zero: int) -> tuple[Tensor, float]:
    unit, kind = (0.5 if name == "float4_e2m1fn" else 1.0), element(name)
    values = _iq4_nl() if kind.kind == "index" else kind.decode(torch.arange(2**kind.bits)) / unit
    return values.to(torch.int32) - zero, unit


def integer_product(x: PackedTensor, w: PackedTensor, reading: Weight, table: Tensor, unit: float) -> Tensor:
    """float32 [M, N] by the contract above, to be read. x: [M, K] in int8_g32; w: [N, K]."""
    m, k, n = x.shape[0], x.shape[1], w.shape[0]
    length = run_length(reading)
    codes = x.codes().view(torch.int8).double()
    weights = table[w.codes().long()].double()  # whole numbers: float64 sums of a run are exact
    t = x.scales[0].values(x.shape)
    s = w.scales[0].values(w.shape) if reading.scale_index is not None else torch.ones(n, 1)
    total = torch.zeros(m, n)
    for start in range(0, k, length):
        whole = (codes[:, start : start + length] @ weights[:, start : start + length].T).float()
        total += (whole * unit) * (t[:, start // 32, None] * s[None, :, start // reading.block])
    if reading.outer_index is not None:
        total *= w.scales[-1].values(w.shape).reshape(-1)
    return total
