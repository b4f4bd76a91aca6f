"""The stack that both families share: every tensor that a model has, and the modules made from them.

A tensor is a `Slot`: its name as the checkpoint spells it (without prefixes that wrap a text model), its shape, and whether
it may be packed. Never packed: the router and the shared expert's gate (they choose, they do not carry), norms, the
convolution, A_log, dt_bias and the small b and a projections (they decide how long the state remembers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from narrowgate.models.config import FULL, HybridConfig
from narrowgate.nn.attention import AttentionShape, GatedAttention
from narrowgate.nn.batch import rotary_frequencies
from narrowgate.nn.decoder import Decoder, Layer
from narrowgate.nn.delta import DeltaShape, GatedDeltaNet
from narrowgate.nn.linear import PackedEmbedding, PackedExperts, PackedLinear
from narrowgate.nn.mlp import MLP, MoE
from narrowgate.nn.norm import RMSNorm
from narrowgate.nn.state import Mixer
from narrowgate.nn.weight import Weight

Take = Callable[[str], Weight]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Slot:
    """One tensor of a model. `experts`: the projections of each expert, in order along the rows, that a file may hold apart
    as `<stem>.<expert>.<projection>.weight` instead of the stack [experts, rows, columns] called `name`."""

    name: str
    shape: tuple[int, ...]
    packable: bool = False
    experts: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The name without ".weight": what an override matches, and what a packed tensor is called."""
        return self.name.removesuffix(".weight")


def delta_shape(c: HybridConfig) -> DeltaShape:
    return DeltaShape(c.k_heads, c.v_heads, c.k_dim, c.v_dim, c.conv_width)


def slots(c: HybridConfig, projections: Callable[[HybridConfig, str], list[Slot]]) -> list[Slot]:
    """Every tensor of the model, in the order of the stack. `projections(config, prefix)` gives a delta layer's inputs."""
    found = [Slot(EMBEDDING, (c.vocab_size, c.hidden_size), True)]
    for i, kind in enumerate(c.layer_types):
        at = f"model.layers.{i}."
        found += [Slot(at + "input_layernorm.weight", (c.hidden_size,))]
        if kind == FULL:
            found += _attention_slots(c, at + "self_attn.")
        else:
            found += projections(c, at + "linear_attn.") + _delta_slots(c, at + "linear_attn.")
        found += [Slot(at + "post_attention_layernorm.weight", (c.hidden_size,))]
        found += _moe_slots(c, at + "mlp.") if c.moe_layers[i] else _mlp_slots(c.hidden_size, c.intermediate_size, at + "mlp.")
    found += [Slot("model.norm.weight", (c.hidden_size,))]
    return found if c.tied else [*found, Slot(HEAD, (c.vocab_size, c.hidden_size), True)]


def _attention_slots(c: HybridConfig, at: str) -> list[Slot]:
    rows = {"q_proj": 2 * c.heads * c.head_dim, "k_proj": c.kv_heads * c.head_dim, "v_proj": c.kv_heads * c.head_dim}
    found = [Slot(f"{at}{name}.weight", (n, c.hidden_size), True) for name, n in rows.items()]
    found += [Slot(f"{at}o_proj.weight", (c.hidden_size, c.heads * c.head_dim), True)]
    if c.attention_bias:
        found += [Slot(f"{at}{name}.bias", (n,)) for name, n in (*rows.items(), ("o_proj", c.hidden_size))]
    return found + [Slot(f"{at}{name}.weight", (c.head_dim,)) for name in ("q_norm", "k_norm")]


def _delta_slots(c: HybridConfig, at: str) -> list[Slot]:
    s = delta_shape(c)
    return [
        Slot(at + "conv1d.weight", (s.conv_channels, 1, s.conv_width)),
        Slot(at + "A_log", (s.v_heads,)),
        Slot(at + "dt_bias", (s.v_heads,)),
        Slot(at + "norm.weight", (s.v_dim,)),
        Slot(at + "out_proj.weight", (c.hidden_size, s.value_size), True),
    ]


