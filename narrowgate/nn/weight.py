"""One tensor of a checkpoint, packed or dense, as a module whose buffers are integers.

A dense bfloat16 weight is kept as its int16 bit patterns and shown as a bfloat16 view. `module.to(torch.float16)`, which
casts every floating tensor that it finds, therefore finds none: the checkpoint's bits survive until they are saved.
`prepare` puts a matrix into the layout that the device's products read; `stored` gives it back as the checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from narrowgate import ops
from narrowgate.formats import element, scheme
from narrowgate.packing import PackedTensor, flatten, unflatten
from narrowgate.packing.join import cut_rows, own
from narrowgate.packing.operand import DENSE

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weight(nn.Module):
    """`weight()` is what products read, a PackedTensor or a dense Tensor, on whatever device the module is.

    `packed`: whether the checkpoint holds it packed; `dtype`: a dense one's; `scheme`: a packed one's, or its element;
    `nbytes`: every byte that storing it takes.
    """

    def __init__(self, value: PackedTensor | Tensor) -> None:
        super().__init__()
        self.dtype = None if isinstance(value, PackedTensor) else value.dtype
        self.packed = self.dtype is None
        self.scheme = (value.scheme or value.element) if isinstance(value, PackedTensor) else None
        self.shape = tuple(value.shape)
        self._cut: Callable[[], PackedTensor] | None = None
        self.nbytes = sum(t.numel() * t.element_size() for t in flatten(value)[0])
        self._hold(value)

    def _hold(self, value: PackedTensor | Tensor) -> None:
        self._current: PackedTensor | Tensor | None = value
        tensors, self._described = flatten(value)
        for name in list(self._buffers):
            delattr(self, name)
        for i, tensor in enumerate(tensors):
            bits = tensor.detach()
            bits = bits if isinstance(value, PackedTensor) else bits.view(_BITS[tensor.element_size()])
            self.register_buffer(f"part_{i}", bits)

    def forward(self) -> PackedTensor | Tensor:
        if self._cut is not None:
            return self._cut()
        if self._current is None:
            tensors = list(self.buffers())
            if self._described == DENSE and self.dtype is not None:
                self._current = tensors[0].view(self.dtype)
            else:
                self._current = unflatten(tensors, self._described)
        return self._current

    def dense(self) -> Tensor:
        """The dense tensor of a weight that is neither packed nor prepared."""
        value = self()
        assert isinstance(value, Tensor)
        return value

    def prepare(self) -> None:
        """Hold a matrix, or a stack of them, as its device's products read it: the same bits in another order. On the CPU a
        dense one too (its dtype is an element like any other). Where no kernel reads it nothing changes."""
        value = self()
        if len(value.shape) < 2 or (value.device.type != "cpu" and isinstance(value, Tensor)):
            return
        dense = isinstance(value, Tensor)
        ready = ops.prepare(_as_packed(value) if isinstance(value, Tensor) else value)
        if not dense or ready.layout == "lanes16@1":
            self._hold(ready)

    def share(self, view: PackedTensor | Tensor) -> None:
        """Hold `view`, the same bits in memory that another weight owns."""
        self._hold(view)

    def lend(self, whole: Weight, start: int, stop: int) -> None:
        """Hold nothing: be rows [start, stop) of `whole`, cut out of it (a copy) for whoever asks."""
        value = self()
        assert isinstance(value, PackedTensor)
        factors, zero = own(value)
        for name in list(self._buffers):
            delattr(self, name)
        self._current = None
        self._cut = lambda: cut_rows(_packed(whole), start, stop, factors, zero)

    def stored(self) -> PackedTensor | Tensor:
        """As a file has it: dense, or in its scheme's own layout, scales in rows. A device's layout never reaches a file."""
        value = self()
        if isinstance(value, Tensor):
            return value
        if self.dtype is not None:
            return value.codes().to(_BITS[self.dtype.itemsize]).view(self.dtype)
        plain = "words@1" if element(value.element).bits in (2, 4, 8, 16, 32) else "bytes@1"
        return value.with_layout(plain if value.scheme is None else scheme(value.scheme).layout, scales="rows@1")

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self._current = None
        return super()._apply(fn, recurse)


def _packed(w: Weight) -> PackedTensor:
    value = w()
    assert isinstance(value, PackedTensor)
    return value


def _as_packed(w: Tensor) -> PackedTensor:
    """A dense tensor as codes of its own dtype, without scales and without a copy where its rows allow it."""
    name = str(w.dtype).removeprefix("torch.")
    bits = w.detach().contiguous().view(_BITS[w.element_size()])
    return PackedTensor(name, "rows@1", bits, tuple(w.shape))
