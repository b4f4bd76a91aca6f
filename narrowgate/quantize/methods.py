"""The quantizers themselves: one function a family, from float32 blocks to codes and scale codes.

Every function takes `blocks` float32 [rows, groups, B], finite, the last group of a row filled up with zeros, and a `Job`,
and returns codes [rows, groups, B] and scale codes [rows, groups]. q = nearest element to f32(x / s), s being the STORED
scale as it decodes, by a true division; powers of two multiply by the exact inverse. A zero block has scale code 0 and
codes 0. ggml's schemes follow the gguf package's own arithmetic instead (unrounded reciprocal, its own rounding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import Scheme, codebook
from narrowgate.formats.codebooks import nearest_index
from narrowgate.formats.elements import Element, element
from narrowgate.quantize.arithmetic import divide
from narrowgate.quantize.scale_rules import minimum_error_byte, scale_byte, scale_down
from narrowgate.quantize.storage import round_up


@dataclass(frozen=True)
class Job:
    """What a family needs besides the values: the scheme, the rule asked for, and the outer scale of these rows."""

    scheme: Scheme
    rule: str
    outer: Tensor  # float32 [rows or 1]: the second level's scale, 1.0 where there is none

    @property
    def record(self) -> Element:
        """The element of the codes."""
        return self.scheme.value_element

    @property
    def limits(self) -> tuple[int, int]:
        """The range of integer codes."""
        assert self.scheme.code_range is not None
        return self.scheme.code_range


def microscaling(blocks: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Power-of-two scales by a named rule; codes round to nearest even and saturate."""
    amax = blocks.abs().amax(-1)
    mse = job.rule == "mse"
    byte = minimum_error_byte(blocks, amax, job.record) if mse else scale_byte(amax, job.record.name, job.rule)
    return job.record.encode_unchecked(scale_down(blocks, byte)), byte


def nvfp4(blocks: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """E4M3 block scales under a float32 outer scale s2: RNE(amax / (6 s2)); non-zero blocks never get scale 0 by default."""
    outer = job.outer[:, None]
    amax = blocks.abs().amax(-1)
    byte = element("float8_e4m3fn").encode_unchecked(divide(amax, job.record.max * outer))
    if job.rule == "nearest_nonzero":
        byte = torch.where(amax > 0, byte.clamp(min=1), byte)
    scale = element("float8_e4m3fn").decode(byte) * outer
    return job.record.encode_unchecked(_quotient(blocks, scale)), byte


def integer(blocks: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Symmetric integers: s = amax / top, stored by the scheme's rule (bfloat16 rounded up, float32 to nearest)."""
    top = job.limits[1]
    name = job.scheme.scales[0].element
    code = round_up(divide(blocks.abs().amax(-1), float(top)), name)
    return _integer_codes(blocks, element(name).decode(code), job), code


def signed_integer(blocks: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """As `integer`, with the scale's sign chosen so that the element of largest magnitude gets the lowest code (-2)."""
    name = job.scheme.scales[0].element
    scale = divide(_largest(blocks), float(job.limits[0]))
    code = round_up(torch.where(scale == 0, 0.0, scale), name)
    return _integer_codes(blocks, element(name).decode(code), job), code


def table(blocks: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Nearest entry of the codebook to x / amax, ties to the lower index."""
    amax = blocks.abs().amax(-1)
    return _table_codes(blocks, amax, job), element("float32").encode_unchecked(amax)


def iq4_nl(blocks: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Nearest entry of ggml's table to x / d, d = f16(signed largest / -127), ties to the lower index."""
    scale = divide(_largest(blocks), float(codebook("iq4_nl")[0]))
    code = _half(torch.where(scale == 0, 0.0, scale), job)
    return _table_codes(blocks, element("float16").decode(code), job), code


def q8_0(blocks: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """gguf's Q8_0: d = amax / 127, codes round x * f32(1/d) half away from zero; d is then stored in float16."""
    scale = divide(blocks.abs().amax(-1), 127.0)
    product = blocks * _reciprocal(scale)[..., None]
    magnitude = product.abs()
    whole = magnitude.floor()
    rounded = whole + (2 * (magnitude - whole)).floor()
    return torch.copysign(rounded, product).to(torch.int8).view(torch.uint8), _half(scale, job)


def q4_0(blocks: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """gguf's Q4_0: d = signed largest / -8, codes trunc(x * f32(1/d) + 8.5) up to 15; d is then stored in float16."""
    scale = divide(_largest(blocks), -8.0)
    shifted = blocks * _reciprocal(scale)[..., None] + 8.5
    return shifted.trunc().clamp(0, 15).to(torch.uint8), _half(scale, job)


def plain(blocks: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """No scale: the element's own rounding."""
    return job.record.encode_unchecked(blocks), blocks.new_empty(blocks.shape[:2], dtype=torch.uint8)


METHODS: dict[str, Callable[[Tensor, Job], tuple[Tensor, Tensor]]] = {
    f.__name__: f for f in (microscaling, nvfp4, integer, signed_integer, table, iq4_nl, q8_0, q4_0, plain)
}


def _quotient(blocks: Tensor, scale: Tensor) -> Tensor:
    """f32(x / s) with s of each block; 0 where s is 0 (its codes are then 0)."""
    zero = scale == 0
    safe = torch.where(zero, 1.0, scale)
    return torch.where(zero[..., None], 0.0, divide(blocks, safe[..., None].expand_as(blocks)))


def _integer_codes(blocks: Tensor, scale: Tensor, job: Job) -> Tensor:
    low, high = job.limits
    codes = _quotient(blocks, scale).round_().clamp_(low, high).to(torch.int32)
    return (codes & ((1 << job.record.bits) - 1)).to(torch.uint8)


def _table_codes(blocks: Tensor, scale: Tensor, job: Job) -> Tensor:
    assert job.scheme.codebook is not None
    codes = nearest_index(job.scheme.codebook, _quotient(blocks, scale))
    return torch.where((scale == 0)[..., None], 0, codes)


def _largest(blocks: Tensor) -> Tensor:
    """The element of largest magnitude of each block, with its sign; the first one if several are equal."""
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)


def _reciprocal(scale: Tensor) -> Tensor:
    """f32(1/d); 0 where d is 0, or so small that 1/d overflows (such a d is 0 in float16 anyway)."""
    inverse = divide(1.0, torch.where(scale == 0, 1.0, scale))
    return torch.where((scale == 0) | inverse.isinf(), 0.0, inverse)


def _half(scale: Tensor, job: Job) -> Tensor:
    """Codes of the scale in float16, to nearest even; refused where float16 overflows."""
    code = element("float16").encode_unchecked(scale)
    if bool(((code & 0x7FFF) == 0x7C00).any()):
        raise InputError(
            f"quantize: {job.scheme.name} stores its scale in float16, whose maximum 65504 a block's scale of "
            f"{float(scale.abs().max()):g} exceeds"
        )
    return code
