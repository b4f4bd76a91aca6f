"""The catalogue says what the documented table says, and its codebooks are what they claim to be."""

import numpy as np
import pytest
import torch

from narrowgate.errors import InputError
from narrowgate.formats import codebook, element, scheme, schemes
from narrowgate.formats.codebooks import nearest_index

TABLE = {  # name: (element, block of a [3, 70] tensor's scales, scale elements, bits a value over a large tensor)
    "mxfp4": ("float4_e2m1fn", [(1, 32)], ["float8_e8m0fnu"], 4.25),
    "mxfp6_e2m3": ("float6_e2m3fn", [(1, 32)], ["float8_e8m0fnu"], 6.25),
    "mxfp6_e3m2": ("float6_e3m2fn", [(1, 32)], ["float8_e8m0fnu"], 6.25),
    "mxfp8_e4m3": ("float8_e4m3fn", [(1, 32)], ["float8_e8m0fnu"], 8.25),
    "mxfp8_e5m2": ("float8_e5m2", [(1, 32)], ["float8_e8m0fnu"], 8.25),
    "nvfp4": ("float4_e2m1fn", [(1, 16), (3, 70)], ["float8_e4m3fn", "float32"], 4.5),
    "int4_g32": ("int4", [(1, 32)], ["bfloat16"], 4.5),
    "int4_g64": ("int4", [(1, 64)], ["bfloat16"], 4.25),
    "int4_g128": ("int4", [(1, 128)], ["bfloat16"], 4.125),
    "int8_g32": ("int8", [(1, 32)], ["bfloat16"], 8.5),
    "int2_g32": ("int2", [(1, 32)], ["bfloat16"], 2.5),
    "int8_channel": ("int8", [(1, 70)], ["float32"], 8.0),
    "nf4_g64": ("index4", [(1, 64)], ["float32"], 4.5),
    "q8_0": ("int8", [(1, 32)], ["float16"], 8.5),
    "q4_0": ("uint4", [(1, 32)], ["float16"], 4.5),
    "iq4_nl": ("index4", [(1, 32)], ["float16"], 4.5),
    "bf16": ("bfloat16", [], [], 16.0),
}


def test_the_catalogue_is_the_table():
    assert tuple(TABLE) == schemes()
    for name, (values, blocks, scales, bits) in TABLE.items():
        record = scheme(name)
        assert record.name == name
        assert record.element == values
        assert [level.block((3, 70)) for level in record.scales] == blocks
        assert [level.element for level in record.scales] == scales
        assert record.bits_per_value((1 << 12, 1 << 14)) == pytest.approx(bits, abs=0.01)


def test_ranges_zero_points_and_rules():
    assert scheme("int4_g32").code_range == (-7, 7)
    assert scheme("int8_g32").code_range == (-127, 127)
    assert scheme("int2_g32").code_range == (-2, 1)
    assert scheme("q4_0").zero_point == 8
    assert scheme("mxfp4").scale_rules == ("rceil", "floor", "even", "mse")
    assert {scheme(n).k_multiple for n in ("q8_0", "q4_0", "iq4_nl")} == {32}
    assert scheme("nvfp4").layout == "words@1"
    assert scheme("mxfp6_e3m2").layout == "fp6_bytes@1"
    assert scheme(scheme("mxfp4")) is scheme("mxfp4")


def test_records_are_frozen_and_unknown_names_refused():
    with pytest.raises(AttributeError):
        scheme("mxfp4").element = "int4"
    with pytest.raises(InputError, match=r"expected one of mxfp4, .*, got 'mxfp5'"):
        scheme("mxfp5")
    with pytest.raises(InputError, match="expected one of nf4, iq4_nl"):
        codebook("fp4")


def test_codebooks():
    gguf = pytest.importorskip("gguf.quants")
    assert tuple(codebook("iq4_nl").tolist()) == tuple(map(float, gguf.IQ4_NL.kvalues))
    rounded = [-1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0, 0.0795803, 0.1609302,
               0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1]  # fmt: skip
    assert np.allclose(codebook("nf4").numpy(), rounded, rtol=0, atol=6e-8)
    assert element("index4").max_code == 15
    codebook("nf4")[3] = 9.0
    assert codebook("nf4")[3] != 9.0


@pytest.mark.parametrize("name", ["nf4", "iq4_nl"])
def test_nearest_entry_with_ties_to_the_lower_index(name):
    table = codebook(name).numpy().astype(np.float64)
    middles = ((table[:-1] + table[1:]) / 2).astype(np.float32)
    x = np.concatenate([table, middles, np.nextafter(middles, np.float32(9e9)), np.nextafter(middles, np.float32(-9e9)),
                        np.linspace(table[0] * 1.2, table[-1] * 1.2, 4001)]).astype(np.float32)  # fmt: skip
    distance = np.abs(x.astype(np.float64)[:, None] - table)
    want = distance.argmin(-1)  # argmin takes the first of equals: the lower index
    got = nearest_index(name, torch.from_numpy(x)).numpy()
    assert np.array_equal(got, want)
    if name == "iq4_nl":  # its middles are exact float32, so ties exist and the upper index is the visible rival
        tie = nearest_index(name, torch.from_numpy(middles)).numpy()
        assert np.array_equal(tie, np.arange(15))
