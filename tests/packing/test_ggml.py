"""ggml blocks against the gguf package's decoder, golden blocks, and the nibble order that others got wrong."""

import numpy as np
import pytest
import torch

from narrowgate.errors import InputError
from narrowgate.packing import decode, from_ggml_blocks, pack, same_bits, to_ggml_blocks
from narrowgate.packing.ggml import BLOCK_BYTES

gguf = pytest.importorskip("gguf")
TYPES = {"q8_0": "Q8_0", "q4_0": "Q4_0", "iq4_nl": "IQ4_NL", "mxfp4": "MXFP4"}


def random_blocks(scheme, count, seed=0):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCK_BYTES[scheme]), dtype=np.uint8)
    if scheme == "mxfp4":
        blocks[:, 0] = np.arange(count) % 255  # every scale byte but 255
    else:
        d = rng.standard_normal(count).astype(np.float16)
        d[:4] = [0.0, -0.0, 6e-8, 65504]
        blocks[:, :2] = d.view(np.uint8).reshape(count, 2)
    return blocks


def theirs(blocks, scheme):
    return gguf.quants.dequantize(blocks, getattr(gguf.GGMLQuantizationType, TYPES[scheme]))


@pytest.mark.parametrize("scheme", TYPES)
def test_blocks_decode_as_gguf_says(scheme):
    blocks = random_blocks(scheme, 510)
    w = from_ggml_blocks(torch.from_numpy(blocks), scheme, (510, 32))
    assert w.scheme == scheme
    got, want = decode(w).numpy(), theirs(blocks, scheme)
    assert np.array_equal(got, want)
    differ = got.view(np.uint32) != want.view(np.uint32)
    if scheme == "mxfp4":  # gguf reads code 8 as +0; E2M1 says -0
        assert np.array_equal(differ, w.codes().numpy() == 8)
    else:
        assert not differ.any()


@pytest.mark.parametrize("scheme", TYPES)
@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 3, 96), (0, 32)])
def test_blocks_round_trip(scheme, shape):
    count = torch.Size(shape).numel() // 32
    blocks = torch.from_numpy(random_blocks(scheme, max(count, 4))[:count])
    w = from_ggml_blocks(blocks, scheme, shape)
    back = to_ggml_blocks(w)
    assert tuple(back.shape) == (*shape[:-1], shape[-1] // 32 * BLOCK_BYTES[scheme])
    assert torch.equal(back.reshape(blocks.shape), blocks)
    assert same_bits(from_ggml_blocks(back, scheme, shape), w)


@pytest.mark.spec("F23")
def test_split_halves_not_neighbours():
    """F23: qs[j] = j | (15 - j) << 4 holds element j = lut[j] and element j + 16 = lut[15 - j]."""
    block = torch.tensor([127] + [j | (15 - j) << 4 for j in range(16)], dtype=torch.uint8)
    w = from_ggml_blocks(block, "mxfp4", (1, 32))
    lut = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert decode(w)[0].tolist() == lut + lut[::-1]
    pairs = torch.stack([block[1:] & 15, block[1:] >> 4], -1).reshape(1, 32)  # the rival
    assert not torch.equal(w.codes(), pairs)


@pytest.mark.spec("C17")
def test_golden_q8_0_and_a_nan_scale():
    """C17: d = 1 and q_j = 3j - 50 is exact; a NaN d makes all 32 values NaN in bfloat16, those with q = 0 too."""
    q = 3 * np.arange(32) - 50
    body = q.astype(np.int8).view(np.uint8)
    one = np.concatenate([np.array([0x00, 0x3C], np.uint8), body])
    nan = np.concatenate([np.array([0x00, 0x7E], np.uint8), np.where(np.arange(32) < 5, 0, body).astype(np.uint8)])
    w = from_ggml_blocks(torch.from_numpy(np.stack([one, nan])), "q8_0", (2, 32))
    got = decode(w).bfloat16()
    assert got[0].tolist() == q.tolist()
    assert got[1].isnan().all()
    zeroed = torch.nan_to_num(got[1])  # rival: a NaN scale read as 0
    assert not zeroed.isnan().any()


def test_mxfp4_scale_byte_255_is_nan():
    """gguf reads byte 255 as 2^128; E8M0 says NaN, and a block that says NaN stays visible."""
    block = torch.tensor([255] + [0x11] * 16, dtype=torch.uint8)
    assert decode(from_ggml_blocks(block, "mxfp4", (1, 32))).isnan().all()


def test_refusals():
    blocks = torch.zeros(34, dtype=torch.uint8)
    for call, text in (
        (lambda: from_ggml_blocks(blocks, "q5_0", (1, 32)), "expected one of q8_0, q4_0, iq4_nl, mxfp4, got 'q5_0'"),
        (lambda: from_ggml_blocks(blocks, "q8_0", (1, 33)), "need K divisible by 32, got 33"),
        (lambda: from_ggml_blocks(blocks[:-1], "q8_0", (1, 32)), "expected 34 uint8 bytes"),
        (lambda: from_ggml_blocks(blocks.char(), "q8_0", (1, 32)), "expected 34 uint8 bytes"),
        (lambda: to_ggml_blocks(pack(torch.zeros(1, 32, dtype=torch.uint8), "int4")), "got int4"),
    ):
        with pytest.raises(InputError, match=text):
            call()
