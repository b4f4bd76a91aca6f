"""A decoding step of a layer in one launch gives the bits of the four operators: under the interpreter, and on a card; and two
streams at once, many runs, and pools past 2^31 values, for it and for the steps that it is made of."""

import pytest
import torch
from gpu_scripts import run_script

pytest.importorskip("triton")

COMPARE = """
    import torch
    from narrowgate.ops.gated_delta_rule.gpu_layer import one_launch
    from narrowgate.ops.gated_delta_rule.layer import composed

    BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

    def same(a, b):
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

    def compare(rows, key_heads, ratio, keys, values, dtype, *, split, slots=None, indices=None, width=4, weights=F32, state=F32,
                taps=F32, pad=0):
        g = torch.Generator().manual_seed(rows + keys)
        heads, channels = key_heads * ratio, 2 * key_heads * keys + key_heads * ratio * values
        slots = slots or rows
        indices = torch.tensor(indices or list(range(rows)), dtype=torch.int32, device=DEVICE)

        def normal(*shape, dtype=dtype, pad=0):
            return torch.randn(*shape[:-1], shape[-1] + pad, generator=g).to(DEVICE, dtype)[..., : shape[-1]]

        mixed, gates = normal(rows, channels, pad=pad), normal(rows, 2 * heads, pad=pad)
        z = normal(rows, heads * values, pad=pad).view(rows, heads, values)
        weight, norm = normal(channels, width, dtype=weights), normal(values, dtype=weights)
        per_head = normal(2, heads, dtype=weights)
        given = (mixed, z, gates[:, :heads], gates[:, heads:], weight)
        pools = normal(slots, channels, width - 1, dtype=taps), normal(slots, heads, values, keys, dtype=state)
        (t1, s1), (t2, s2) = ([p.clone() for p in pools] for _ in range(2))
        want = composed(*given, t1, *per_head, norm, s1, indices, num_k_heads=key_heads, scale=0.1, eps=1e-6, impl="gpu")
        out = torch.full_like(want, torch.nan)
        arrivals = torch.zeros(slots, key_heads, dtype=torch.int32, device=DEVICE)
        one_launch(*given, t2, *per_head, norm, s2, indices, arrivals, scale=0.1, norm_eps=1e-6, out=out, split=split)
        what = (rows, key_heads, ratio, keys, values, dtype, split)
        assert same(want, out), what
        assert same(t1, t2) and not same(t1, pools[0]), what
        assert same(s1, s2) and not same(s1, pools[1]), what
        assert not arrivals.any(), what

    for split in SPLITS:
        compare(2, 2, 1, 128, 16, F32, split=split, width=2)
        compare(3, 2, 3, 72, 12, BF16, split=split, slots=9, indices=[7, -1, 2], pad=3)
        compare(2, 1, 4, 65, 13, F16, split=split, width=3, weights=BF16, indices=[0, -1])
        compare(2, 1, 2, 128, 28, BF16, split=split, state=BF16, taps=BF16, width=5)
    for split in (1,) if DEVICE == "cpu" else ():  # shorter keys, which no GPU is asked for
        compare(2, 1, 2, 8, 12, F32, split=split)
        compare(2, 1, 8, 33, 16, BF16, split=split, state=F16)
    for case in LARGE:
        compare(*case[:6], split=case[6], weights=BF16, pad=8)
"""


def test_one_launch_gives_the_bits_of_four(tmp_path):
    run_script(tmp_path, 'DEVICE, SPLITS, LARGE = "cpu", (3,), ()', COMPARE, interpret=True)


@pytest.mark.gpu
def test_one_launch_gives_the_bits_of_four_on_a_gpu(tmp_path):
    large = """
        DEVICE, SPLITS = "cuda", (None, 1, 2, 5)
        import torch
        BF16 = torch.bfloat16
        LARGE = [(rows, 16, ratio, 128, 128, BF16, split) for rows in (1, 5, 32) for ratio in (1, 2, 3, 4) for split in (None, 1, 4)]
    """
    run_script(tmp_path, large, COMPARE, interpret=False)


