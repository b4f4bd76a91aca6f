"""The operators. Each folder holds one family: schema and checks, a reference to learn the math from, kernels, cases."""

# packed operands
from narrowgate.ops.dequantize.op import dequantize
from narrowgate.ops.embedding.op import embedding
from narrowgate.ops.linear.op import grouped_linear, linear, matmul

# the gated delta rule family
from narrowgate.ops.norms.op import l2_norm
from narrowgate.ops.quantize.op import quantize

__all__ = [
    "dequantize",
    "embedding",
    "grouped_linear",
    "l2_norm",
    "linear",
    "matmul",
    "quantize",
]
