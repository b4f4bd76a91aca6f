"""q8_0 and q4_0 give the gguf package's own bytes; iq4_nl, for which it has a decoder alone, is held in test_quantizers."""

import numpy as np
import pytest
import torch

from narrowgate.errors import InputError
from narrowgate.packing import decode, to_ggml_blocks
from narrowgate.quantize import quantize

gguf = pytest.importorskip("gguf")


def samples():
    """Rows of 64: normal, uniform, heavy tails, exact ties, repeated and negative maxima, zeros of both signs, tiny, large."""
    rng = np.random.default_rng(0)
    rows = [
        *rng.standard_normal((200, 64)), *rng.uniform(-1, 1, (100, 64)), *rng.standard_t(1.5, (100, 64)),
        np.resize(np.arange(-127, 128) / 2, 64), np.resize([127, 0.5, 1.5, -2.5, -0.5], 64), np.resize([8, -8], 64),
        np.resize([-8, 8, 0.5, -0.5, 3.5], 64), np.zeros(64), np.full(64, -0.0), np.full(64, 3.0), np.full(64, -3.0),
        *(rng.standard_normal((4, 64)) * 1e-7), *(rng.standard_normal((4, 64)) * 1e-30), *(rng.standard_normal((4, 64)) * 1e4),
    ]  # fmt: skip
    return np.stack(rows).astype(np.float32)


@pytest.mark.parametrize(("name", "kind"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0")])
def test_bytes_are_gguf_s(name, kind):
    x = samples()
    theirs = gguf.quants.quantize(x, getattr(gguf.GGMLQuantizationType, kind))
    w = quantize(torch.from_numpy(x), name)
    assert np.array_equal(to_ggml_blocks(w).numpy(), theirs)
    want = gguf.quants.dequantize(theirs, getattr(gguf.GGMLQuantizationType, kind))
    assert np.array_equal(decode(w).numpy().view(np.uint32), want.view(np.uint32))


def test_rivals_are_visible():
    """Dividing by the stored float16 scale, as every other scheme does, or rounding to even, gives other codes here."""
    x = torch.from_numpy(samples())
    for name, shift in (("q8_0", 0), ("q4_0", 8)):
        w = quantize(x, name)
        s = w.scales[0].values(w.shape).repeat_interleave(32, 1)
        codes = w.codes().to(torch.int8).int() if name == "q8_0" else w.codes().int()
        usual = (x / torch.where(s == 0, 1.0, s)).round().int() + shift
        assert (usual.clamp(-127, 15 if shift else 127) != codes).any()


def test_blocks_so_small_that_the_reciprocal_overflows():
    """gguf casts inf and NaN to integers there, whose result depends on the machine; ours are zeros under a zero scale."""
    x = torch.full((1, 32), 2.0**-140)
    for name in ("q8_0", "q4_0", "iq4_nl"):
        w = quantize(x, name)
        assert decode(w).abs().max() == 0
        assert int(w.scales[0].codes(w.shape)) & 0x7FFF == 0


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "iq4_nl"])
def test_a_scale_that_float16_cannot_hold_is_refused(name):
    with pytest.raises(InputError, match=f"{name} stores its scale in float16, whose maximum 65504"):
        quantize(torch.full((1, 32), 1e8), name)


def test_iq4_nl_d_is_the_signed_maximum_over_minus_127():
    x = torch.zeros(2, 32)
    x[0, 4], x[0, 9] = -12.7, 11.3
    x[1, 4], x[1, 9] = 12.7, -12.7  # of two equal magnitudes the first gives the sign
    w = quantize(x, "iq4_nl")
    d = w.scales[0].values(w.shape)[:, 0]
    assert torch.equal(d, torch.tensor([12.7 / 127, -12.7 / 127]).half().float())
    assert w.codes()[0, [4, 9]].tolist() == [0, 15]
    assert w.codes()[1, [4, 9]].tolist() == [0, 15]
