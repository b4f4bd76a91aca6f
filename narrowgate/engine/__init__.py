"""Running a model: loading, caches, generation, saving, and quantizing a checkpoint as a stream."""

from narrowgate.engine.cache import Cache
from narrowgate.engine.generate import Completion
from narrowgate.engine.load import load
from narrowgate.engine.model import Model, TensorReport
from narrowgate.engine.quantize import quantize_checkpoint

__all__ = ["Cache", "Completion", "Model", "TensorReport", "load", "quantize_checkpoint"]
