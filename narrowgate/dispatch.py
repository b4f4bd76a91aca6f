"""Which kernel runs a call, and the two overloads that every operator has. This file knows no operator.

An operator is declared once (`Operator`): a schema, its checks, how its output is allocated, and the kernels that can
do it. Two PyTorch operators come out of that: `narrowgate::name(...) -> Tensor` allocates, `narrowgate::name.out(..., out)`
writes; one operator that returned a given `out` would fail opcheck. Kernels of one operator share one signature, the
schema's, plus `out`; the reference is just the kernel that takes every call.

Rules: `impl=None` takes the device's kernel if it accepts the call, else the reference with one FallbackWarning per
operator and reason (an error under `strict()`). `impl="cpu"|"gpu"` never falls back. `plan()` is a pure function of shapes,
dtypes, strides and device. Left out: priorities, environment variables, tuning at first use."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgate.errors import FallbackWarning, InputError, UnsupportedError

LIBRARY = torch.library.Library("narrowgate", "DEF")
OPERATORS: dict[str, Operator] = {}
IMPLS = ("reference", "cpu", "gpu")
_HOME = {"cpu": "cpu", "cuda": "gpu"}  # device type -> the impl that its calls take
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SCALARS = (str, type(None), bool, int, float, torch.dtype)
_TAKES: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "float": (int, float),
    "int": int,
    "bool": bool,
    "str": str,
}  # of a schema's types
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_strict = contextvars.ContextVar("narrowgate_strict", default=False)
_debug = contextvars.ContextVar("narrowgate_debug_checks", default=False)
_recording = contextvars.ContextVar("narrowgate_recording", default=False)
_warned: set[tuple[str, str]] = set()


@contextlib.contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Within it, a call that would run the reference where a kernel was expected raises UnsupportedError instead."""
    token = _strict.set(on)
    try:
        yield
    finally:
        _strict.reset(token)


