"""The operators. Each folder holds one family: schema and checks, a reference to learn the math from, kernels, cases."""

# packed operands
# the gated delta rule family
from narrowgate.ops.norms.op import l2_norm

__all__ = [
    "l2_norm",
]