def _mlp_slots(hidden: int, width: int, at: str) -> list[Slot]:
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return [Slot(f"{at}{name}.weight", shape, True) for name, shape in shapes.items()]


def _moe_slots(c: HybridConfig, at: str) -> list[Slot]:
    assert c.moe is not None
    e, width = c.moe.experts, c.moe.intermediate
    return [
        Slot(at + "gate.weight", (e, c.hidden_size)),
        Slot(at + "experts.gate_up_proj", (e, 2 * width, c.hidden_size), True, ("gate_proj", "up_proj")),
        Slot(at + "experts.down_proj", (e, c.hidden_size, width), True, ("down_proj",)),
        *_mlp_slots(c.hidden_size, c.moe.shared_intermediate, at + "shared_expert."),
        Slot(at + "shared_expert_gate.weight", (1, c.hidden_size)),
    ]


@dataclass(frozen=True)
class Builder:
    """Makes modules from weights. `take(name)` gives the Weight of a slot; `dtype` is the activations'."""

    config: HybridConfig
    take: Take
    dtype: torch.dtype
    batch_invariant: bool

    def linear(self, module: str, bias: bool = False) -> PackedLinear:
        extra = self.take(module + ".bias") if bias else None
        return PackedLinear(self.take(module + ".weight"), extra, batch_invariant=self.batch_invariant)

    def norm(self, module: str) -> RMSNorm:
        return RMSNorm(self.take(module + ".weight"), self.config.norm_eps)

    def mlp(self, at: str) -> MLP:
        return MLP(*(self.linear(at + name) for name in ("gate_proj", "up_proj", "down_proj")))

    def moe(self, at: str) -> MoE:
        moe = self.config.moe
        assert moe is not None
        gate_up, down = (
            PackedExperts(self.take(f"{at}experts.{name}"), batch_invariant=self.batch_invariant)
            for name in ("gate_up_proj", "down_proj")
        )
        shared, shared_gate = self.mlp(at + "shared_expert."), self.linear(at + "shared_expert_gate")
        return MoE(self.linear(at + "gate"), gate_up, down, shared, shared_gate, moe.top_k, moe.normalise)

    def attention(self, at: str) -> GatedAttention:
        c = self.config
        q, k, v, o = (self.linear(f"{at}{name}_proj", c.attention_bias) for name in "qkvo")
        shape = AttentionShape(c.heads, c.kv_heads, c.head_dim)
        return GatedAttention(shape, q, k, v, o, self.norm(at + "q_norm"), self.norm(at + "k_norm"))

    def delta(self, at: str, project: nn.Module) -> GatedDeltaNet:
        conv, A_log, dt_bias, norm = (self.take(at + name) for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight"))
        out, shape = self.linear(at + "out_proj"), delta_shape(self.config)
        return GatedDeltaNet(shape, project, conv, A_log, dt_bias, norm, out, self.config.norm_eps)

    def decoder(self, projection: Callable[[Builder, str], nn.Module]) -> Decoder:
        """The whole model. `projection(builder, prefix)` makes the input projections of a delta layer."""
        c = self.config
        table = self.take(EMBEDDING)
        layers = []
        for i, kind in enumerate(c.layer_types):
            at = f"model.layers.{i}."
            if kind == FULL:
                mixer: Mixer = self.attention(at + "self_attn.")
            else:
                mixer = self.delta(at + "linear_attn.", projection(self, at + "linear_attn."))
            mlp = self.moe(at + "mlp.") if c.moe_layers[i] else self.mlp(at + "mlp.")
            layers.append(Layer(mixer, mlp, self.norm(at + "input_layernorm"), self.norm(at + "post_attention_layernorm")))
        head = PackedLinear(table if c.tied else self.take(HEAD), batch_invariant=self.batch_invariant)
        frequencies = rotary_frequencies(c.rope_theta, c.rotary_dim)
        return Decoder(PackedEmbedding(table, self.dtype), layers, self.norm("model.norm"), head, frequencies)
