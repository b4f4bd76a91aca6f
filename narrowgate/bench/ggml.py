"""ggml's matrix product through its shared library, as a peer in our own process: the library that llama-cpp-python ships.

Weights live in a buffer of the CPU backend's "extra" kind where that takes the type (llama.cpp's own choice: it repacks them
for the processor), else in a plain one. A product is a graph of one node, built once; a call computes it on the given number
of threads. ggml quantizes the activations to int8 first for every quantized type, and that is in the time. Structures
are not mirrored in Python: everything goes through functions, but for one field (`buffer`) and the parameters of ggml_init.
Left out: other backends, other operators."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgate.errors import UnsupportedError

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "q4_K": 12, "q6_K": 14, "iq4_nl": 20, "bf16": 30, "mxfp4": 39, "nvfp4": 40}
_P, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
_BUFFER_OFFSET = 8  # of the field `buffer` in ggml_tensor, behind `type`


class _Params(ctypes.Structure):
    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


_BASE: dict[str, tuple[object, tuple[object, ...]]] = {
    "ggml_init": (_P, (_Params,)), "ggml_new_tensor_2d": (_P, (_P, ctypes.c_int, _I64, _I64)), "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_new_graph": (_P, (_P,)), "ggml_build_forward_expand": (None, (_P, _P)), "ggml_row_size": (_SIZE, (ctypes.c_int, _I64)),
    "ggml_backend_buft_alloc_buffer": (_P, (_P, _SIZE)), "ggml_backend_buft_get_alloc_size": (_SIZE, (_P, _P)),
    "ggml_backend_buffer_get_base": (_P, (_P,)), "ggml_backend_tensor_alloc": (ctypes.c_int, (_P, _P, _P)),
    "ggml_backend_tensor_set": (None, (_P, _P, _SIZE, _SIZE)), "ggml_backend_tensor_get": (None, (_P, _P, _SIZE, _SIZE)),
    "ggml_backend_graph_compute": (ctypes.c_int, (_P, _P)),
    "ggml_quantize_chunk": (_SIZE, (ctypes.c_int, _P, _P, _I64, _I64, _I64, _P)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, ctypes.c_char_p)), "ggml_backend_reg_dev_get": (_P, (_P, _SIZE)),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, (_P, _P)), "ggml_backend_buffer_free": (None, (_P,)), "ggml_free": (None, (_P,)),
    "ggml_version": (ctypes.c_char_p, ()),
}  # fmt: skip
_CPU: dict[str, tuple[object, tuple[object, ...]]] = {
    "ggml_backend_cpu_init": (_P, ()), "ggml_backend_cpu_set_n_threads": (None, (_P, ctypes.c_int)),
    "ggml_backend_cpu_reg": (_P, ()), "ggml_backend_cpu_buffer_type": (_P, ()),
}  # fmt: skip


def find(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder with libggml-base.so: the given one, or llama-cpp-python's. Raises UnsupportedError where there is none."""
    places = [Path(folder)] if folder else []
    spec = None if folder else importlib.util.find_spec("llama_cpp")
    if spec is not None and spec.origin:
        places.append(Path(spec.origin).parent / "lib")
    for place in places:
        if (place / "libggml-base.so").exists():
            return place
    where = f"in {folder}" if folder else "here: llama-cpp-python is not installed"
    raise UnsupportedError(f"ggml: no libggml-base.so {where}")


@cache
def library(folder: Path) -> Library:
    return Library(folder)


