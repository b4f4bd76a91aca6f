"""Calls of gpu_experts: which experts it takes, and how many warps a program has (a table, nothing is tuned at run time)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from narrowgate.ops.experts.gpu_experts import experts_kernel
from narrowgate.ops.linear import gpu_few_asm, gpu_run
from narrowgate.ops.linear.gpu_run import Form
from narrowgate.packing.planes import PARTS, planes
from narrowgate.tile.gpu_launch import launch

ROWS = 32  # outputs of a program
Weights = tuple[list[Tensor], str]  # what `flatten` gives


@dataclass(frozen=True)
class Experts:
    """Both products of a layer's experts, as the kernel reads them."""

    gate_up: Form
    down: Form


@lru_cache(maxsize=4096)
def experts(gate_up: str, down: str, own_gate_up: str, own_down: str) -> tuple[Experts | None, str]:
    """(what the described weights are to the kernel, "") or (None, why it does not take them). own_*: the shared expert's."""
    forms = []
    for many, own in ((gate_up, own_gate_up), (down, own_down)):
        f, reason = gpu_run.form(many)
        single, _ = gpu_run.form(own)
        if f is None:
            return None, reason
        if single is None or replace(single, matrices=f.matrices) != f:
            return None, "a shared expert of another format or shape"
        if not gpu_run.takes_few(f):
            return None, "what few_kernel does not read"
        if f.n % ROWS or f.k % (PARTS[f.bits] * f.part):
            return None, f"{f.n} outputs of {f.k} values"
        forms.append(f)
    if forms[1].k * 2 != forms[0].n:
        return None, f"{forms[0].n} rows of gates and ups, and {forms[1].k} values that follow"
    return Experts(*forms), ""


def warps(f: Form) -> int:
    """Of a program: each has a few units at least, lest it wait for its first loads."""
    return 4 if f.units >= 16 else 2 if f.units >= 8 else 1


def _depth(f: Form, count: int) -> int:
    """Units of a warp that are in flight at once."""
    each = -(-f.units // count)
    most = 2 if f.bits >= 6 or f.part == 16 else 4
    return next(depth for depth in (1, 2, 4) if depth >= min(each, most))


def product(
    f: Form, x: Tensor, chosen: Tensor, w: list[Tensor], own: list[Tensor], out: Tensor, top_k: int, *, gated: bool,
    weights: Tensor | None = None, counts: Tensor | None = None, mixed: Tensor | None = None,
    count: int = 0, depth: int = 0,
) -> None:  # fmt: skip
    """One launch of experts_kernel, which says what the tensors are; with `mixed` the weighted sums too."""
    unit = PARTS[f.bits] * f.part
    group = 0 if f.per_row else min(f.group, unit)
    kind = gpu_run._KIND[x.dtype]
    fold = gpu_few_asm.folds(f.element, f.scale, group, ROWS, f.n, kind)
    if fold:
        asm, constraints = gpu_few_asm.folded_asm(f.element, f.bits, f.part, group, 1)
    else:
        asm, constraints = gpu_few_asm.unit_asm(f.element, f.bits, f.part, group, f.scale, 1, kind)
    count = count or warps(f)
    depth = depth or _depth(f, count)
    stored = gpu_run._stored
    tokens = chosen.shape[0]
    launch(
        experts_kernel, (f.n // ROWS, tokens * (top_k + 1)), x, x, chosen, w[0], stored(w, f.scale_index), stored(w, f.outer_index),
        own[0], stored(own, f.scale_index), stored(own, f.outer_index), out, weights, counts, mixed,
        f.n, f.units, f.blocks, x.stride(0), f.units * planes(f.bits) * f.n * f.part, f.blocks * f.n,
        ASM=asm, CONSTRAINTS=constraints, ROW_ASM=gpu_few_asm.row_asm(f.scale) if f.per_row else "", PARTS=PARTS[f.bits],
        PLANES=planes(f.bits), J=f.part, GROUP=group, BLOCK=f.group, OUTER=0 if f.outer_index is None else 2 if f.outer_rows else 1,
        WARPS=count, DEPTH=depth, ONCE=-(-f.units // count) <= depth, FOLD=fold, GATED=gated, TOP=top_k, MIX=mixed is not None,
        num_warps=count, overlap=True,
    )  # fmt: skip


def run(
    e: Experts, x: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor, gate_up: list[Tensor], down: list[Tensor],
    own_gate_up: list[Tensor], own_down: list[Tensor],
) -> Tensor:  # fmt: skip
    """[T, hidden]: the weighted sum of each token's experts. x [T, hidden] of 16 bits; chosen [T, top_k] int32, written before the
    launch before this call's; weights [T, top_k + 1] float32, the last one the shared expert's; counts int32 zeros [T, hidden / 32]."""
    (tokens, top_k), f = chosen.shape, e.down
    if x.stride(-1) != 1 or x.stride(0) % 4 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    between = torch.empty(tokens * (top_k + 1), f.k, dtype=x.dtype, device=x.device)
    rows = torch.empty(tokens * (top_k + 1), f.n, dtype=x.dtype, device=x.device)
    mixed = torch.empty(tokens, f.n, dtype=x.dtype, device=x.device)
    product(e.gate_up, x, chosen, gate_up, own_gate_up, between, top_k, gated=True)
    product(e.down, between, chosen, down, own_down, rows, top_k, gated=False, weights=weights, counts=counts, mixed=mixed)
    return mixed
