"""Small floats placed into float16 and lifted by a power of two give the table's values (SPEC A9, A11): what a kernel may do."""

import pytest
import torch

from narrowgate.formats import element


@pytest.mark.spec("A9")
@pytest.mark.parametrize(
    ("name", "shift", "lift"),
    [
        ("float4_e2m1fn", 9, 14),
        ("float6_e2m3fn", 7, 14),
        ("float6_e3m2fn", 8, 12),
        ("float8_e4m3fn", 7, 8),
        ("float8_e5m2", 8, 0),
    ],
)
def test_placed_equals_table(name, shift, lift):
    """Sign to bit 15, the rest so that the exponent's last bit is bit 10; the product with 2^lift is exact."""
    record = element(name)
    codes = torch.arange(2**record.bits, dtype=torch.int32)
    table = record.decode(codes)
    magnitude = codes & (2 ** (record.bits - 1) - 1)
    sign = codes >> (record.bits - 1)
    halves = ((sign << 15) | (magnitude << shift)).to(torch.int32).to(torch.int16).view(torch.float16)
    lifted = halves.float() * 2.0**lift
    number = table.isfinite()
    assert torch.equal(lifted[number].view(torch.int32), table[number].view(torch.int32))  # -0 too
    smallest = halves[1].float()
    if name != "float8_e5m2":
        assert float(smallest) < 2.0**-14  # a float16 subnormal before its lift: a device that flushes those must convert
        flushed = torch.where(halves.abs() < 2.0**-14, 0.0, halves.float()) * 2.0**lift
        assert not torch.equal(flushed[number], table[number])
    if name == "float4_e2m1fn":
        assert float(smallest) == 2.0**-15
