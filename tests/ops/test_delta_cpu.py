"""What the CPU kernels of the delta family promise beyond the cases: fused equals composed, any number of threads, far strides."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from narrowgate import ops

if importlib.util.find_spec("numba") is None:
    pytest.skip("these are the Numba kernels", allow_module_level=True)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def flow(seed, tokens, key_heads=2, heads=4, k=40, v=70, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    q, key = (torch.nn.functional.normalize(torch.randn(tokens, key_heads, k, generator=g), dim=-1).to(dtype) for _ in range(2))
    value = torch.randn(tokens, heads, v, generator=g).to(dtype)
    return q, key, value, -torch.rand(tokens, heads, generator=g), torch.rand(tokens, heads, generator=g)


def same(a, b):
    return torch.equal(a, b) and a.dtype == b.dtype


@pytest.fixture(params=[1, 3])
def team(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("state_dtype", DTYPES)
def test_drafts_equal_steps_with_skipped_snapshots(state_dtype):
    """Snapshot columns of -1: the state goes on all the same."""
    inputs = flow(1, 4, dtype=torch.bfloat16)
    pool = (torch.randn(5, 4, 70, 40, generator=torch.Generator().manual_seed(2)) * 0.3).to(state_dtype)
    drafted, stepped = pool.clone(), pool[2:3].clone()
    slots, ends = torch.tensor([[2, -1, 4, -1]]), torch.tensor([0, 4])
    o = ops.gated_delta_rule_speculative_step(*inputs, drafted, ends, slots, torch.tensor([1]), scale=0.3, impl="cpu")
    for t in range(4):
        row = [x[t : t + 1] for x in inputs]
        assert same(ops.gated_delta_rule_step(*row, stepped, scale=0.3, impl="cpu"), o[t : t + 1])
        if slots[0, t] >= 0:
            assert same(stepped[0], drafted[slots[0, t]])
    assert same(drafted[[0, 1, 3]], pool[[0, 1, 3]])


def test_recurrent_prefill_equals_steps(team):
    q, k, v, g, beta = flow(3, 9, k=128, v=128)
    start = torch.randn(1, 4, 128, 128, generator=torch.Generator().manual_seed(4)) * 0.1
    whole, stepped, each = start.clone(), start.clone(), start.repeat(9, 1, 1, 1)
    o = ops.gated_delta_rule(q, k, v, g, beta, whole, None, scale=0.1, impl="cpu")
    rows = [
        ops.gated_delta_rule_step(*(x[t : t + 1] for x in (q, k, v, g, beta)), stepped, scale=0.1, impl="cpu") for t in range(9)
    ]
    assert same(torch.cat(rows), o)
    assert same(stepped, whole)
    alone = each.clone()
    first = ops.gated_delta_rule_step(q, k, v, g, beta, each, scale=0.1, impl="cpu")
    second = ops.gated_delta_rule(q, k, v, g, beta, alone, torch.arange(10), scale=0.1, form="recurrent", impl="cpu")
    assert same(first, second)
    assert same(each, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_post_conv_equals_its_parts(dtype, team):
    g = torch.Generator().manual_seed(5)
    mixed = torch.randn(130, 2 * 2 * 40 + 4 * 70 + 3, generator=g).to(dtype)[:, 1:-2]
    a, b = (torch.randn(130, 4, generator=g).to(dtype) * 30 for _ in range(2))
    A_log, dt_bias = torch.randn(4, generator=g), torch.randn(4, generator=g).bfloat16()
    sizes = {"num_k_heads": 2, "head_k_dim": 40, "head_v_dim": 70, "impl": "cpu"}
    fused = ops.gdn_post_conv(mixed, a, b, A_log, dt_bias, **sizes)
    q, k, v = ops.split_qkv(mixed, **sizes)
    parts = [ops.l2_norm(q, impl="cpu"), ops.l2_norm(k, impl="cpu"), v, *ops.gdn_gate(a, b, A_log, dt_bias, impl="cpu")]
    assert all(same(x, y) for x, y in zip(fused, parts, strict=True))


def test_packed_step_equals_its_parts():
    """With powers of two as scale and norms, the packed step's q (one factor) and l2_norm's (a division) are the same numbers."""
    g = torch.Generator().manual_seed(6)
    signs = torch.randn(3, 4, 64, generator=g).sign() * 2.0
    value = torch.randn(3, 4, 20, generator=g)
    mixed = torch.cat([signs.reshape(3, -1), value.reshape(3, -1)], dim=1)
    a, b, A_log, dt_bias = (torch.randn(*n, generator=g) for n in ((3, 4), (3, 4), (4,), (4,)))
    pool = torch.randn(3, 4, 20, 64, generator=g)
    packed, stepped = pool.clone(), pool.clone()
    slots = torch.tensor([2, 0, 1])
    o = ops.gated_delta_rule_packed_step(mixed, a, b, A_log, dt_bias, packed, slots, scale=0.125, impl="cpu")
    q, k, v, decay, beta = ops.gdn_post_conv(
        mixed, a, b, A_log, dt_bias, num_k_heads=2, head_k_dim=64, head_v_dim=20, impl="cpu"
    )
    want = ops.gated_delta_rule_step(q, k, v, decay, beta, stepped, scale=0.125, state_indices=slots, impl="cpu")
    assert same(o, want)
    assert same(packed, stepped)


@pytest.mark.parametrize("width", [2, 3, 4, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_is_the_reference_to_the_bit(width, dtype):
    """Without activation both add bias and taps in one order, product and sum rounded apart; 300 channels are two tasks."""
    g = torch.Generator().manual_seed(width)
    x, weight = torch.randn(11, 303, generator=g).to(dtype)[:, 1:301], torch.randn(300, width, generator=g).to(dtype)
    bias, state = torch.randn(300, generator=g).to(dtype), torch.randn(3, 300, width - 1, generator=g)
    ends, has, slots = torch.tensor([0, 1, 3, 11]), torch.tensor([True, False, True]), torch.tensor([1, 2, 0])
    found = []
    for impl in ("cpu", "reference"):
        kept = state.clone()
        y = ops.causal_conv1d(x, weight, bias, kept, ends, has, activation="none", state_indices=slots, impl=impl)
        found.append((y, kept))
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])


def test_refusals_name_their_reason():
    weight, state = torch.ones(3, 17), torch.zeros(1, 3, 16)
    with pytest.raises(Exception, match="at most 16 taps, got 17"):
        ops.causal_conv1d(torch.ones(2, 3), weight, None, state, impl="cpu")
    inputs = flow(1, 1, 1, 1, 2100, 2)
    with pytest.raises(Exception, match="keys of at most 2048 values, got 2100"):
        ops.gated_delta_rule_step(*inputs, torch.zeros(1, 1, 2, 2100), scale=1.0, impl="cpu")


def test_long_rows_of_every_step(team):
    """Rows that are cut among threads, and views that do not merge into two axes, give each value its own result."""
    x = torch.randn(40960, generator=torch.Generator().manual_seed(7))
    assert same(ops.silu(x, impl="cpu"), torch.cat([ops.silu(part, impl="cpu") for part in x.split(37)]))
    view = x[: 2 * 3 * 4 * 5 * 8].view(2, 3, 4, 5, 8)[:, :2, :3, :4, :7]
    assert same(ops.l2_norm(view, impl="cpu"), ops.l2_norm(view.contiguous(), impl="cpu"))
    out = torch.zeros(2, 3, 4, 5, 8)[:, :2, :3, :4, :7]
    ops.silu(view, out=out, impl="cpu")
    assert same(out.contiguous(), ops.silu(view.contiguous(), impl="cpu"))


_GLUE = """
import torch
from narrowgate import ops
g = torch.Generator().manual_seed(8)
x, gate, weight = torch.randn(5, 100, generator=g), torch.randn(5, 100, generator=g) * 9, torch.rand(100, generator=g)
a, A_log = torch.randn(7, 19, generator=g).half() * 20, torch.randn(19, generator=g)
found = [
    ops.rms_norm_gated(x.bfloat16(), gate, weight, eps=1e-6, impl="cpu"), ops.l2_norm(x.half(), impl="cpu"),
    *ops.gdn_gate(a, a, A_log, A_log, impl="cpu"),
]
"""


def test_avx2_gives_the_same_bits(tmp_path):
    """Older instructions, the same numbers; 16-bit loads and stores under masks among them."""
    features = "+avx2,+fma,+f16c,+avx,+sse4.2,+sse4.1,+ssse3,+popcnt,+bmi,+bmi2,+lzcnt,+movbe,+cx16,-avx512f"
    code = _GLUE + f"torch.save(found, {str(tmp_path / 'found.pt')!r})"
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    here: dict = {}
    exec(_GLUE, here)
    assert all(same(a, b) for a, b in zip(here["found"], torch.load(tmp_path / "found.pt"), strict=True))


def test_without_numba_the_reference_runs_and_says_why():
    code = """
import sys, warnings
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ImportError("No module named 'numba'")
sys.meta_path.insert(0, Block())
import torch
from narrowgate import ops
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(ops.l2_norm(torch.tensor([3.0, 4.0]), eps=0.0), *(w.message for w in caught))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "0.6000, 0.8000" in ran.stdout
    assert "the reference runs: cpu (l2_norm): No module named 'numba'" in ran.stdout
