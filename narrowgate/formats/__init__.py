"""What stored bits mean: elements, codebooks, and the catalogue of schemes. No memory layout, no kernels."""

from narrowgate.formats.codebooks import codebook
from narrowgate.formats.elements import Element, element, elements
from narrowgate.formats.schemes import ScaleSpec, Scheme, scheme, schemes

__all__ = ["Element", "ScaleSpec", "Scheme", "codebook", "element", "elements", "scheme", "schemes"]
