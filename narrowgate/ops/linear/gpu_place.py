"""Codes to tensor-core operands: bits are placed, never converted (SPEC A9, A11).

One line of assembly takes four bytes of a `planes` layout and gives the four values of one part in bfloat16 or float16, exactly.
* Integers go into the mantissa under a fixed exponent, whose value one packed subtraction takes away again.
* Small floats are shifted under the operand's own exponent and lifted by one packed product with a power of two. Subnormal codes
  are subnormal there too, which the arithmetic keeps. Codes that are no number (E4M3's NaN, E5M2's top exponent) get an exponent
  of ones.
Between 1.4 instructions a value (int4) and 4.3 (E4M3, a third of it for its NaN). Every step is exact: that is why scales may
meet the float32 sums. The strings are built here, once a format; under the interpreter `gpu_packed` decodes with tile.gpu_decode."""

from __future__ import annotations

from functools import cache

_EXPONENT = {"bf16": 8, "f16": 5}  # bits
_MANTISSA = {"bf16": 7, "f16": 10}
SMALL = {  # exponent bits, mantissa bits, bias, smallest magnitude that is no plain number
    "float4_e2m1fn": (2, 1, 1, None), "float6_e2m3fn": (2, 3, 1, None), "float6_e3m2fn": (3, 2, 3, None),
    "float8_e4m3fn": (4, 3, 7, 0x7F), "float8_e5m2": (5, 2, 15, 0x7C),
}  # fmt: skip
_INTEGERS = {"int2": (2, True), "int4": (4, True), "int8": (8, True), "uint2": (2, False), "uint4": (4, False)}


def _lut(rule: str) -> str:
    """The look-up byte of lop3 for a rule in a, b, c."""
    return hex(eval(rule, {"a": 0xF0, "b": 0xCC, "c": 0xAA}) & 0xFF)


_AND_OR, _AND_XOR = _lut("(a & b) | c"), _lut("(a & b) ^ c")


def _power(exponent: int, kind: str) -> int:
    """The bits of 2^exponent."""
    return (exponent + 2 ** (_EXPONENT[kind] - 1) - 1) << _MANTISSA[kind]


def _twice(half: int) -> str:
    return hex(half << 16 | half)


def _four(byte: int) -> str:
    return hex(byte * 0x01010101)


@cache
def place(element: str, part: int, kind: str, zero_point: bool = False) -> str:
    """Assembly: $2 four bytes (of plane 0; $3, $4 of planes 1 and 2 for the last part of 6 bits), $0 and $1 two values each.

    kind: "bf16" or "f16". With `zero_point` an unsigned integer stays 2^7 (2^10) too large, for the caller to subtract.
    """
    body = _integer(element, part, kind, zero_point) if element in _INTEGERS else _small(element, part, kind)
    return "{ .reg .b32 t, u, h, g; .reg .pred p; " + body + " }"


def _integer(element: str, part: int, kind: str, zero_point: bool) -> str:
    bits, signed = _INTEGERS[element]
    top = _power(_MANTISSA[kind], kind)  # one unit of the mantissa is 1
    high = top >> 8
    if bits == 8 and kind == "bf16":  # seven bits fit: v = (128 + low seven) - (128 or, if negative, 256)
        steps = []
        for i, selector in enumerate(("0x4140", "0x4342")):
            steps.append(f"prmt.b32 h, $2, {_four(high)}, {selector}; and.b32 g, h, 0xff80ff80; and.b32 h, h, 0xff7fff7f;")
            steps.append(f"sub.bf16x2 ${i}, h, g;")
        return " ".join(steps)
    half = 1 << (bits - 1) if signed else 0
    offset = top if zero_point else top | half
    mask = (1 << bits) - 1
    steps = [f"shr.b32 t, $2, {bits * part};" if part else "mov.b32 t, $2;"]
    steps.append(f"lop3.b32 t, t, {_four(mask)}, {_four(half)}, {_AND_XOR};")
    for i, selector in enumerate(("0x4140", "0x4342")):
        if zero_point:
            steps.append(f"prmt.b32 ${i}, t, {_four(high)}, {selector};")
        else:
            steps.append(f"prmt.b32 h, t, {_four(high)}, {selector}; sub.{kind}x2 ${i}, h, {_register(offset)};")
    return _constants(steps)


def _register(half: int) -> str:
    return f"%{_twice(half)}%"


