"""The operators. Each folder holds one family: schema and checks, a reference to learn the math from, kernels, cases."""

# packed operands
# the gated delta rule family
from narrowgate.ops.causal_conv1d.op import causal_conv1d, causal_conv1d_step, causal_conv1d_work
from narrowgate.ops.causal_conv1d.speculative import causal_conv1d_speculative_step
from narrowgate.ops.dequantize.op import dequantize
from narrowgate.ops.elementwise.op import convert, relu2, scale, silu, silu_mul
from narrowgate.ops.embedding.op import embedding
from narrowgate.ops.gated_delta_rule.op import gated_delta_rule, gated_delta_rule_step
from narrowgate.ops.gated_delta_rule.packed import gated_delta_rule_packed_step
from narrowgate.ops.gated_delta_rule.speculative import gated_delta_rule_speculative_step
from narrowgate.ops.gates.op import gdn_decay, gdn_gate
from narrowgate.ops.linear.op import grouped_linear, linear, matmul
from narrowgate.ops.linear.prepare import prepare
from narrowgate.ops.norms.op import l2_norm, rms_norm, rms_norm_gated
from narrowgate.ops.post_conv.op import gdn_post_conv, split_qkv
from narrowgate.ops.quantize.op import quantize
from narrowgate.ops.quantize_grouped.op import quantize_grouped
from narrowgate.ops.state.op import copy_rows, gather_state, scatter_state, select_rows

__all__ = [
    "causal_conv1d",
    "causal_conv1d_speculative_step",
    "causal_conv1d_step",
    "causal_conv1d_work",
    "convert",
    "copy_rows",
    "dequantize",
    "embedding",
    "gated_delta_rule",
    "gated_delta_rule_packed_step",
    "gated_delta_rule_speculative_step",
    "gated_delta_rule_step",
    "gather_state",
    "gdn_decay",
    "gdn_gate",
    "gdn_post_conv",
    "grouped_linear",
    "l2_norm",
    "linear",
    "matmul",
    "prepare",
    "quantize",
    "quantize_grouped",
    "relu2",
    "rms_norm",
    "rms_norm_gated",
    "scale",
    "scatter_state",
    "select_rows",
    "silu",
    "silu_mul",
    "split_qkv",
]
