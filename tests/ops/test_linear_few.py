"""The assembly of `few_kernel`, statement by statement for the lanes of a warp, on the host: one unit against its float64 product."""

import re
from dataclasses import replace

import pytest
import torch

import narrowgate as ng
from narrowgate.ops.linear.gpu_few_asm import folded_asm
from narrowgate.ops.linear.gpu_place import SMALL, lift, place_halves
from narrowgate.ops.linear.prepare import for_gpu
from narrowgate.packing.planes import PARTS, planes

_WORD = 2**32 - 1
_LANE = torch.arange(32)
_G, _T = _LANE // 4, _LANE % 4
_STEPS = {
    "mov": lambda a: a, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "shl": lambda a, b: a << b & _WORD,
    "shr": lambda a, b: a >> b, "mul": lambda a, b: a * b & _WORD, "mad": lambda a, b, c: a * b + c & _WORD,
    "add": lambda a, b: a + b & _WORD, "add.rn": lambda a, b: _bits(_floats(a) + _floats(b)), "max": torch.maximum,
    "bfe": lambda a, b, n: (a >> b) & ((1 << n) - 1),
    "setp.ne": lambda a, b: (a != b).long(), "setp.eq": lambda a, b: (a == b).long(),
    "vote": lambda a, _: a.bool().any().long().expand(32), "fma": lambda a, b, c: _bits(_floats(a) * _floats(b) + _floats(c)),
}  # fmt: skip


def _bits(values):
    return values.float().view(torch.int32).long() & _WORD


def _floats(bits):
    return (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)


def _bfloat16(halves):
    return torch.stack((halves & 0xFFFF, halves >> 16)).to(torch.uint16).view(torch.bfloat16).float()


def _permuted(a, b, selector):
    given = [word >> 8 * i & 255 for word in (a, b) for i in range(4)]
    return sum(given[int(selector) >> 4 * i & 7] << 8 * i for i in range(4))


def _product(a, b):
    product = torch.stack([u * v for u, v in zip(_bfloat16(a), _bfloat16(b), strict=True)]).bfloat16()
    low, high = product.view(torch.int16).long() & 0xFFFF
    return low | high << 16


def _looked_up(a, b, c, table):
    out = torch.zeros_like(a)
    for i in range(8):
        if int(table) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out & _WORD


