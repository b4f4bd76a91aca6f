"""narrowgate.tile: reads inside a kernel held to the readable reads, compiled kernels read for what they must not contain."""

import pytest
import torch
from gpu_scripts import run_script

import narrowgate as ng
from narrowgate.packing import Scale, pack

pytest.importorskip("triton")

KERNEL = """
    import torch, triton, triton.language as tl
    import narrowgate as ng
    from narrowgate import tile
    from narrowgate.packing import Scale, pack, read

    @triton.jit
    def lines(w, rows, cols, out, CHECKED: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
        row, col = tl.load(rows + tl.arange(0, R)), tl.load(cols + tl.arange(0, C))
        at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
        values = tile.read(w, row, col) if CHECKED else tile.read_unchecked(w, row, col)
        if w.width == 0:
            tl.store(out + at, values)
        else:
            tl.store(out + at[:, :, None] * w.width + tl.arange(0, w.width), values)

    @triton.jit
    def block(w, out, row0, col0, ROWS: tl.constexpr, COLS: tl.constexpr):
        values = tile.read_block(w, row0, col0, ROWS, COLS)
        tl.store(out + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :], values)

    def served(w, rows, cols, width=None, checked=True, **how):
        out = torch.full((len(rows), len(cols), width or 1), torch.nan)
        lines[(1,)](tile.arg(w, width=width, **how), rows, cols, out, CHECKED=checked, R=len(rows), C=len(cols))
        return out

    def row_scaled(bits, shape=(4, 64), step=37):
        count = torch.arange(shape[0] * shape[1]).view(shape)
        index = ((25743 if bits == 16 else step) * count + 3) % 2**bits
        s = (torch.arange(shape[0]) + 1) / 4
        scale = Scale.from_codes(s.view(torch.int32)[:, None], "float32", (1, shape[1]), "words@1")
        return pack(index, f"index{bits}", codebook=(torch.arange(2**bits) - 127.5) / 3, scales=(scale,))
"""
READS = """
    rows, cols = torch.tensor([2, 0, 3, 1]), lambda width: torch.arange(0, 64, width)
    for bits, width in [(8, 4), (4, 4), (2, 4), (4, 2), (16, 4), (8, 8), (4, 16)]:  # A16, A17
        w = row_scaled(bits)
        want = read(w, rows, cols(width), width=width)
        assert torch.equal(served(w, rows, cols(width), width), want), (bits, width)
        assert torch.equal(served(w, rows, cols(width), width, checked=False), want), (bits, width)
    for bits, width in [(8, 4), (2, 4), (16, 4), (4, 8), (2, 16)]:  # overhang, rows that start inside a word (A17, A45)
        w = row_scaled(bits, (5, 37))
        where = torch.tensor([4, -1, 0, 5]), torch.tensor([-width, 0, 36 // width * width, 40 // width * width + width])
        assert torch.equal(served(w, *where, width), read(w, *where, width=width)), (bits, width)
    v = torch.arange(4 * 64).view(4, 64) % 16 - 8  # a quarter of a word (A18)
    scale = Scale.from_codes(((torch.arange(4) + 1) / 4).view(torch.int32)[:, None], "float32", (1, 64))
    w = pack(v, "int4", scales=(scale,))
    assert torch.equal(served(w, rows, cols(2), 2), read(w, rows, cols(2), width=2))
    assert torch.equal(served(w, rows, torch.tensor([5, 63, 64, 1])), read(w, rows, torch.tensor([5, 63, 64, 1])))
    values = 1 + torch.arange(128).view(8, 16) * 2.0**-12  # staged (A19)
    w = pack(values.view(torch.int32), "float32")
    assert not torch.equal(values.half().float(), values)
    for stage in (None, torch.float16, torch.bfloat16):
        where = torch.tensor([7, 0]), torch.tensor([0, 4])
        assert torch.equal(served(w, *where, 4, stage=stage), read(w, *where, width=4, stage=stage)), stage
    for name in ("float4_e2m1fn", "float8_e4m3fn", "float6_e3m2fn"):  # three decoders (A9)
        bits = ng.formats.element(name).bits
        w = pack(torch.arange(2**bits).view(2, -1), name, layout="bytes@1" if bits == 6 else "words@1")
        where = torch.tensor([0, 1]), torch.arange(0, 8, 4)
        made = [served(w, *where, 4, decode=decode) for decode in ("auto", "table", "native", "placed")]
        want = read(w, *where, width=4)
        assert all(torch.equal(m.view(torch.int32), want.view(torch.int32)) for m in made), name
"""
BLOCKS = """
    from narrowgate.packing import decode, layouts
    g = torch.Generator().manual_seed(4)
    for scheme in ("nvfp4", "mxfp6_e2m3", "q4_0", "int4_g32", "mxfp8_e5m2", "iq4_nl"):
        w = ng.quantize(torch.randn(5, 96, generator=g), scheme)
        want = torch.zeros(8, 128)
        want[:5, :96] = decode(w)
        out = torch.empty(8, 128)
        block[(1,)](tile.arg(w), out, 0, 0, ROWS=8, COLS=128)
        assert torch.equal(out, want), scheme
        block[(1,)](tile.arg(w), out, 1, 64, ROWS=4, COLS=32)
        assert torch.equal(out.view(-1)[:128].view(4, 32), want[1:5, 64:96]), scheme
    codes = torch.randint(0, 16, (2, 6, 40), generator=g)  # every layout, a stack, scales of several kinds and forms
    s = lambda shape: torch.rand(shape, generator=g) + 0.5
    f32 = lambda shape, block, where="rows@1": Scale.from_codes(s(shape).view(torch.int32), "float32", block, where)
    byte = lambda shape, block, where: Scale.from_codes(torch.randint(120, 130, shape, generator=g), "float8_e8m0fnu", block, where)
    scales = (byte((2, 6, 5), (1, 1, 8), "swizzle_128x4@1"), f32((2, 3, 1), (1, 2, 40), "words@1"), f32((1, 6, 1), (2, 1, 40)),
              byte((2, 6, 10), (1, 1, 4), "lanes16_units@1"), f32((2, 1, 2), (1, 6, 20)), byte((2, 6, 5), (1, 1, 8), "columns@1"))
    zero = Scale.from_codes(torch.randint(0, 9, (2, 6, 1), generator=g), "uint8", (1, 1, 40))
    for element, layout in [("uint4", "words@1"), ("uint4", "bytes@1"), ("uint4", "lanes16@1"), ("uint4", "rows@1"),
                            ("uint8", "words@1"), ("float6_e3m2fn", "fp6_bytes@1"),
                            ("float6_e3m2fn", "lanes16@1"), ("uint4", "planes16@1"), ("float6_e3m2fn", "planes16@1"),
                            ("uint2", "planes32@1"), ("uint8", "planes64@1"),
                            ("float16", "rows@1"), ("bfloat16", "words@1")]:
        w = pack(codes, element, layout=layout, scales=scales, zero_points=zero, offset=(f32((2, 6, 5), (1, 1, 8)), scales[2]))
        want = decode(w).view(12, 40)
        out = torch.empty(16, 64)
        block[(1,)](tile.arg(w), out, 0, 0, ROWS=16, COLS=64)
        assert torch.equal(out[:12, :40], want) and not out[12:].any() and not out[:, 40:].any(), (element, layout)
"""
COMPILED = """
    from narrowgate.ops import dequantize, embedding
    from narrowgate.packing import flatten
    from narrowgate.tile.gpu_arg import bind
    from narrowgate.tile.gpu_offline import compiling, inexact
    from narrowgate.tile.gpu_rows import decode_rows
    g = torch.Generator().manual_seed(0)
    offset = (Scale.from_codes(torch.rand(8, 8, generator=g).view(torch.int32), "float32", (1, 64)),)
    with compiling() as kernels:
        for scheme in ("int4_g128", "mxfp4", "nvfp4", "mxfp6_e3m2", "mxfp8_e4m3", "nf4_g64", "q4_0", "bf16"):
            w = ng.quantize(torch.randn(8, 512, generator=g), scheme)
            decode_rows(bind(*flatten(w)), torch.empty(8, 512, dtype=torch.bfloat16))
        codes = torch.randint(0, 256, (8, 512), generator=g)
        w = pack(codes, "int8", scales=offset, offset=offset)
        decode_rows(bind(*flatten(w)), torch.empty(3, 512), torch.tensor([3, 1, 7]))
        block[(1,)](tile.arg(w), torch.empty(8, 64), 0, 0, ROWS=8, COLS=64, enable_fp_fusion=True)  # a user's own launch
        lines[(1,)](tile.arg(w, width=16), torch.arange(4), torch.arange(4), torch.empty(4, 4, 16), CHECKED=True, R=4, C=4)
    assert len(kernels) == 11 and not any(inexact(k) for k in kernels), [inexact(k) for k in kernels]
    ptx = [k.asm["ptx"] for k in kernels]
    assert all("add.rn.f32" in p for p in ptx[8:]) and "mul.wide" in ptx[0] or "mul.lo.s64" in ptx[0] or "mad" in ptx[0]
    words = [line for line in ptx[0].splitlines() if "ld.global" in line]
    assert len(words) <= 10, words  # int4_g128: a word is loaded once, not once a value
"""


