"""narrowgate: hybrid language models from low-bit weights, with numbers that you can check."""

from narrowgate import formats, ops, packing
from narrowgate._version import __version__
from narrowgate.dispatch import Plan, debug_checks, plan, strict
from narrowgate.engine import Cache, Completion, Model, load, quantize_checkpoint
from narrowgate.errors import FallbackWarning, FileError, InputError, NarrowgateError, UnsupportedError
from narrowgate.formats import scheme, schemes
from narrowgate.ops import embedding, grouped_linear, linear, matmul, prepare, quantize
from narrowgate.packing import PackedTensor, Scale, pack, same_bits

__all__ = [
    "Cache",
    "Completion",
    "FallbackWarning",
    "FileError",
    "InputError",
    "Model",
    "NarrowgateError",
    "PackedTensor",
    "Plan",
    "Scale",
    "UnsupportedError",
    "__version__",
    "debug_checks",
    "embedding",
    "formats",
    "grouped_linear",
    "linear",
    "load",
    "matmul",
    "ops",
    "pack",
    "packing",
    "plan",
    "prepare",
    "quantize",
    "quantize_checkpoint",
    "same_bits",
    "scheme",
    "schemes",
    "strict",
]
