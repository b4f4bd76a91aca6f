"""The rules by which values become codes and scales: scale rules, scale storage, one method a family. They define the bits."""

from narrowgate.quantize.microscaling import dequantize_microscaling, quantize_block, quantize_microscaling
from narrowgate.quantize.quantize import quantize
from narrowgate.quantize.scale_rules import scale_byte
from narrowgate.quantize.storage import round_up

__all__ = [
    "dequantize_microscaling",
    "quantize",
    "quantize_block",
    "quantize_microscaling",
    "round_up",
    "scale_byte",
]
