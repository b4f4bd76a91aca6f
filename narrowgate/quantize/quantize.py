"""`quantize`: a dense tensor to a PackedTensor by a scheme of the catalogue. The reference, and the definition of the bits.

Scales run along the last axis; any K is legal, the last block of a row is short where K is no multiple of the group (ggml's
schemes and fp6_bytes@1 refuse by name). Rows are worked on in slices, so that memory beyond the result stays bounded.
Left out: choosing schemes for a model, calibration, activations with row counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from narrowgate.errors import InputError
from narrowgate.formats import Scheme, element
from narrowgate.formats import codebook as find_codebook
from narrowgate.formats import scheme as find_scheme
from narrowgate.formats.schemes import TENSOR
from narrowgate.packing.build import attach_codebook
from narrowgate.packing.layout import Layout, row_count
from narrowgate.packing.registry import layout as find_layout
from narrowgate.packing.rows import storage_dtype
from narrowgate.packing.scale import Scale
from narrowgate.packing.tensor import PackedTensor
from narrowgate.quantize.arithmetic import divide
from narrowgate.quantize.methods import METHODS, Job
from narrowgate.quantize.non_finite import check_policy, mark, saturated

_SLICE_VALUES = 1 << 18  # stays in the second-level cache; larger slices were slower


def quantize(
    x: Tensor,
    scheme: str | Scheme,
    *,
    scale_rule: str | None = None,
    global_scale: float | Tensor | str | None = None,
    layout: str | None = None,
    non_finite: str = "raise",
    rows_by: Callable[..., tuple[Tensor, Tensor]] | None = None,
    amax_by: Callable[..., Tensor] | None = None,
) -> PackedTensor:
    """Quantize x [..., K] along its last axis.

    x: float32, bfloat16 or float16, finite; read exactly, all arithmetic in float32. scheme: a name of
    `narrowgate.schemes()`. scale_rule: one of the scheme's `scale_rules` (None: the first). global_scale, for schemes with a
    second level (nvfp4), is that level's factor s2 (values are code * s_block * s2): a positive number for the whole tensor,
    one number a row as a tensor, "per_row" (amax of the row / 2688), or None (amax of the tensor / 2688). layout: of the
    codes (None: the scheme's own). non_finite: "raise", or "saturate" for activations, which looks at no value
    (non_finite.py; schemes of one scale level). rows_by, amax_by: a kernel's own
    `quantize_rows` and `finite_row_amax`. Returns a PackedTensor on x's device; x is not changed.
    Raises InputError for a wrong dtype, a non-finite value (with count and first index), an unknown name, a refused K.
    Source: DESIGN's table of schemes; SPEC B19-B23, A39, A40.

    >>> w = quantize(torch.tensor([[0.0, 0.5, -3.0, 6.0]]), "mxfp4")
    >>> w.codes().tolist(), w.scales[0].data.tolist()
    ([[0, 1, 13, 7]], [[127]])
    """
    record = find_scheme(scheme)
    chosen = find_layout(record.layout if layout is None else layout)
    rule = _check(x, record, scale_rule, chosen)
    check_policy("quantize", non_finite)
    rows = x.reshape(row_count(x.shape), x.shape[-1])
    if non_finite == "raise":
        outer = _outer_scale(record, (amax_by or finite_row_amax)(rows, x.shape), global_scale)
    elif len(record.scales) != 1 or global_scale is not None:
        raise InputError(f"quantize: non_finite='saturate' needs a scheme of one scale level, got {record.name}")
    else:
        outer = None
    data, codes = (rows_by or quantize_rows)(rows, tuple(x.shape), record, rule, outer, chosen, non_finite)
    scales = []
    if record.scales:
        block = record.scales[0].block(x.shape)
        scales.append(Scale(codes, record.scales[0].element, block))
    if outer is not None:
        scales.append(_outer_as_scale(outer, record, tuple(x.shape)))
    return PackedTensor(
        record.element, chosen.name, data, tuple(x.shape), tuple(scales), _zero_point(record, x), (), _table(record, x)
    )


def _check(x: Tensor, record: Scheme, scale_rule: str | None, chosen: Layout) -> str:
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"quantize: expected a float32, bfloat16 or float16 tensor, got {got}")
    if x.dim() == 0:
        raise InputError("quantize: expected at least one axis, got a scalar")
    if x.shape[-1] % record.k_multiple:
        raise InputError(f"quantize: {record.name} needs K divisible by {record.k_multiple}, got {x.shape[-1]}")
    chosen.check(tuple(x.shape), record.value_element.bits, "quantize")
    if scale_rule is None:
        return record.scale_rules[0] if record.scale_rules else ""
    if scale_rule not in record.scale_rules:
        legal = ", ".join(record.scale_rules) or "none"
        raise InputError(f"quantize: expected a scale rule of {record.name} ({legal}), got {scale_rule!r}")
    return scale_rule


def _slices(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Row ranges of about _SLICE_VALUES values; every start is a multiple of 32, where every appendable layout starts anew."""
    step = max(_SLICE_VALUES // max(width, 1) // 32, 1) * 32
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def finite_row_amax(rows: Tensor, shape: torch.Size) -> Tensor:
    """float32 [rows]: the largest magnitude of each row. Raises InputError if any value is not finite."""
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0], dtype=torch.float32)
    amax = torch.cat(
        [rows[i:j].abs().amax(-1) for i, j in _slices(*rows.shape)] or [rows.new_zeros(0)]
    ).to(torch.float32)  # fmt: skip
    if bool(amax.isfinite().all()):
        return amax
    count, first = 0, None
    for i, j in _slices(*rows.shape):
        bad = ~rows[i:j].isfinite()
        count += int(bad.sum())
        if first is None and count:
            first = i * rows.shape[1] + int(bad.reshape(-1).to(torch.uint8).argmax())
    index = [int(axis) for axis in torch.unravel_index(torch.tensor(first), shape)]
    raise InputError(f"quantize: {count} of {rows.numel()} values are not finite, the first at index {index}")