def layer(rows, slots, seed=0):
    """decode_layer as a call over fresh pools, for a layer of 16 and 32 heads of 128; and its pools."""
    from narrowgate.ops.gated_delta_rule.layer import decode_layer, in_one_launch

    g = torch.Generator("cuda").manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g, device="cuda")  # noqa: E731
    mixed, z, gates = (normal(*shape).bfloat16() for shape in ((rows, 8192), (rows, 32, 128), (rows, 64)))
    weight, per_head, norm = normal(8192, 4).bfloat16(), normal(2, 32), normal(128)
    taps, state = normal(slots, 8192, 3), normal(slots, 32, 128, 128)
    arrivals = torch.zeros(slots, 16, dtype=torch.int32, device="cuda")
    indices = torch.randperm(slots, device="cuda", generator=g)[:rows].int()
    assert in_one_launch(mixed, taps, state) == (rows <= 4)

    def call():
        a, b = gates[:, :32], gates[:, 32:]
        return decode_layer(
            mixed, z, a, b, weight, taps, *per_head, norm, state, arrivals, indices, num_k_heads=16, scale=0.1, eps=1e-6
        )

    return call, (taps, state)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 32])
def test_a_chain_repeats_and_a_graph_gives_its_bits(rows):
    call, pools = layer(rows, rows + 3)
    start = [p.clone() for p in pools]

    def chain(steps):
        for p, s in zip(pools, start, strict=True):
            p.copy_(s)
        return [*(steps() for _ in range(4)), *(p.clone() for p in pools)]

    want = chain(call)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(want, chain(call), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay():
        out.fill_(torch.nan)
        graph.replay()
        return out.clone()

    assert all(torch.equal(a, b) for a, b in zip(want, chain(replay), strict=True))


@pytest.mark.gpu
def test_two_streams_at_once():
    """Layers with pools of their own, on streams of their own, together and one after another."""
    calls, pools = zip(*(layer(8, 8, seed) for seed in (1, 2)), strict=True)
    start = [[p.clone() for p in pair] for pair in pools]
    streams = [torch.cuda.Stream() for _ in calls]

    def run(together):
        for pair, kept in zip(pools, start, strict=True):
            for p, s in zip(pair, kept, strict=True):
                p.copy_(s)
        torch.cuda.synchronize()
        found = [[], []]
        for _ in range(40):
            for i, call in enumerate(calls):
                with torch.cuda.stream(streams[i]):
                    found[i].append(call())
                if not together:
                    torch.cuda.synchronize()
        torch.cuda.synchronize()
        return [*found[0], *found[1], *(p.clone() for pair in pools for p in pair)]

    want = run(False)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(want, run(True), strict=True))


@pytest.mark.gpu
@pytest.mark.spec("F36")
def test_pools_past_two_to_the_31():
    """The last slots of a pool of 4200 states, 2.2e9 values, and its convolution taps: as in a pool of their own."""
    import narrowgate.ops as ops

    slots, rows = 4200, 3
    g = torch.Generator("cuda").manual_seed(3)
    normal = lambda *shape: torch.randn(shape, generator=g, device="cuda")  # noqa: E731
    state, near = torch.zeros(slots, 32, 128, 128, device="cuda"), normal(rows, 32, 128, 128)
    far = torch.arange(slots - rows, slots, device="cuda")
    assert far[0] * 32 * 128 * 128 > 2**31
    q, k, v = ops.l2_norm(normal(rows, 16, 128)), ops.l2_norm(normal(rows, 16, 128)), normal(rows, 32, 128)
    gates = {"g": -normal(rows, 32).abs(), "beta": normal(rows, 32).sigmoid()}
    ends = torch.arange(rows + 1, device="cuda")
    ones, some = torch.ones(rows, dtype=torch.int32, device="cuda"), {"scale": 0.1}
    packed = normal(rows, 8192), normal(rows, 32), normal(rows, 32), normal(32), normal(32)
    calls = {
        "step": lambda s, i: ops.gated_delta_rule_step(q, k, v, **gates, state=s, state_indices=i, **some),
        "packed": lambda s, i: ops.gated_delta_rule_packed_step(*packed, s, i, **some),
        "speculative": lambda s, i: ops.gated_delta_rule_speculative_step(q, k, v, **gates, state=s, cu_seqlens=ends,
                                                                          state_indices=i[:, None], num_accepted=ones, **some),
        "recurrent": lambda s, i: ops.gated_delta_rule(q, k, v, **gates, state=s, cu_seqlens=ends, state_indices=i,
                                                       form="recurrent", **some),
    }  # fmt: skip
    for name, call in calls.items():
        state[far] = near
        alone = near.clone()
        want = call(alone, torch.arange(rows, device="cuda"))
        assert torch.equal(want, call(state, far)), name
        assert torch.equal(alone, state[far]), name
        assert not state[: slots - rows].any(), name