@pytest.mark.spec("A3", "A5", "A9", "A16", "A17", "A18", "A19", "A45")
def test_reads_in_a_kernel(tmp_path):
    run_script(tmp_path, KERNEL, READS, interpret=True)


@pytest.mark.spec("A6", "A14", "B10", "B17")
def test_blocks_of_every_layout(tmp_path):
    run_script(tmp_path, KERNEL, BLOCKS, interpret=True)


def test_compiled_reads_fuse_nothing(tmp_path):
    run_script(tmp_path, KERNEL, COMPILED, interpret=False)


@pytest.mark.spec("A27", "A38", "A41")
def test_refused_at_the_call():
    from narrowgate import tile

    v = torch.arange(64).view(2, 32)
    scaled = pack(v, "int8", scales=(Scale.from_codes(torch.ones(2, 8).view(torch.int32), "float32", (1, 4)),))
    assert tile.arg(scaled, width=4).line.value == 4
    for make, message in (
        (lambda: tile.arg(scaled, width=8), "scale blocks must cover whole lines"),
        (lambda: tile.arg(scaled, width=3), "a width that is a power of two"),
        (lambda: tile.arg(pack(v, "int8"), stage=torch.float64), "expected stage"),
        (lambda: tile.arg(pack(v, "int8"), decode="fast"), "expected decode"),
        (lambda: tile.arg(pack(v, "float16"), decode="table"), "at most 8 bits"),
        (lambda: tile.arg(v), "expected a PackedTensor, got Tensor"),
        (lambda: ng.packing.PackedTensor("int4", "words@1", v.to(torch.uint8), (2, 32)), "bound at the 32-bit words"),
        (lambda: pack(v, "int8", scales=(Scale.from_codes(torch.ones(2, 32, 1, dtype=torch.int32), "float32", (1, 1, 1)),)),
         "spans no other axis"),
    ):  # fmt: skip
        with pytest.raises(ng.InputError, match=message):
            make()
