"""The rules by which values become codes and scales: scale rules, scale storage, one method a family. They define the bits."""

from narrowgate.quantize.quantize import quantize
from narrowgate.quantize.scale_rules import scale_byte
from narrowgate.quantize.storage import round_up

__all__ = ["quantize", "round_up", "scale_byte"]