@contextlib.contextmanager
def debug_checks(on: bool = True) -> Iterator[None]:
    """Within it, VALUES of indices are checked on the GPU too. That synchronises: not for use inside a capture."""
    token = _debug.set(on)
    try:
        yield
    finally:
        _debug.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Within it the runner records what calls do, to do it again without them: implementations are called directly, and the
    values of indices, which the runner makes itself, are not looked at."""
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


def checks_values(t: torch.Tensor) -> bool:
    """Whether the values of an index tensor may be looked at: on the CPU always, elsewhere under `debug_checks()`."""
    if _recording.get():
        return False
    return t.device.type == "cpu" or (_debug.get() and t.device.type != "meta")


@dataclass(frozen=True)
class Plan:
    """What a call would run, and why not something else. `print(ng.plan("linear", x, w))` shows it."""

    op: str
    impl: str
    kernel: str
    layout: str | None = None  # the layout of the packed operand that the kernel reads
    tile: tuple[int, ...] | None = None
    accumulate: str = "float32"
    reveals: str | None = None  # the dtype in which a one-hot activation shows a decoded weight bit for bit
    workspace_bytes: int = 0
    batch_invariant: bool = True
    contract: str = ""
    refusals: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = {k: v for k, v in self.__dict__.items() if v not in (None, (), "") and k not in ("op", "refusals")}
        lines = [f"{self.op}: " + ", ".join(f"{k}={v}" for k, v in shown.items())]
        return "\n".join(lines + [f"  refused {r}" for r in self.refusals])


def _nothing(*args: Any, **kwargs: Any) -> Any:
    return {}


def _no_reasons(*args: Any, **kwargs: Any) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Kernel:
    """One implementation of one operator. `target` is "module:function", imported at first use, so that importing
    narrowgate imports no kernel."""

    impl: str
    target: str
    refuse: Callable[..., Sequence[str]] = _no_reasons  # reasons why it cannot take a call; never looks at values
    describe: Callable[..., dict[str, Any]] = _nothing  # the fields of the plan that only it knows

    @property
    def name(self) -> str:
        return self.target.partition(":")[2]

    def load(self) -> Callable[..., None]:
        return _load(self.target)


@functools.cache
def _load(target: str) -> Callable[..., None]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass
class Operator:
    """`inputs`: the schema's arguments, without `out` and `impl`. `returns`: how many tensors come back ("list" for a
    Tensor[], 0 for an operator that only mutates). `allocate(*inputs)` makes them and is the fake kernel too.
    `check(*inputs)` raises InputError; `check_values` looks at the values of indices where that costs no sync. Calling the
    operator takes the schema's arguments, `impl` and, where it has one, `out`."""

    name: str
    inputs: str
    reference: str  # "module:function"; it takes every call that passes the checks
    allocate: Callable[..., Any] | None
    check: Callable[..., None] = _nothing
    check_values: Callable[..., None] = _nothing
    returns: int | str = 1
    has_out: bool = True
    out_dtype: str = "float"  # a given `out` may be: "float", any of the three when an allocated one is; "same", only its dtype
    flatten: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None  # public arguments -> the schema's
    remember: bool = False  # `check` looks at nothing but shapes, strides, dtypes, devices: what has passed need not pass again
    kernels: dict[str, Kernel] = field(default_factory=dict)
    passed: dict[Any, Kernel] = field(default_factory=dict, repr=False)  # signatures of such calls, and their kernel

    def __post_init__(self) -> None:
        OPERATORS[self.name] = self
        self.add(Kernel("reference", self.reference))
        kind = {0: "()", 1: "Tensor", "list": "Tensor[]"}.get(self.returns)
        if kind is None:
            kind = "(" + ", ".join(["Tensor"] * int(self.returns)) + ")"
        inputs = self.inputs if "*," in self.inputs else self.inputs + ", *"
        LIBRARY.define(f"{self.name}({inputs}, str? impl=None) -> {kind}")
        LIBRARY.impl(self.name, self._functional, "CompositeExplicitAutograd")
        torch.library.register_fake(f"narrowgate::{self.name}", self._fake, lib=LIBRARY)
        if self.has_out:
            LIBRARY.define(f"{self.name}.out({inputs}, str? impl=None, Tensor(b!) out) -> ()")
            LIBRARY.impl(f"{self.name}.out", self._into, "CompositeExplicitAutograd")
            torch.library.register_fake(f"narrowgate::{self.name}.out", _fake_into, lib=LIBRARY)
        packet = getattr(torch.ops.narrowgate, self.name)
        self._default, self._out = packet.default, packet.out if self.has_out else None

    def __call__(self, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if out is None:
            if not _direct():
                return self._default(*args, **kwargs)
            if self.remember and not _recording.get():
                known = self.passed.get(_signature(args, kwargs))
                if known is not None:  # the same shapes, strides, dtypes, devices and options ran before
                    return self._again(known, args, kwargs)
            return (self._functional if _eager(args) else self._default)(*args, **kwargs)
        if self._out is None:
            raise InputError(f"{self.name}: takes no out")
        self._out(*args, **kwargs, out=out)
        return out

    def add(self, kernel: Kernel) -> None:
        self.kernels[kernel.impl] = kernel
        self.passed.clear()

    def _again(self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is left of a call whose like passed its checks and was given to `kernel` before."""
        kwargs.pop("impl", None)
        if self.check_values is not _nothing:
            self.check_values(*args, **kwargs)
        return self._run(kernel, args, kwargs)

    def _run(self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.allocate is None:
            kernel.load()(*args, **kwargs)
            return None
        out = self.allocate(*args, **kwargs)
        kernel.load()(*args, **kwargs, out=out)
        return out

    # ---- the two overloads
    def _functional(self, *args: Any, impl: str | None = None, **kwargs: Any) -> Any:
        self._guard(args, kwargs)
        kernel = self._choose(args, kwargs, impl)
        if self.remember and kernel.impl != "reference":
            self._remember(_signature(args, {**kwargs, "impl": impl}), kernel)
        return self._run(kernel, args, kwargs)

    def _into(self, *args: Any, out: torch.Tensor, impl: str | None = None, **kwargs: Any) -> None:
        self._guard(args, kwargs)
        kernel = self._choose(args, kwargs, impl)
        assert self.allocate is not None
        want = self.allocate(*(_on_meta(a) for a in args), **{k: _on_meta(v) for k, v in kwargs.items()})
        if out.shape != want.shape:
            raise InputError(f"{self.name}: expected out of shape {tuple(want.shape)}, got {tuple(out.shape)}")
        self._check_out(out, want.dtype, _device(args, kwargs))
        kernel.load()(*args, **kwargs, out=out)

    def _check_out(self, out: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        if torch.is_grad_enabled() and out.requires_grad:
            raise UnsupportedError(f"{self.name}: inference only; expected an out that requires no grad (use torch.no_grad())")
        if out.device != device:
            raise InputError(f"{self.name}: expected out on {device}, got {out.device}")
        allowed = _FLOATS if self.out_dtype == "float" and dtype in _FLOATS else (dtype,)
        if out.dtype not in allowed:
            raise InputError(f"{self.name}: expected out of dtype {', '.join(map(_short, allowed))}, got {_short(out.dtype)}")
        if out.ndim and out.shape[-1] > 1 and out.stride(-1) != 1:
            raise InputError(f"{self.name}: expected out with a contiguous last axis, got strides {list(out.stride())}")
        if any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True)):
            raise InputError(f"{self.name}: expected out without overlap, got strides {list(out.stride())}")

    def _fake(self, *args: Any, impl: str | None = None, **kwargs: Any) -> Any:
        return None if self.allocate is None else self.allocate(*args, **kwargs)

    def _guard(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._checked(args, kwargs)
        except (AttributeError, TypeError) as error:  # a check that broke down: most often an argument is no tensor at all
            wrong = self._mistyped(args, kwargs)
            raise (InputError(f"{self.name}: {wrong}") if wrong else error) from None

    def _mistyped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The first argument whose Python type is none that the schema takes, in words, or ""."""
        schema = self._default._schema.arguments
        given = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
        for argument in schema:
            kind, value = str(argument.type), given.get(argument.name, argument.default_value)
            optional, kind = kind.startswith("Optional["), kind.removeprefix("Optional[").rstrip("]")
            takes = _TAKES.get(kind)
            if takes is not None and not (value is None and optional) and not isinstance(value, takes):
                return f"expected {argument.name} of type {kind}, got {type(value).__name__}"
        return ""

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(args, kwargs)):
            raise UnsupportedError(f"{self.name}: inference only; expected no input that requires grad (use torch.no_grad())")
        self.check(*args, **kwargs)
        if self.check_values is not _nothing:
            self.check_values(*args, **kwargs)

    def _remember(self, seen: Any, kernel: Kernel) -> None:
        if seen is not None:
            if len(self.passed) > 4096:
                self.passed.clear()
            self.passed[seen] = kernel

    # ---- choosing
    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], impl: str | None) -> Kernel:
        if impl is None:  # the short way, for the usual call: the device's kernel, if it does not refuse
            usual = self.kernels.get(_HOME.get(_device(args, kwargs).type, ""))
            takes = usual is not None and (usual.impl != "gpu" or not _no_gpu("cuda"))
            if usual is not None and takes and not usual.refuse(*args, **kwargs):
                return usual
        kernel, refusals, absent = self.candidates(args, kwargs, impl)
        if kernel is None:
            raise UnsupportedError(f"{self.name}: impl={impl!r} cannot take this call: " + "; ".join(refusals))
        if refusals and _strict.get():
            raise UnsupportedError(f"{self.name}: the reference would run, and strict() is on: " + "; ".join(refusals))
        if refusals and not absent:
            for reason in refusals:
                if (self.name, reason) not in _warned:
                    _warned.add((self.name, reason))
                    warnings.warn(f"{self.name}: the reference runs: {reason}", FallbackWarning, stacklevel=4)
        return kernel

    def candidates(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], impl: str | None
    ) -> tuple[Kernel | None, tuple[str, ...], bool]:
        """(kernel that runs, reasons of those that do not, whether the reason is only that no kernel exists yet)."""
        if impl is not None and impl not in IMPLS:
            raise InputError(f"{self.name}: expected impl to be None or one of {', '.join(IMPLS)}, got {impl!r}")
        device = _device(args, kwargs).type
        wanted = impl or _HOME.get(device, "reference")
        kernel = self.kernels.get(wanted)
        if kernel is None:
            reasons: tuple[str, ...] = (f"{wanted}: this operator has no {wanted} kernel yet",)
        else:
            found = (_no_gpu(device) if wanted == "gpu" else ()) or kernel.refuse(*args, **kwargs)
            reasons = tuple(f"{kernel.impl} ({kernel.name}): {r}" for r in found)
            if not reasons:
                return kernel, (), False
        # Only impl=None may end at the reference. On a GPU an absent kernel is news; on the CPU the reference is the CPU form.
        absent = kernel is None and device == "cpu"
        return (self.kernels["reference"] if impl is None else None), reasons, absent

    def plan(self, *args: Any, impl: str | None = None, **kwargs: Any) -> Plan:
        """The plan of a call with the schema's own arguments."""
        self.check(*args, **kwargs)
        kernel, refusals, _ = self.candidates(args, kwargs, impl)
        if kernel is None:
            raise UnsupportedError(f"{self.name}: impl={impl!r} cannot take this call: " + "; ".join(refusals))
        return Plan(self.name, kernel.impl, kernel.name, refusals=refusals, **kernel.describe(*args, **kwargs))


