"""Explicit SIMD for the CPU kernels: vectors and operations (cpu.py), threads, the features of the processor, the compile cache.

Nothing here is imported by `import narrowgate`."""
