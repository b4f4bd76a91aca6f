"""The plausible wrong readings, each planted in our model: the comparison with transformers must see every one (SPEC R)."""

import pytest
import torch
from small_models import KINDS, build, reference, relative, tokens

import narrowgate as ng
from narrowgate import ops
from narrowgate.nn import attention, mlp
from narrowgate.nn.attention import GatedAttention
from narrowgate.nn.delta import GroupedProjection

VISIBLE = 1e-2


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = (build(kind, folder, seed=1), ng.load(folder))
        return made[kind]

    return get


def pairing_modulo(monkeypatch):
    right = ops.gated_delta_rule

    def wrong(q, k, v, *rest, **named):
        heads = [h % k.shape[1] for h in range(v.shape[1])]
        return right(q[:, heads].contiguous(), k[:, heads].contiguous(), v, *rest, **named)

    monkeypatch.setattr(ops, "gated_delta_rule", wrong)


def norm_weight_without_one(monkeypatch):
    right = ops.rms_norm
    monkeypatch.setattr(ops, "rms_norm", lambda x, w, *, eps, weight_bias: right(x, w, eps=eps))


def gated_norm_with_one(monkeypatch):
    right = ops.rms_norm_gated
    monkeypatch.setattr(ops, "rms_norm_gated", lambda x, z, w, *, eps: right(x, z, 1 + w, eps=eps))


def rotation_of_neighbours(monkeypatch):
    def wrong(x, cos, sin):
        half = cos.shape[-1]
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        first, second = turned[..., ::2], turned[..., 1::2]
        pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([pairs.flatten(-2), rest], dim=-1)

    monkeypatch.setattr(attention, "rotate", wrong)


def rotation_of_the_whole_head(monkeypatch):
    right = attention.rotate

    def wrong(x, cos, sin):
        repeat = x.shape[-1] // (2 * cos.shape[-1])
        return right(x, cos.repeat(1, 1, repeat), sin.repeat(1, 1, repeat))

    monkeypatch.setattr(attention, "rotate", wrong)


def gates_after_all_queries(monkeypatch):
    right = GatedAttention.forward

    def wrong(self, x, batch, state):
        project, s = self.qkv, self.shape

        def halves(x):
            mixed, k, v = project.apart(x)
            q, gate = mixed.chunk(2, dim=-1)
            return torch.stack([t.unflatten(-1, (s.heads, s.dim)) for t in (q, gate)], dim=-2).flatten(1), k, v

        with monkeypatch.context() as m:
            m.setitem(self._modules, "qkv", torch.nn.Module())
            m.setattr(self._modules["qkv"], "apart", halves, raising=False)
            return right(self, x, batch, state)

    monkeypatch.setattr(GatedAttention, "forward", wrong)


def rows_not_grouped_by_key_head(monkeypatch):
    def wrong(self, x):
        s = self.shape
        mixed, z = self.qkvz(x).split([s.conv_channels, s.value_size], dim=-1)
        return mixed.contiguous(), z, *self.ba(x).chunk(2, dim=-1)

    monkeypatch.setattr(GroupedProjection, "forward", wrong)


def a_before_b(monkeypatch):
    right = GroupedProjection.forward

    def wrong(self, x):
        mixed, z, b, a = right(self, x)
        return mixed, z, a, b

    monkeypatch.setattr(GroupedProjection, "forward", wrong)


def weights_of_experts_not_normalised(monkeypatch):
    right = mlp.route
    monkeypatch.setattr(mlp, "route", lambda logits, k, normalise: right(logits, k, False))


def softmax_over_the_chosen_only_unnormalised_sum(monkeypatch):
    monkeypatch.setattr(mlp, "route", lambda logits, k, normalise: (logits.topk(k).values.sigmoid(), logits.topk(k).indices))


def up_before_gate(monkeypatch):
    right = mlp.gated
    monkeypatch.setattr(mlp, "gated", lambda x: right(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)))


CASES = [
    *[(kind, wrong) for kind in KINDS for wrong in (pairing_modulo, norm_weight_without_one, gated_norm_with_one)],
    *[(kind, wrong) for kind in KINDS for wrong in (rotation_of_neighbours, rotation_of_the_whole_head)],
    *[(kind, wrong) for kind in KINDS for wrong in (gates_after_all_queries, up_before_gate)],
    *[("qwen3_next", wrong) for wrong in (rows_not_grouped_by_key_head, a_before_b)],
    *[(kind, wrong) for kind in KINDS[1:] for wrong in (weights_of_experts_not_normalised,)],
    *[(kind, wrong) for kind in KINDS[1:] for wrong in (softmax_over_the_chosen_only_unnormalised_sum,)],
]


@pytest.mark.parametrize(("kind", "wrong"), CASES, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_rival_is_visible(kind, wrong, pairs, monkeypatch):
    theirs, ours = pairs(kind)
    ids = tokens(23, seed=8)
    expected = reference(theirs, ids)
    assert relative(expected, ours.logits(ids)) < 1e-4
    wrong(monkeypatch)
    assert relative(expected, ours.logits(ids)) > VISIBLE