def _constants(steps: list[str]) -> str:
    """Immediates that a packed instruction does not take, moved into a register (hoisted out of loops by the assembler)."""
    text = " ".join(steps)
    found = sorted({piece for i, piece in enumerate(text.split("%")) if i % 2})
    moves = ""
    for i, value in enumerate(found):
        text = text.replace(f"%{value}%", f"c{i}")
        moves += f".reg .b32 c{i}; mov.b32 c{i}, {value}; "
    return moves + text


def _small(element: str, part: int, kind: str) -> str:
    exponent, mantissa, bias, special = SMALL[element]
    bits = 1 + exponent + mantissa
    shift = _EXPONENT[kind] - exponent
    field = ((1 << (exponent + mantissa)) - 1) << (_MANTISSA[kind] - mantissa)
    steps = _left_aligned(bits, part)
    lift = 2 ** (_EXPONENT[kind] - 1) - 1 - bias
    if special is not None:
        steps.append("and.b32 u, t, 0x7f7f7f7f;")
        steps.append(f"add.u32 u, u, {_four(0x80 - special)}; and.b32 u, u, 0x80808080; setp.ne.b32 p, u, 0;")
    ones = ((1 << _EXPONENT[kind]) - 1) << _MANTISSA[kind]
    for i, (selector, replicate) in enumerate((("0x1404", "0x9988"), ("0x3424", "0xbbaa"))):
        steps.append(f"prmt.b32 h, t, 0, {selector}; shr.b32 g, h, {shift}; and.b32 g, g, {_twice(field)};")
        steps.append(f"lop3.b32 h, h, 0x80008000, g, {_AND_OR};")
        result = f"mul.{kind}x2 ${i}, h, {_register(_power(lift, kind))};" if lift else f"mov.b32 ${i}, h;"
        steps.append(result)
        if special is not None:
            steps.append(f"@p prmt.b32 g, u, 0, {replicate}; @p lop3.b32 ${i}, g, {_twice(ones)}, ${i}, {_AND_OR};")
    return _constants(steps)


@cache
def place_halves(element: str, part: int, kind: str, factor: str = "") -> str:
    """`place` for small floats in another order: $0 the values of bytes 0 and 2, $1 those of bytes 1 and 3, $2 to $4 the planes.

    Nothing is moved between bytes: a shift brings the sign of both halves of a word to where it belongs, another one the fields.
    Left shifts need not run where masks do. Codes that are no number come out as if they were. `factor`: a register with a power
    of two twice, times `lift`, which every value is multiplied by.
    """
    exponent, mantissa, _, _ = SMALL[element]
    bits = 1 + exponent + mantissa
    word, low = "$2", bits * part if bits == 4 else 0
    steps = []
    if bits == 6 and part == 3:
        steps, word, low = _left_aligned(6, 3), "t", 2
    field = ((1 << (exponent + mantissa)) - 1) << (_MANTISSA[kind] - mantissa)
    by = factor or (_register(_power(lift(element, kind), kind)) if lift(element, kind) else "")
    for i in range(2):
        at = low + 8 * i  # the lowest bit of the code in its half of the word
        to = _MANTISSA[kind] - mantissa
        if kind == "bf16" and bits == 4:  # one product shifts by two distances
            if i:
                steps.append(f"shr.b32 g, {word}, 8;")
            steps.append(f"and.b32 h, {'g' if i else word}, {_twice(15 << low)};")
            steps.append(
                f"mul.lo.u32 h, h, {hex((1 << (12 - low)) + (1 << (to - low)))}; and.b32 h, h, {_twice(0x8000 | field)};"
            )
        else:
            steps.append(_moved("h", word, 15 - (at + bits - 1)))
            steps.append(_moved("g", word, to - at) + f"and.b32 g, g, {_twice(field)};")
            steps.append(f"lop3.b32 h, h, 0x80008000, g, {_AND_OR};")
        steps.append(f"mul.{kind}x2 ${i}, h, {by};" if by else f"mov.b32 ${i}, h;")
    return "{ .reg .b32 t, u, h, g; " + _constants(steps) + " }"


def lift(element: str, kind: str) -> int:
    """The exponent that values under the operand's own exponent lack."""
    return 2 ** (_EXPONENT[kind] - 1) - 1 - SMALL[element][2]


def special(element: str) -> int | None:
    """The smallest magnitude of a small float that is no plain number."""
    return SMALL[element][3]


