"""The modules: weights that no cast can change, attention against torch's own, routing with ties, growing keys and values."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.nn import attention
from narrowgate.nn.attention import attend
from narrowgate.nn.batch import ragged, rotary_frequencies, rotate
from narrowgate.nn.linear import PackedEmbedding, PackedLinear
from narrowgate.nn.mlp import gated, route
from narrowgate.nn.state import DeltaState, KeyValues
from narrowgate.nn.weight import Weight


@pytest.mark.parametrize("scheme", ng.schemes())
def test_casting_a_module_changes_no_bit_of_a_packed_weight(scheme):
    w = ng.quantize(torch.randn(6, 64), scheme)
    layer = PackedLinear(Weight(w))
    x = torch.randn(3, 64)
    before = layer(x)
    for cast in (nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16), nn.Module.cpu):
        cast(layer)
    assert ng.same_bits(w, layer.weight())
    assert torch.equal(before, layer(x))
    assert layer.weight.nbytes == w.nbytes
    assert layer.weight.packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casting_a_module_changes_no_bit_of_a_dense_weight(dtype):
    w = torch.randn(5, 7).to(dtype)
    weight = Weight(w).half().double()
    assert weight().dtype == dtype
    assert torch.equal(weight(), w)
    assert weight.nbytes == w.nbytes
    assert not weight.packed
    assert [b.dtype.is_floating_point for b in weight.buffers()] == [False]


def test_a_plain_buffer_would_have_been_changed():
    plain = nn.Module()
    plain.register_buffer("w", torch.randn(5, 7))
    before = plain.w.clone()
    assert not torch.equal(plain.half().w.float(), before)


def test_moving_a_weight_moves_all_of_it():
    weight = Weight(ng.quantize(torch.randn(6, 64), "nvfp4")).to("meta")
    assert {t.device.type for t in weight().tensors()} == {"meta"}


def test_embedding_of_packed_and_dense_tables():
    table, ids = torch.randn(9, 32), torch.tensor([8, 0, 8, 3])
    packed = ng.quantize(table, "mxfp8_e4m3")
    assert torch.equal(PackedEmbedding(Weight(packed), torch.float32)(ids), packed.dequantize()[ids])
    assert torch.equal(PackedEmbedding(Weight(table.bfloat16()), torch.float32)(ids), table.bfloat16().float()[ids])


@pytest.mark.parametrize("scores", [1 << 24, 100, 1])
@pytest.mark.parametrize(("new", "past"), [(1, 0), (1, 9), (7, 0), (7, 5)])
def test_attention_equals_torch(new, past, scores, monkeypatch):
    monkeypatch.setattr(attention, "_SCORES", scores)
    heads, kv_heads, dim = 6, 2, 16
    q, k, v = torch.randn(new, heads, dim), torch.randn(past + new, kv_heads, dim), torch.randn(past + new, kv_heads, dim)
    out = torch.full((new, heads, dim), float("nan"))
    attend(q, k, v, out)
    mask = torch.ones(new, past + new, dtype=torch.bool).tril(past)

    def torch_own(k, v):
        return F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask
        ).transpose(0, 1)

    expected = torch_own(*(t.repeat_interleave(heads // kv_heads, 1) for t in (k, v)))
    assert (out - expected).abs().max() < 1e-5
    rival = torch_own(*(t.repeat(1, heads // kv_heads, 1) for t in (k, v)))  # h % kv_heads
    assert (rival - expected).abs().max() > 1e-2


def test_rotation_equals_transformers():
    from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

    frequencies = rotary_frequencies(1000.0, 8)
    batch = ragged([3, 2], [0, 1], [4, 0], frequencies)
    x = torch.randn(5, 3, 32)
    angles = torch.tensor([4.0, 5, 6, 0, 1])[:, None] * (1000.0 ** (-torch.arange(0, 8, 2) / 8))
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None] for f in (torch.cos, torch.sin))
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    assert (rotate(x, batch.cos, batch.sin) - expected[0]).abs().max() < 1e-6
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.starts == (0, 3)


@pytest.mark.spec("G61")
def test_equal_probabilities_go_to_the_lower_index():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    weights, experts = route(logits, 2, True)
    assert experts.tolist() == [[1, 2], [0, 1]]
    assert torch.allclose(weights, torch.full((2, 2), 0.5))
    assert experts.shape == (2, 2)
    many = torch.zeros(3, 512)
    assert route(many, 10, True)[1].tolist() == [list(range(10))] * 3
    weights, _ = route(logits, 2, False)
    assert (weights[0] - logits[0].softmax(-1)[1]).abs().max() < 1e-6


def test_gated_rounds_once():
    gate, up = torch.randn(50).bfloat16(), torch.randn(50).bfloat16()
    once = (gate.double() * torch.sigmoid(gate.double()) * up.double()).to(torch.bfloat16)
    twice = F.silu(gate) * up
    assert torch.equal(gated(torch.cat([gate, up])), once)
    assert not torch.equal(twice, once)


def test_keys_and_values_grow_apart():
    state = KeyValues(3, 2, 4, torch.float32, torch.device("cpu"))
    assert state.nbytes == 0
    seen = {0: [], 2: []}
    for turn in range(60):
        for slot, count in ((0, 1), (2, 3)):
            k, v = torch.randn(count, 2, 4), torch.randn(count, 2, 4)
            seen[slot].append((k, v))
            keys, values = state.append(slot, turn * count, k, v)
            assert keys.shape == ((turn + 1) * count, 2, 4)
    assert torch.equal(keys, torch.cat([k for k, _ in seen[2]]))
    assert torch.equal(values, torch.cat([v for _, v in seen[2]]))
    assert state.nbytes == (64 + 256) * 2 * 2 * 4 * 4


def test_delta_state_has_a_fixed_size():
    state = DeltaState(5, 11, 4, 1, 3, 6, 2, torch.device("cpu"))
    assert state.conv.shape == (5, 11, 3)
    assert state.rule.shape == (5, 3, 6, 2)
    assert state.nbytes == 4 * (5 * 11 * 3 + 5 * 3 * 6 * 2)