def plan(op: str, *args: Any, impl: str | None = None, **kwargs: Any) -> Plan:
    """What `op(*args, **kwargs)` would run: kernel, layout, workspace, summation, refusals. It runs nothing and sees no values.

    >>> import torch, narrowgate as ng
    >>> ng.plan("l2_norm", torch.randn(3, 5), impl="reference").kernel
    'l2_norm'
    """
    if op not in OPERATORS:
        raise InputError(f"plan: expected one of {', '.join(sorted(OPERATORS))}, got {op!r}")
    operator = OPERATORS[op]
    kwargs.pop("out", None)
    if operator.flatten is not None:
        args, kwargs = operator.flatten(*args, **kwargs)
    return operator.plan(*args, impl=impl, **kwargs)


@functools.cache
def _no_gpu(device: str) -> tuple[str, ...]:
    """Why no GPU kernel at all can run on tensors of this device type."""
    if importlib.util.find_spec("triton") is None:
        return ("Triton is not installed: pip install 'narrowgate[gpu]'",)
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (f"expected CUDA tensors (or CPU tensors under Triton's interpreter, TRITON_INTERPRET=1), got {device}",)
    return ()


def _fake_into(*args: Any, **kwargs: Any) -> None:
    return None


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [v for v in value if isinstance(v, torch.Tensor)]
    return found


