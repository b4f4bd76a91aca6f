"""A decoding step of attention by the CPU kernel, held to the same step in torch: outputs close, stored keys and values to the bit."""

import pytest
import torch

from narrowgate.nn import attention
from narrowgate.nn.attention import AttentionShape, GatedAttention
from narrowgate.nn.batch import ragged, rotary_frequencies
from narrowgate.nn.state import KeyValues

pytest.importorskip("numba")

SHAPES = [(8, 2, 256, 64), (6, 2, 16, 8), (5, 1, 40, 12), (16, 1, 32, 32), (2, 2, 4, 2), (32, 2, 512, 128)]


def layer(heads, kv_heads, dim):
    """A layer of which only `_read` is used."""
    made = GatedAttention.__new__(GatedAttention)
    torch.nn.Module.__init__(made)
    made.shape = AttentionShape(heads, kv_heads, dim)
    return made


def filled(lengths, kv_heads, dim, dtype, seed=0):
    """A state that holds so many tokens of each sequence; the same each time."""
    g = torch.Generator().manual_seed(seed)
    state = KeyValues(len(lengths), kv_heads, dim, dtype, torch.device("cpu"))
    for slot, n in enumerate(lengths):
        if n:
            state.append(slot, 0, *(torch.randn(n, kv_heads, dim, generator=g).to(dtype) for _ in range(2)))
    return state


def inputs(n, heads, kv_heads, dim, dtype, seed=1):
    """q, gate, k, v as the layer makes them: gate and v are views of wider rows."""
    g = torch.Generator().manual_seed(seed)
    _, gate = torch.randn(n, heads, 2 * dim, generator=g).to(dtype).chunk(2, dim=-1)
    q, k = torch.randn(n, heads, dim, generator=g).to(dtype), torch.randn(n, kv_heads, dim, generator=g).to(dtype)
    v = torch.randn(n, kv_heads * dim + 24, generator=g).to(dtype)[:, : kv_heads * dim].view(n, kv_heads, dim)
    return q, gate, k, v


def read(shape, rotary, lengths, dtype, kernel, monkeypatch, slots=None, picked=slice(None)):
    heads, kv_heads, dim = shape
    slots = slots or tuple(range(len(lengths)))
    state = filled(lengths, kv_heads, dim, dtype)
    past = [lengths[s] for s in slots]
    batch = ragged([1] * len(slots), slots, past, rotary_frequencies(1e4, rotary))
    given = [t[picked] for t in inputs(len(lengths), heads, kv_heads, dim, dtype)]
    with monkeypatch.context() as patch:
        if not kernel:
            patch.setattr(attention, "_has_kernel", lambda q, k: False)
        else:
            assert attention._has_kernel(given[0], given[2])
        y = layer(*shape)._read(batch, state, *given)
    return y, [state.room(s, lengths[s] + 1, 0)[: lengths[s] + 1].clone() for s in slots]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_equals_torchs(heads, kv_heads, dim, rotary, dtype, monkeypatch):
    lengths, shape = (0, 1, 127, 128, 300), (heads, kv_heads, dim)
    y, kept = read(shape, rotary, lengths, dtype, True, monkeypatch)
    want, stored = read(shape, rotary, lengths, dtype, False, monkeypatch)
    assert y.dtype == want.dtype == dtype
    bound = 2e-6 if dtype == torch.float32 else 2e-2 if dtype == torch.bfloat16 else 2e-3  # a rounding of the output
    assert (y.float() - want.float()).abs().max() <= bound * want.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(kept, stored, strict=True))


def test_against_float64_and_the_rival_pairing(monkeypatch):
    heads, kv_heads, dim, rotary, lengths = 6, 2, 48, 16, (200, 5)
    y, kept = read((heads, kv_heads, dim), rotary, lengths, torch.float32, True, monkeypatch)
    q, gate, _, _ = inputs(2, heads, kv_heads, dim, torch.float32)
    batch = ragged([1, 1], [0, 1], lengths, rotary_frequencies(1e4, rotary))
    q = attention.rotate(q.double(), batch.cos.double(), batch.sin.double())

    def expected(i, pair):
        keys, values = (kept[i][:, j].double()[:, [pair(h) for h in range(heads)]] for j in (0, 1))
        weights = torch.einsum("hd,shd->hs", q[i], keys).div(dim**0.5).softmax(-1)
        return torch.einsum("hs,shd->hd", weights, values) * gate[i].double().sigmoid()

    for i in range(2):
        assert (y[i] - expected(i, lambda h: h // 3)).abs().max() < 1e-6
        assert (y[i] - expected(i, lambda h: h % 2)).abs().max() > 1e-2


def test_bits_depend_on_nothing_but_the_sequence(monkeypatch):
    """Not on the others of the batch, their order, the buffer's size, or the threads."""
    shape, lengths = (8, 2, 64), (3, 500, 129, 64)
    whole, _ = read(shape, 16, lengths, torch.float32, True, monkeypatch)
    for slots, picked in (((1,), slice(1, 2)), ((2, 3), slice(2, 4))):
        part, _ = read(shape, 16, lengths, torch.float32, True, monkeypatch, slots, picked)
        assert torch.equal(part, whole[picked])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(read(shape, 16, lengths, torch.float32, True, monkeypatch)[0], whole)
    finally:
        torch.set_num_threads(before)


def test_other_shapes_and_meta_take_torch():
    q, k = torch.empty(1, 64, 8), torch.empty(1, 2, 8)
    assert not attention._has_kernel(q, k)  # 32 heads a key head
    assert not attention._has_kernel(torch.empty(1, 2, 520), torch.empty(1, 2, 520))
    assert not attention._has_kernel(torch.empty(1, 2, 8, device="meta"), torch.empty(1, 2, 8, device="meta"))
    assert not attention._has_kernel(torch.empty(0, 2, 8), torch.empty(0, 2, 8))
    assert attention._has_kernel(torch.empty(1, 2, 8), torch.empty(1, 2, 8))
