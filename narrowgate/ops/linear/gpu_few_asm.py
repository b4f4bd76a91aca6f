"""The assembly of one unit of k of `few_kernel`: codes placed, multiplied, scaled; a text for every format, built once.

An operand of the tensor cores has no order of k but the one that x is read in. So lane (g, t) gives them, of each of its rows, the t-th
quarter of the unit's bytes, four codes a word at a time, and of x the values that stand beside them."""

from __future__ import annotations

from functools import cache

from narrowgate.ops.linear.gpu_place import SMALL, lift, place, place_halves, special
from narrowgate.packing.planes import PARTS, planes

OR_NOT_OR = hex((0xF0 | ~0xCC | 0xAA) & 0xFF)  # a | ~b | c
SCALES = ("", "float8_e8m0fnu", "float16", "bfloat16", "float32", "float8_e4m3fn")


def _factor(element: str, code: str, into: str) -> str:
    """float32 `into` of the stored scale `code`; E8M0's 255 comes out as infinity."""
    if element == "float8_e8m0fnu":  # 0 is 2^-127, a subnormal
        return f"shl.b32 t, {code}, 23; max.u32 t, t, 0x400000; mov.b32 {into}, t;"
    if element == "bfloat16":
        return f"shl.b32 t, {code}, 16; mov.b32 {into}, t;"
    if element == "float32":
        return f"mov.b32 {into}, {code};"
    if element == "float16":
        return f"cvt.u16.u32 w, {code}; cvt.f32.f16 {into}, w;"
    return f"cvt.u16.u32 w, {code}; cvt.rn.f16x2.e4m3x2 t, w; cvt.u16.u32 w, t; cvt.f32.f16 {into}, w;"


def _no_number(codes: list[str], into: str) -> str:
    """NaN `into` where one of the E8M0 codes is 255."""
    steps = f"mov.b32 t, {codes[0]};" + "".join(f"max.u32 t, t, {code};" for code in codes[1:])
    return steps + f"setp.eq.u32 p, t, 255; @p mov.f32 {into}, 0f7fc00000;"


@cache
def unit_asm(element: str, bits: int, part: int, group: int, scale: str, columns: int, kind: str) -> tuple[str, str]:
    """(assembly, constraints) of one unit: sums += scales * (codes x).

    Operands: 4 `columns` sums out; then in: the sums; codes, for rows g and g + 8, of each plane, in 8-byte (part = 16: 4-byte)
    pieces; x, for each part and 8 columns, in 8-byte pieces; the scales, for each block of the unit, of rows g and g + 8.
    group: values under one scale within a unit (0: none, sums stay unscaled).
    """
    parts, layers = PARTS[bits], planes(bits)
    halves = element in SMALL and element != "float8_e5m2"  # whose infinities and NaNs are told apart, value by value
    words = part // 16  # of four codes, a lane, part and row
    pieces = max(words // 2, 1)
    number = 4 * columns

    def take(count: int) -> list[str]:
        nonlocal number
        found = [f"${number + i}" for i in range(count)]
        number += count
        return found

    sums = take(4 * columns)
    codes = [[take(pieces) for _ in range(layers)] for _ in range(2)]
    x = [[take(words) for _ in range(columns)] for _ in range(parts)]
    blocks = parts * part // group if group else 0
    scales = [take(2) for _ in range(blocks)]
    body = [".reg .b32 t, u, a<2>, b<2>, n<2>; mov.b32 n0, 0; mov.b32 n1, 0; .reg .b16 w; .reg .pred p; .reg .f32 s<2>;"]
    body.append(f".reg .b32 q<{2 * layers * max(words, 1)}>, y<2>; .reg .f32 f<{4 * columns}>;")
    word = [[[f"q{(row * layers + layer) * words + i}" for i in range(words)] for layer in range(layers)] for row in range(2)]
    for row in range(2):
        for layer in range(layers):
            regs = word[row][layer]
            if words == 1:
                body.append(f"mov.b32 {regs[0]}, {codes[row][layer][0]};")
            for i in range(0, words - 1, 2):
                body.append(f"mov.b64 {{{regs[i]}, {regs[i + 1]}}}, {codes[row][layer][i // 2]};")
    into = [f"f{i}" for i in range(4 * columns)] if group else [f"${i}" for i in range(4 * columns)]
    if not group:
        body += [f"mov.f32 {into[i]}, {sums[i]};" for i in range(4 * columns)]
    number_of = {"bf16": "bf16.bf16", "f16": "f16.f16"}[kind]
    for p in range(parts):
        if group and p * part % group == 0:
            body += [f"mov.f32 {f}, 0f00000000;" for f in into]
        for i in range(words):
            nan = ""  # E4M3: one code that is no number is enough for the sums of its row, whatever x is
            for row, name in enumerate("ab"):
                own = word[row][p if layers == 3 and p < 3 else 0][i]
                if element == "float8_e4m3fn":
                    body.append(f"and.b32 t, {own}, 0x7f7f7f7f; add.u32 t, t, 0x01010101;")
                    body.append(f"lop3.b32 n{row}, t, 0x80808080, n{row}, 0xea;")
                    if (p, i) == (parts - 1, words - 1):
                        nan += f"setp.ne.u32 p, n{row}, 0; @p mov.b32 {name}0, 0x7fff7fff;"
                text = (place_halves if halves else place)(element, p, kind)
                for number_, register in enumerate((f"{name}0", f"{name}1", own, *(w[i] for w in word[row][1:]))):
                    text = text.replace(f"${number_}", register)
                body.append(text)
            body.append(nan)
            for c in range(columns):
                d = ", ".join(into[4 * c : 4 * c + 4])
                body.append(f"mov.b64 {{y0, y1}}, {x[p][c][i]};")
                if halves:
                    body.append("prmt.b32 t, y0, y1, 0x5410; prmt.b32 y1, y0, y1, 0x7632; mov.b32 y0, t;")
                body.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{number_of}.f32 {{{d}}}, {{a0, b0, a1, b1}}, {{y0, y1}}, {{{d}}};"
                )
        if group and (p + 1) * part % group == 0:
            block = p * part // group
            for row in range(2):
                body.append(_factor(scale, scales[block][row], f"s{row}"))
                if scale == "float8_e8m0fnu" and block == blocks - 1:
                    body.append(_no_number([pair[row] for pair in scales], f"s{row}"))
            for n in range(4 * columns):
                body.append(f"fma.rn.f32 ${n}, f{n}, s{n % 4 // 2}, {sums[n] if block == 0 else f'${n}'};")
    wide = "l" if words > 1 else "r"
    constraints = ["=&f"] * (4 * columns) + ["f"] * (4 * columns) + [wide] * (2 * layers * pieces)
    constraints += ["l"] * (parts * columns * words) + ["r"] * (2 * blocks)
    return "{ " + " ".join(body) + " }", ",".join(constraints)