def _direct() -> bool:
    """Whether nothing traces: then torch's dispatcher, which costs as much as a small kernel, has nothing to add for plain
    tensors, and the implementation is called directly."""
    if torch.compiler.is_compiling():  # first: Dynamo traces no context variable
        return False
    if _recording.get():
        return True
    return not torch._C._len_torch_dispatch_stack() and not torch._C._functorch.peek_interpreter_stack()


def untraced() -> bool:
    """Whether nothing traces and the runner records nothing: a call is then no more than its result."""
    return _direct() and not _recording.get()


def _eager(args: tuple[Any, ...]) -> bool:
    """Whether the tensors are plain ones that hold data."""
    if _recording.get():
        return True
    for value in args:
        for t in value if type(value) is list else (value,):
            if isinstance(t, torch.Tensor) and (type(t) not in _PLAIN or t.is_meta):
                return False
    return True


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Everything that a check of plain tensors may look at, as one key; None where something is no plain tensor or wants a gradient."""
    grad = torch.is_grad_enabled()
    key: list[Any] = [*kwargs]
    for value in (*args, *kwargs.values()):
        kind = type(value)  # exact types first: asking isinstance of a tensor is slow
        if kind in _PLAIN:
            value = (value,)
        elif kind is not list:
            if kind not in _SCALARS and isinstance(value, torch.Tensor):
                return None
            key.append(value)
            continue
        for t in value:
            if type(t) not in _PLAIN or (grad and t.requires_grad):
                return None
            key += (t.shape, t.stride(), t.dtype, t.device)
        key.append(len(value))
    return tuple(key)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    first = args[0] if args else None
    if type(first) is list and first:
        first = first[0]
    if isinstance(first, torch.Tensor):
        return first.device
    for t in _tensors(args, kwargs):
        return t.device
    raise InputError("expected at least one tensor among the arguments")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return [_on_meta(v) for v in value]
    return value