class Library:
    """The functions of ggml's base and CPU libraries, typed."""

    def __init__(self, folder: Path) -> None:
        for name, functions in (("base", _BASE), ("cpu", _CPU)):
            loaded = ctypes.CDLL(str(folder / f"libggml-{name}.so"), mode=ctypes.RTLD_GLOBAL)
            for function, (result, arguments) in functions.items():
                found = getattr(loaded, function)
                found.restype, found.argtypes = result, arguments
                setattr(self, function.removeprefix("ggml_"), found)
        self.backend = self.backend_cpu_init()
        registry = self.backend_cpu_reg()
        self.device = self.backend_reg_dev_get(registry, 0)
        lister = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(
            self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        )
        listed = lister(self.device)
        self.extra: list[int] = []
        while listed[len(self.extra)]:
            self.extra.append(listed[len(self.extra)])

    def __getattr__(self, name: str) -> Callable[..., Any]:  # for type checkers: __init__ has set them all
        raise AttributeError(name)

    @property
    def name(self) -> str:
        return f"ggml {self.version().decode()}"

    def place(self, tensor: int, kind: int) -> int:
        """Memory of a buffer type for one tensor; returns the buffer."""
        buffer = self.backend_buft_alloc_buffer(kind, self.backend_buft_get_alloc_size(kind, tensor))
        self.backend_tensor_alloc(buffer, tensor, self.backend_buffer_get_base(buffer))
        return buffer


class Product:
    """y [M, N] = x [M, K] w [N, K]^T in one of ggml's types, ready to be called."""

    def __init__(self, lib: Library, kind: str, w: Tensor, x: Tensor, threads: int) -> None:
        (n, k), number = w.shape, TYPES[kind]
        row_bytes = lib.row_size(number, k)
        data, floats = torch.empty(n * row_bytes, dtype=torch.uint8), w.float().contiguous()
        lib.quantize_chunk(number, floats.data_ptr(), data.data_ptr(), 0, n, k, None)
        self._build(lib, number, (n, k), data, x.float().contiguous(), threads)

    def copy(self) -> Product:
        """The same product of a weight at another place in memory."""
        made = object.__new__(Product)
        made._build(*self.made_of)
        return made

    def _build(self, lib: Library, number: int, nk: tuple[int, int], data: Tensor, x: Tensor, threads: int) -> None:
        self.made_of = (lib, number, nk, data, x, threads)
        (n, k), m = nk, x.shape[0]
        self.lib, self.shape, self.nbytes = lib, (m, n), data.numel()
        self.context = lib.init(_Params(1 << 20, None, True))
        weight = lib.new_tensor_2d(self.context, number, k, n)
        rows = lib.new_tensor_2d(self.context, TYPES["f32"], k, m)
        self.result = lib.mul_mat(self.context, weight, rows)
        plain = lib.backend_cpu_buffer_type()
        chosen = next((extra for extra in lib.extra if self._takes(extra, weight)), plain)
        self.repacked = chosen in lib.extra
        self.buffers = [lib.place(weight, chosen), lib.place(rows, plain), lib.place(self.result, plain)]
        lib.backend_tensor_set(weight, data.data_ptr(), 0, data.numel())
        lib.backend_tensor_set(rows, x.data_ptr(), 0, 4 * x.numel())
        self.graph = lib.new_graph(self.context)
        lib.build_forward_expand(self.graph, self.result)
        lib.backend_cpu_set_n_threads(lib.backend, threads)

    def _takes(self, kind: int, weight: int) -> bool:
        """Whether an extra buffer type takes this product, asked as llama.cpp asks: with an empty buffer of it in place."""
        buffer = self.lib.backend_buft_alloc_buffer(kind, 0)
        field = ctypes.cast(weight + _BUFFER_OFFSET, ctypes.POINTER(_P))
        field[0] = buffer
        try:
            return bool(self.lib.backend_dev_supports_op(self.lib.device, self.result))
        finally:
            field[0] = None
            self.lib.backend_buffer_free(buffer)

    def __call__(self) -> None:
        self.lib.backend_graph_compute(self.lib.backend, self.graph)

    def value(self) -> Tensor:
        """The result of the last call, float32 [M, N]."""
        y = torch.empty(self.shape)
        self.lib.backend_tensor_get(self.result, y.data_ptr(), 0, 4 * y.numel())
        return y

    def free(self) -> None:
        for buffer in self.buffers:
            self.lib.backend_buffer_free(buffer)
        self.lib.free(self.context)
        self.buffers = []