def _outer_scale(record: Scheme, row_amax: Tensor, given: float | Tensor | str | None) -> Tensor | None:
    """float32 [1] or [rows]: the second level's factor, or None for schemes of one level."""
    if len(record.scales) < 2:
        if given is not None:
            raise InputError(f"quantize: {record.name} has no second scale level, so it takes no global_scale")
        return None
    if given is None or isinstance(given, str):
        if given not in (None, "per_row"):
            raise InputError(f"quantize: expected global_scale as a number, a tensor or 'per_row', got {given!r}")
        one = row_amax.new_zeros(1) if len(row_amax) == 0 else row_amax.amax(0, keepdim=True)
        amax = row_amax if given == "per_row" else one
        scale = divide(amax, record.value_element.max * element(record.scales[0].element).max)  # 2688 for nvfp4
        return torch.where(scale > 0, scale, 1.0)  # all zero, or so small that the factor itself underflows
    scale = torch.as_tensor(given, dtype=torch.float32, device=row_amax.device).reshape(-1)
    if scale.numel() not in (1, len(row_amax)):
        raise InputError(f"quantize: expected global_scale of 1 or {len(row_amax)} numbers, got {scale.numel()}")
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise InputError("quantize: expected positive finite global scales")
    return scale


def _outer_as_scale(outer: Tensor, record: Scheme, shape: tuple[int, ...]) -> Scale:
    spec = record.scales[1]
    whole = outer.numel() == 1 and row_count(shape) != 1
    block = spec.block(shape) if whole or spec.span != TENSOR else (1,) * (len(shape) - 1) + (max(shape[-1], 1),)
    grid = tuple(-(-extent // b) for extent, b in zip(shape, block, strict=True))
    codes = element(spec.element).encode_unchecked(outer)[: prod(grid)]
    return Scale.from_codes(codes.reshape(grid), spec.element, block)


def quantize_rows(
    rows: Tensor, shape: tuple[int, ...], record: Scheme, rule: str, outer: Tensor | None, chosen: Layout, policy: str
) -> tuple[Tensor, Tensor]:
    """Codes packed in the chosen layout, and the innermost scale's codes in their grid's shape (empty without scales)."""
    bits = record.value_element.bits
    working = chosen if chosen.appendable else find_layout("bytes@1")
    data = torch.zeros(working.storage_shape(shape, bits), dtype=working.storage_dtype(bits), device=rows.device)
    width = rows.shape[1]
    group = max(width if record.group_size is None else record.group_size, 1)
    groups = -(-width // group)
    scale_bits = element(record.scales[0].element).bits if record.scales else 8
    scales = torch.zeros(rows.shape[0], groups, dtype=storage_dtype(scale_bits), device=rows.device)
    if rows.numel():
        filled = 0
        factors = rows.new_ones(1, dtype=torch.float32) if outer is None else outer
        for i, j in _slices(*rows.shape):
            blocks = torch.nn.functional.pad(rows[i:j].to(torch.float32), (0, groups * group - width))
            job = Job(record, rule, factors if len(factors) == 1 else factors[i:j])
            codes, scales[i:j] = _quantize_blocks(blocks.view(j - i, groups, group), job, policy)
            part = working.pack(codes.view(j - i, groups * group)[:, :width].contiguous(), bits).view(-1)
            data.view(-1)[filled : filled + part.numel()] = part
            filled += part.numel()
    if working is not chosen:
        data = chosen.pack(data, bits)
    return data, scales.view(*shape[:-1], groups)


def _quantize_blocks(blocks: Tensor, job: Job, policy: str) -> tuple[Tensor, Tensor]:
    """Codes and scale codes of float32 blocks [rows, groups, B] under a policy for what is not finite."""
    method = METHODS[job.scheme.method]
    if policy == "raise":
        return method(blocks, job)
    clean, nan = saturated(blocks)
    codes, scales = method(clean, job)
    return mark(codes, scales, nan, job.record, job.scheme.scales[0].element)


def _zero_point(record: Scheme, x: Tensor) -> Scale | None:
    if record.zero_point is None:
        return None
    grid = tuple(min(extent, 1) for extent in x.shape)  # one cell, or none in an empty tensor
    codes = torch.full(grid, record.zero_point, dtype=torch.uint8, device=x.device)
    return Scale(codes, "uint8", tuple(max(extent, 1) for extent in x.shape))


def _table(record: Scheme, x: Tensor) -> Tensor | None:
    if record.codebook is None:
        return None
    return attach_codebook(record.element, find_codebook(record.codebook)).to(x.device)
