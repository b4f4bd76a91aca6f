"""One tensor of a checkpoint, packed or dense, as a module whose buffers are integers.

A dense bfloat16 weight is kept as its int16 bit patterns and shown as a bfloat16 view. `module.to(torch.float16)`, which
casts every floating tensor that it finds, therefore finds none: the checkpoint's bits survive until they are saved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgate.packing import PackedTensor, flatten, unflatten

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weight(nn.Module):
    """`weight()` is the PackedTensor or the dense Tensor, on whatever device the module is."""

    def __init__(self, value: PackedTensor | Tensor) -> None:
        super().__init__()
        self._current: PackedTensor | Tensor | None = value
        tensors, self._described = flatten(value)
        self._dtype = None if isinstance(value, PackedTensor) else value.dtype
        for i, tensor in enumerate(tensors):
            bits = tensor.detach() if self._dtype is None else tensor.detach().view(_BITS[tensor.element_size()])
            self.register_buffer(f"part_{i}", bits)

    def forward(self) -> PackedTensor | Tensor:
        if self._current is None:
            stored = list(self.buffers())
            self._current = unflatten(stored, self._described) if self._dtype is None else stored[0].view(self._dtype)
        return self._current

    def dense(self) -> Tensor:
        """The dense tensor of a weight that is never packed."""
        value = self()
        assert isinstance(value, Tensor)
        return value

    @property
    def packed(self) -> bool:
        return self._dtype is None

    @property
    def nbytes(self) -> int:
        """Every stored byte."""
        return sum(b.numel() * b.element_size() for b in self.buffers())

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self._current = None
        return super()._apply(fn, recurse)
