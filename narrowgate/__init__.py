"""narrowgate: hybrid language models from low-bit weights, with numbers that you can check."""

__version__ = "0.1.0"