def _moved(into: str, word: str, left: int) -> str:
    if not left:
        return f"mov.b32 {into}, {word};"
    return f"shl.b32 {into}, {word}, {left};" if left > 0 else f"shr.b32 {into}, {word}, {-left};"


def _left_aligned(bits: int, part: int) -> list[str]:
    """t: four codes, the sign of each on top of its byte. What stands below a code is masked away with the fields."""
    if bits == 8 or (bits == 4 and part):
        return ["mov.b32 t, $2;"]
    if bits == 4 or part < 3:
        return [f"shl.b32 t, $2, {8 - bits};"]
    return [
        "shr.b32 t, $2, 4; and.b32 t, t, 0x0c0c0c0c; shr.b32 u, $3, 2;"
        f"lop3.b32 t, u, 0x30303030, t, {_AND_OR}; lop3.b32 t, $4, 0xc0c0c0c0, t, {_AND_OR};"
    ]


@cache
def place_pairs(element: str, part: int) -> str:
    """Assembly, bfloat16 only, of pairs that tensor-core fragments want: $2 and $3 hold two bytes each (of plane 0; $4 to $7 of
    planes 1 and 2 for the last part of 6 bits), $0 and $1 get the two values of each.

    What shifts can do a multiplication does: shifts, masks and byte permutes share one unit of half the rate.
    """
    if element in _INTEGERS:
        body = "prmt.b32 w, $2, $3, 0x5410; " + _integer(element, part, "bf16", False).replace("$2", "w")
    else:
        body = _constants([_spread(element, part, i) for i in range(2)])
    return "{ .reg .b32 t, u, v, w, h, g; " + body + " }"


def _spread(element: str, part: int, i: int) -> str:
    """One pair of a small float: a byte in each half of u, sign and magnitude moved into place, then the lift."""
    exponent, mantissa, bias, special = SMALL[element]
    bits, low = 1 + exponent + mantissa, _MANTISSA["bf16"] - mantissa  # magnitudes end at bit `low`
    lift = f"mul.bf16x2 ${i}, t, {_register(_power(127 - bias, 'bf16'))};"
    last, at = bits == 6 and part == 3, part * 4 if bits == 4 else 0
    magnitude, sign = ((1 << (bits - 1)) - 1) << at, 1 << (at + bits - 1)
    if last:
        return _gathered(low, i) + lift
    text = f"prmt.b32 u, ${2 + i}, 0, 0x4140; "
    if low - at > 0 and bits + low <= 16 - bits:  # both copies of the code fit beside each other
        factor = (1 << (low - at)) + (1 << (16 - bits - at))
        text += f"and.b32 t, u, {_twice(magnitude | sign)}; mul.lo.u32 t, t, {hex(factor)}; "
        return text + f"and.b32 t, t, {_twice(0x8000 | (1 << (low + bits - 1)) - (1 << low))}; " + lift
    text += f"and.b32 t, u, {_twice(magnitude)}; mul.lo.u32 v, t, {hex(1 << (low - at))}; "
    if special is not None:  # a magnitude from there on overflows into bit 7, which then fills the exponent with ones
        text += f"add.u32 t, t, {_twice(0x80 - special)}; and.b32 t, t, 0x00800080; "
        text += f"mad.lo.u32 v, t, {hex((0x7F80 & ~(0x7F << low)) >> 7)}, v; "
    text += f"mul.lo.u32 u, u, {hex(0x8000 // sign)}; lop3.b32 t, u, 0x80008000, v, {_AND_OR}; "
    return text + lift


def _gathered(low: int, i: int) -> str:
    """t: the last part of a 6-bit pair, whose bits stand in bits 6 and 7 of three planes."""
    text = f"prmt.b32 u, ${2 + i}, 0, 0x4140; shr.u32 t, u, {6 - low}; and.b32 t, t, {_twice(3 << low)}; "
    text += f"prmt.b32 u, ${4 + i}, 0, 0x4140; "
    text += f"mul.lo.u32 u, u, {1 << (low - 4)}; lop3.b32 t, u, {_twice(12 << low)}, t, {_AND_OR}; "
    text += f"prmt.b32 u, ${6 + i}, 0, 0x4140; mul.lo.u32 v, u, {1 << (low - 2)}; lop3.b32 t, v, {_twice(16 << low)}, t, {_AND_OR}; "
    return text + f"mul.lo.u32 u, u, 256; lop3.b32 t, u, 0x80008000, t, {_AND_OR}; "
