"""Where the bits live: layouts, the PackedTensor container, the reference decode, and the operand form operators take."""

from narrowgate.packing.build import check_lines, pack
from narrowgate.packing.decode import decode, decode_rows, gather_rows
from narrowgate.packing.fp6 import expand_fp6, pack_fp6, pack_fp6_grouped, unpack_fp6
from narrowgate.packing.ggml import from_ggml_blocks, to_ggml_blocks
from narrowgate.packing.operand import Operand, describe, flatten, operand_shape, unflatten
from narrowgate.packing.read import read, read_unchecked
from narrowgate.packing.registry import layout, layouts
from narrowgate.packing.scale import Scale
from narrowgate.packing.swizzle import swizzle_128x4, unswizzle_128x4
from narrowgate.packing.tensor import PackedTensor, same_bits

__all__ = [
    "Operand",
    "PackedTensor",
    "Scale",
    "check_lines",
    "decode",
    "decode_rows",
    "describe",
    "expand_fp6",
    "flatten",
    "from_ggml_blocks",
    "gather_rows",
    "layout",
    "layouts",
    "operand_shape",
    "pack",
    "pack_fp6",
    "pack_fp6_grouped",
    "read",
    "read_unchecked",
    "same_bits",
    "swizzle_128x4",
    "to_ggml_blocks",
    "unflatten",
    "unpack_fp6",
    "unswizzle_128x4",
]