FOLDED = 32  # rows of a program whose scales are multiplied into the values


def folds(element: str, scale: str, group: int, rows: int, n: int, kind: str) -> bool:
    """Whether `folded_asm` serves: values times their scales are bfloat16 values, and the scales of four rows one word."""
    return (
        element in SMALL and scale == "float8_e8m0fnu" and group > 0 and kind == "bf16" and rows == FOLDED and n % FOLDED == 0
    )


@cache
def folded_asm(element: str, bits: int, part: int, group: int, columns: int) -> tuple[str, str]:
    """(assembly, constraints) of one unit of 32 rows: sums += (scales codes) x, with products of one power of two.

    As `unit_asm` for both tiles, but with one word for a block: the scales of the lane's four rows. The power of two that lifts a
    code is multiplied by the scale beforehand, so that nothing more is to be done for a value. A unit whose scales are not all from
    2^-95 to 1, or that has a code that is no number, takes the other path, where sums are scaled: all 32 lanes together.
    """
    parts, layers = PARTS[bits], planes(bits)
    words = part // 16
    pieces = max(words // 2, 1)
    blocks = parts * part // group
    many = 8 * columns
    numbers = iter(range(many, 10**6))

    def take(count: int) -> list[str]:
        return [f"${next(numbers)}" for _ in range(count)]

    sums = take(many)
    codes = [[[take(pieces) for _ in range(layers)] for _ in range(2)] for _ in range(2)]
    x = [[take(words) for _ in range(columns)] for _ in range(parts)]
    scales = take(blocks)
    body = [f".reg .b32 t, u, a<2>, b<2>, y<2>, z<2>, q<{4 * layers * words}>, m<{4 * blocks}>; .reg .b16 w; .reg .pred p;"]
    body.append(f".reg .f32 s<2>, f<{many}>;")
    word = [[[[f"q{((2 * tile + row) * layers + layer) * words + i}" for i in range(words)] for layer in range(layers)]
             for row in range(2)] for tile in range(2)]  # fmt: skip
    for tile in range(2):
        for row in range(2):
            for layer in range(layers):
                regs, given = word[tile][row][layer], codes[tile][row][layer]
                if words == 1:
                    body.append(f"mov.b32 {regs[0]}, {given[0]};")
                for i in range(0, words - 1, 2):
                    body.append(f"mov.b64 {{{regs[i]}, {regs[i + 1]}}}, {given[i // 2]};")
    body += [f"mov.f32 ${i}, {sums[i]};" for i in range(many)]
    body.append("mov.b32 u, 0;")
    for scale in scales:
        body.append(f"add.u32 t, {scale}, 0x60606060; lop3.b32 u, {scale}, t, u, {OR_NOT_OR};")
    first = special(element)
    if first is not None:
        for register in (r for tile in word for row in tile for layer in row for r in layer):
            body.append(f"and.b32 t, {register}, 0x7f7f7f7f; add.u32 t, t, {hex((0x80 - first) * 0x01010101)}; or.b32 u, u, t;")
    body.append("and.b32 u, u, 0x80808080; setp.ne.u32 p, u, 0; vote.sync.any.pred p, p, 0xffffffff; @p bra ASIDE;")
    for block, scale in enumerate(scales):
        for i in range(4):
            body.append(f"prmt.b32 t, {scale}, 0, {hex(0x4040 | i << 8 | i)};")
            body.append(f"mad.lo.u32 m{4 * block + i}, t, 0x80, {hex(lift(element, 'bf16') * 0x00800080)};")

    def mma(into: list[str], c: int, y: str) -> str:
        d = ", ".join(into[4 * c : 4 * c + 4])
        return f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{d}}}, {{a0, b0, a1, b1}}, {{{y}0, {y}1}}, {{{d}}};"

    def placed(tile: int, p: int, i: int, factor: bool) -> None:
        for row, name in enumerate("ab"):
            own = word[tile][row]
            mine = own[p if layers == 3 and p < 3 else 0][i]
            by = f"m{4 * (p * part // group) + 2 * tile + row}"
            text = place_halves(element, p, "bf16", by) if factor else place(element, p, "bf16")
            for number, register in enumerate((f"{name}0", f"{name}1", mine, *(layer[i] for layer in own[1:]))):
                text = text.replace(f"${number}", register)
            body.append(text)

    body += [f"mov.f32 f{n}, 0f00000000;" for n in range(many)]  # the tensor cores cut sums off: only a unit is left to them
    for i in range(words):
        for p in range(parts):
            for tile in range(2):
                placed(tile, p, i, True)
                for c in range(columns):
                    body.append(f"mov.b64 {{y0, y1}}, {x[p][c][i]}; prmt.b32 z0, y0, y1, 0x5410; prmt.b32 z1, y0, y1, 0x7632;")
                    body.append(mma([f"f{4 * columns * tile + n}" for n in range(4 * columns)], c, "z"))
    body += [f"add.rn.f32 ${n}, ${n}, f{n};" for n in range(many)]
    body.append("bra DONE; ASIDE:")
    into = [f"f{n}" for n in range(4 * columns)]
    for tile in range(2):
        for p in range(parts):
            if p * part % group == 0:
                body += [f"mov.f32 {f}, 0f00000000;" for f in into]
            for i in range(words):
                placed(tile, p, i, False)
                for c in range(columns):
                    body.append(f"mov.b64 {{y0, y1}}, {x[p][c][i]};" + mma(into, c, "y"))
            if (p + 1) * part % group == 0:
                for row in range(2):
                    body.append(f"bfe.u32 u, {scales[p * part // group]}, {8 * (2 * tile + row)}, 8;")
                    body.append(_factor("float8_e8m0fnu", "u", f"s{row}") + _no_number(["u"], f"s{row}"))
                for n in range(4 * columns):
                    body.append(f"fma.rn.f32 ${4 * columns * tile + n}, f{n}, s{n % 4 // 2}, ${4 * columns * tile + n};")
    body.append("DONE:")
    wide = "l" if words > 1 else "r"
    constraints = ["=&f"] * many + ["f"] * many + [wide] * (4 * layers * pieces) + ["l"] * (parts * columns * words)
    return "{ " + " ".join(body) + " }", ",".join(constraints + ["r"] * blocks)


def row_asm(scale: str) -> str:
    """Assembly: $0 float32 of the stored scale $1."""
    if not scale:
        return ""
    steps = _factor(scale, "$1", "$0") + (_no_number(["$1"], "$0") if scale == "float8_e8m0fnu" else "")
    return "{ .reg .b32 t; .reg .b16 w; .reg .pred p; " + steps + " }"
