"""Which instructions the compiler may use: read once, before anything is compiled, because a wrong one aborts the process.

AVX2 with FMA and F16C is the least we compile for. `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES`, which Numba itself obeys, narrow it:
both together make this machine behave as an older one, which is how the tests see the AVX2 paths."""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import binding
from numba.core import config

from narrowgate.errors import UnsupportedError


@dataclass(frozen=True)
class Features:
    """What the chosen instructions need."""

    avx2: bool
    avx512: bool  # F, BW, DQ and VL together
    vnni: bool  # vpdpbusd on 512 bits
    dot_takes_bytes: bool  # LLVM 21 changed the operands of vpdpbusd from words to bytes
    ahead: int  # bytes: how far in front of a stream of reads the next cache lines are asked for

    @property
    def level(self) -> str:
        return "avx512-vnni" if self.vnni else "avx512" if self.avx512 else "avx2" if self.avx2 else "none"


def _names() -> set[str]:
    if config.CPU_FEATURES is not None:
        return {name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+")}
    return {name for name, on in binding.get_host_cpu_features().items() if on}


def _processor() -> str:
    """LLVM's name of it. AMD's own prefetchers (znver4 measured) are disturbed by what Intel's need."""
    return config.CPU_NAME or binding.get_host_cpu_name()


def _read() -> Features:
    has = _names()
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= has
    return Features(
        avx2={"avx2", "fma", "f16c"} <= has, avx512=wide, vnni=wide and "avx512vnni" in has,
        dot_takes_bytes=binding.llvm_version_info[0] >= 21, ahead=512 if _processor().startswith("znver") else 3072,
    )  # fmt: skip


FEATURES = _read()


def require() -> None:
    """Raise UnsupportedError on a processor that the kernels cannot be compiled for."""
    if not FEATURES.avx2:
        raise UnsupportedError("the CPU kernels need AVX2, FMA and F16C, and this processor (or NUMBA_CPU_FEATURES) lacks one")
