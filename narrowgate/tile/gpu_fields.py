"""Where a code lies, on the device: the layouts of narrowgate.packing as address arithmetic, in int64.

`field` reads one code at (row, column), whatever the layout; neighbours share their words in the cache. `line` reads the codes
of whole lines by the word where a layout packs several codes into one: 32-bit words of 2- and 4-bit fields, three bytes or
three words of 6-bit fields. Fields of 8, 16 and 32 bits are machine units in every layout, so lines of those are plain runs.
Rows are the leading axes taken together. Codes come back as uint32 with nothing above the field."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl


@triton.jit
def unit(data, at, BITS: tl.constexpr, mask):
    """The machine unit of BITS bits (8, 16, 32) number `at` of a buffer of any integers; the host is little-endian."""
    if BITS == 8:
        at = data.to(tl.pointer_type(tl.uint8)) + at
    elif BITS == 16:
        at = data.to(tl.pointer_type(tl.uint16)) + at
    else:
        at = data.to(tl.pointer_type(tl.uint32)) + at
    if mask is None:
        return tl.load(at).to(tl.uint32)
    else:
        return tl.load(at, mask=mask, other=0).to(tl.uint32)


@triton.jit
def swizzled(row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Byte offset in swizzle_128x4@1 of a stack of [ROWS, COLS] matrices (SPEC B17)."""
    TILES: tl.constexpr = (COLS + 3) // 4
    SIZE: tl.constexpr = (ROWS + 127) // 128 * 128 * TILES * 4
    matrix, r = row // ROWS, row % ROWS
    line = ((r // 128) * TILES + col // 4) * 32 + r % 32
    return matrix * SIZE + (line * 4 + r % 128 // 32) * 4 + col % 4


@triton.jit
def lane16(row, index, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Offset in lanes16@1 and lanes16_units@1 of unit `index` of a row, UNITS being those of a whole row."""
    TILES: tl.constexpr = (ROWS + 15) // 16
    matrix, r = row // ROWS, row % ROWS
    return ((matrix * TILES + r // 16) * UNITS + index) * 16 + r % 16


@triton.jit
def in_planes(data, row, col, J: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, mask):
    """The code at (row, col) in parts of J values (packing/planes.py)."""
    PARTS: tl.constexpr = 1 if BITS == 8 else 2 if BITS == 4 else 4
    PLANES: tl.constexpr = 3 if BITS == 6 else 1
    UNITS: tl.constexpr = (COLS + PARTS * J - 1) // (PARTS * J)
    part = col // J % PARTS
    at = ((row // ROWS * UNITS + col // (PARTS * J)) * (PLANES * ROWS) + row % ROWS) * J + col % J
    if BITS == 6:
        last = part == 3
        own = unit(data, at + tl.where(last, 0, part).to(tl.int64) * (ROWS * J), 8, mask)
        second, third = unit(data, at + ROWS * J, 8, mask & last), unit(data, at + 2 * ROWS * J, 8, mask & last)
        return tl.where(last, (own >> 6) | ((second >> 6) << 2) | ((third >> 6) << 4), own & 63)
    else:
        return (unit(data, at, 8, mask) >> (part * BITS).to(tl.uint32)) & (2**BITS - 1)


@triton.jit
def field(data, row, col, LAYOUT: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, mask):
    """The code at (row, col) of matrices [ROWS, COLS]; `row` int64, in 0.. wherever `mask` holds."""
    FIELD: tl.constexpr = 2**BITS - 1
    if LAYOUT == "swizzle_128x4@1":
        return unit(data, swizzled(row, col, ROWS, COLS), 8, mask)
    elif LAYOUT == "lanes16_units@1":
        return unit(data, lane16(row, col, ROWS, COLS), BITS, mask)
    elif LAYOUT == "lanes16@1" and BITS == 6:
        TRIPLES: tl.constexpr = (COLS + 15) // 16 * 3
        bit = col % 16 * 6
        word = col // 16 * 3 + bit // 32
        low = unit(data, lane16(row, word, ROWS, TRIPLES), 32, mask).to(tl.uint64)
        high = unit(data, lane16(row, word + 1, ROWS, TRIPLES), 32, mask & (bit % 32 > 26)).to(tl.uint64)
        return ((low | (high << 32)) >> (bit % 32).to(tl.uint64)).to(tl.uint32) & FIELD
    elif LAYOUT == "lanes16@1":
        PER: tl.constexpr = 32 // BITS
        UNITS: tl.constexpr = (COLS + PER - 1) // PER
        word = unit(data, lane16(row, col // PER, ROWS, UNITS), 32, mask)
        return (word >> (col % PER * BITS).to(tl.uint32)) & FIELD
    elif LAYOUT == "columns@1":
        return unit(data, (row // ROWS * COLS + col) * ROWS + row % ROWS, BITS, mask)
    elif LAYOUT == "planes16@1" or LAYOUT == "planes32@1" or LAYOUT == "planes64@1":
        J: tl.constexpr = 16 if LAYOUT == "planes16@1" else 32 if LAYOUT == "planes32@1" else 64
        return in_planes(data, row, col, J, BITS, ROWS, COLS, mask)
    elif LAYOUT == "fp6_bytes@1":
        at = row * COLS + col
        byte = at // 4 * 3 + at % 4 // 2
        low, high = unit(data, byte, 8, mask), unit(data, byte + 1, 8, mask)
        return ((low | (high << 8)) >> (at % 2 * 6 + at % 4 // 2 * 4).to(tl.uint32)) & FIELD
    elif LAYOUT == "words@1" and BITS < 8:
        FLAT: tl.constexpr = 32 // BITS
        at = row * COLS + col
        return (unit(data, at // FLAT, 32, mask) >> (at % FLAT * BITS).to(tl.uint32)) & FIELD
    elif BITS < 8:  # bytes@1 and rows@1 give a code below 8 bits a byte of its own
        return unit(data, row * COLS + col, 8, mask) & FIELD
    else:
        return unit(data, row * COLS + col, BITS, mask)


@triton.jit
def line(
    data, row, col, LINE: tl.constexpr, LAYOUT: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ALIGNED: tl.constexpr, mask,
):  # fmt: skip
    """Codes [..., LINE] of the lines that begin at (row, col) [...], by the word where lines never straddle one.

    `mask` [...] is of whole lines where COLS % LINE == 0; else codes beyond a row's end are cut off here as well."""
    lane = tl.arange(0, LINE)
    if COLS % LINE == 0 and LAYOUT == "words@1" and (BITS == 2 or BITS == 4) and 32 // BITS >= LINE:
        PER: tl.constexpr = 32 // BITS
        at = row * COLS + col
        word = unit(data, at // PER, 32, mask)
        if LINE < PER:
            word = word >> (at % PER * BITS).to(tl.uint32)
        return (tl.expand_dims(word, -1) >> (lane * BITS).to(tl.uint32)) & (2**BITS - 1)
    elif COLS % LINE == 0 and LAYOUT == "fp6_bytes@1" and LINE == 4:
        byte = (row * COLS + col) // 4 * 3
        low, middle, high = unit(data, byte, 8, mask), unit(data, byte + 1, 8, mask), unit(data, byte + 2, 8, mask)
        return (tl.expand_dims(low | (middle << 8) | (high << 16), -1) >> (lane * 6).to(tl.uint32)) & 63
    elif COLS % LINE == 0 and LAYOUT == "fp6_bytes@1" and LINE == 16 and ALIGNED:
        at = (row * COLS + col) // 16 * 3
        w0, w1, w2 = unit(data, at, 32, mask), unit(data, at + 1, 32, mask), unit(data, at + 2, 32, mask)
        bit = lane * 6
        low = tl.where(bit < 32, tl.expand_dims(w0, -1), tl.where(bit < 64, tl.expand_dims(w1, -1), tl.expand_dims(w2, -1)))
        high = tl.where(bit < 32, tl.expand_dims(w1, -1), tl.expand_dims(w2, -1))
        over = (bit % 32 > 26) & (bit < 64)
        spill = tl.where(over, high << ((32 - bit % 32) % 32).to(tl.uint32), 0)
        return ((low >> (bit % 32).to(tl.uint32)) | spill) & 63
    else:
        at = tl.expand_dims(col, -1) + lane
        inside = tl.expand_dims(mask, -1) & (at < COLS)
        return field(data, tl.expand_dims(row, -1), at, LAYOUT, BITS, ROWS, COLS, inside)