def _mma(registers, into, a, b):
    """m16n8k16: into += a b, each operand as the lanes hold it."""
    left, right = torch.zeros(16, 16), torch.zeros(16, 8)
    for i, word in enumerate(a):
        for half, values in enumerate(_bfloat16(word)):
            left[_G + 8 * (i % 2), 2 * _T + 8 * (i // 2) + half] = values
    for i, word in enumerate(b):
        for half, values in enumerate(_bfloat16(word)):
            right[2 * _T + 8 * i + half, _G] = values
    sums = left.double() @ right.double()
    for i, name in enumerate(into):
        registers[name] = _bits(_floats(registers[name]).double() + sums[_G + 8 * (i // 2), 2 * _T + i % 2])


def _run(text, given):
    """The registers after an assembly text."""
    registers = dict(given)

    def read(name):
        number = int(name[2:], 16) if name.startswith("0f") else None
        return registers[name] if name in registers else torch.tensor(int(name, 0) if number is None else number)

    text = re.sub(r"\.reg[^;]*;", "", text).replace("ASIDE: ", "ASIDE:; ").replace("DONE: ", "DONE:; ")
    steps = [re.sub(r"^[{} ]+", "", step) for step in text.split(";")]
    at = 0
    while at < len(steps):
        step, guard, at = steps[at], None, at + 1
        if not step or step.endswith(":"):
            continue
        if step.startswith("@"):
            guard, step = step[1:].split(" ", 1)
            guard = registers[guard].bool()
        op, rest = step.split(" ", 1)
        names = [name.strip() for name in rest.split(",")]
        if op == "bra":
            if guard is None or guard.all():
                at = steps.index(f"{rest}:")
        elif op == "mov.b64":
            registers[names[0][1:]], registers[names[1][:-1]] = registers[names[2]]
        elif op.startswith("mma"):
            into, a, b, _ = ([name.strip() for name in group.split(",")] for group in re.findall(r"{([^}]*)}", rest))
            _mma(registers, into, [registers[name] for name in a], [registers[name] for name in b])
        else:
            kind = op.rsplit(".", 1)[0] if op.startswith(("setp", "add.rn")) else op.split(".")[0]
            run = {"prmt": _permuted, "lop3": _looked_up, "mul": _product if "bf16" in op else _STEPS["mul"]}.get(kind)
            out = (run or _STEPS[kind])(*map(read, names[1:]))
            registers[names[0]] = out if guard is None else torch.where(guard, out, registers[names[0]])
    return registers


def _code(part, bits, layers):
    """The codes of a part, of words or bytes of every plane."""
    if bits == 6:
        return layers[part] & 63 if part < 3 else sum(layer >> 6 << 2 * i for i, layer in enumerate(layers))
    return layers[0] >> bits * part & ((1 << bits) - 1)


@pytest.mark.parametrize("element", sorted(SMALL))
@pytest.mark.parametrize("scale", [None, 32, 100, 127])
@pytest.mark.spec("A9", "A11")
def test_every_code_by_halves(element, scale):
    bits = 1 + SMALL[element][0] + SMALL[element][1]
    g = torch.Generator().manual_seed(0)
    layers = [torch.randint(0, 2**32, (4096,), generator=g) for _ in range(planes(bits))]
    for part in range(PARTS[bits]):
        given = {f"${2 + i}": layer for i, layer in enumerate(layers)}
        given["$2"] = layers[part if bits == 6 and part < 3 else 0]
        if scale is not None:
            given["m"] = torch.tensor((scale << 7 | scale << 23) + lift(element, "bf16") * 0x00800080)
        found = _run(place_halves(element, part, "bf16", "m" if scale is not None else ""), given)
        for i in range(4):
            code = _code(part, bits, [layer >> 8 * i & 255 for layer in layers])
            want = ng.formats.element(element).decode(code.to(torch.uint8)) * 2.0 ** (0 if scale is None else scale - 127)
            plain = want.isfinite()
            assert plain.sum() > 3900  # nearly all of them
            assert torch.equal(_bfloat16(found[f"${i % 2}"])[i // 2][plain], want[plain].float()), (part, i)


@pytest.mark.parametrize("element", sorted(SMALL))
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(("low", "high", "aside"), [(40, 127, False), (0, 200, True)])
@pytest.mark.spec("A9", "A37")
def test_a_unit_of_32_rows(element, columns, low, high, aside):
    """Scales that are multiplied into the values, and scales that send a warp to the other path."""
    bits = 1 + SMALL[element][0] + SMALL[element][1]
    g = torch.Generator().manual_seed(1)
    parts, layers = PARTS[bits], torch.randint(0, 256, (planes(bits), 32, 32), generator=g)
    if bits == 8:
        layers = torch.where(layers & 0x7F >= SMALL[element][3], layers & 0x8F, layers)
    scales = torch.randint(low, high, (parts, 32), generator=g)
    x = torch.randn(8 * columns, parts * 32, generator=g).bfloat16()
    words = lambda values, bits: sum(values[..., i] << bits * i for i in range(values.shape[-1]))  # noqa: E731
    operands = [torch.zeros(32, dtype=torch.long)] * (8 * columns)
    for i in range(4):
        for layer in layers:
            operands.append(words(layer[4 * _G + i].view(32, 8, 4)[_LANE[:, None], 2 * _T[:, None] + torch.arange(2)], 8).T)
    pairs = words(
        (x.view(torch.int16).long() & 0xFFFF).view(8 * columns, parts, 4, 2, 2, 2), 16
    )  # rows, parts, t, words, pairs
    operands += [pairs[8 * c + _G, p, _T, i].T for p in range(parts) for c in range(columns) for i in range(2)]
    operands += [words(row[4 * _G[:, None] + torch.arange(4)], 8) for row in scales]
    text, constraints = folded_asm(element, bits, 32, 32, columns)
    assert len(operands) + 8 * columns == len(constraints.split(","))
    found = _run(text, {f"${8 * columns + i}": operand for i, operand in enumerate(operands)})
    assert ("s0" in found) == aside
    got = torch.zeros(32, 8 * columns)
    for i in range(8 * columns):
        tile, c, entry = i // (4 * columns), i // 4 % columns, i % 4
        got[4 * _G + 2 * tile + entry // 2, 8 * c + 2 * _T + entry % 2] = _floats(found[f"${i}"])
    codes = [_code(p, bits, list(layers)) for p in range(parts)]
    values = [ng.formats.element(element).decode(code.to(torch.uint8)).double() for code in codes]
    w = torch.cat([v * 2.0 ** (scale[:, None] - 127.0) for v, scale in zip(values, scales, strict=True)], 1)
    assert ((got - w @ x.double().T).abs() <= 3e-7 * (w.abs() @ x.double().abs().T)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "int4_g32", "nvfp4"])
def test_few_rows_of_any_bits(name):
    """Scales near and far from 1, and what is no number, here and there: a unit of the kernel has two paths."""
    g = torch.Generator().manual_seed(0)
    for n, k in ((96, 1056), (64, 4096), (77, 1024)):
        w = for_gpu(ng.quantize(torch.randn(n, k, generator=g), name))
        if name != "int4_g32":  # whose scales are floats
            scales, data = w.scales[0].data.clone(), w.data.clone()
            hit = torch.rand(scales.shape, generator=g) < 0.02
            some = torch.randint(0, 200, scales.shape, generator=g).to(scales.dtype)
            scales[hit] = some[hit]
            scales.view(-1)[7] = 255
            data.view(-1)[5::1777] = 0x7F
            w = replace(w, data=data, scales=(replace(w.scales[0], data=scales), *w.scales[1:]))
        w = w.to("cuda")
        dense = w.dequantize(torch.float32)
        plain = dense.isfinite().all(1)
        for m in (1, 5, 16):
            x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
            for first in (0, 31, 32, k - m):
                x.zero_()[:, first : first + m] = torch.eye(m, device="cuda")
                y = ng.linear(x, w, out_dtype=torch.float32)
                assert torch.equal(y[:, plain], dense[plain, first : first + m].T), (n, m, first)
            x = torch.randn(m, k, generator=g).cuda().bfloat16()
            y, want = ng.linear(x, w, out_dtype=torch.float32), x.double() @ dense.double().T
            size = x.double().abs() @ dense.double().abs().T
            assert torch.equal(y.isfinite(), want.isfinite())
            assert ((y - want).abs() <= 2e-6 * size)[:, plain].all(), (n, m)
            assert all(torch.equal(ng.linear(x, w, out_dtype=torch.float32)[:, plain], y[:, plain]) for _ in range(3))
