"""A parallel loop for kernels, on torch's own OpenMP threads.

`parallel(body, arguments, tasks, threads)` inside a kernel calls `body(task, *arguments)` for every task, on a team of
threads that torch's products use too: libgomp's public entry point `GOMP_parallel`, in the very library that torch has
loaded, so there is one pool and no second set of spinning threads. Tasks are handed out one by one from a shared counter,
so which thread runs a task is not fixed and must not matter: a body writes only what belongs to its task.

With one thread (or where no such library is loaded, or in a child of fork, which GNU OpenMP would hang) the loop is plain
and makes no system call. Left out: Numba's own threading layers, which would need a second pool and its compile pipeline."""

# mypy: allow-untyped-defs
from __future__ import annotations

import ctypes
import glob
import logging
import os
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.core.extending import intrinsic

LOG = logging.getLogger("narrowgate")
_SYMBOL = "narrowgate_parallel"
_forked = False
_said = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def _find() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded."""
    beside = sorted(glob.glob(str(Path(torch.__file__).parent / "lib" / "libgomp*.so*")))
    beside += sorted(glob.glob(str(Path(torch.__file__).parents[1] / "torch.libs" / "libgomp*.so*")))
    for name in [*beside, "libgomp.so.1", "libiomp5.so", "libomp.so"]:
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


_address = _find()
# The symbol must exist for compiled kernels to link; without a library it is never called, since `threads()` is then 1.
binding.add_symbol(_SYMBOL, _address or ctypes.cast(ctypes.CFUNCTYPE(None)(lambda: None), ctypes.c_void_p).value)


def threads() -> int:
    """How many threads the next kernel uses: torch's number, or 1 where a team cannot be had."""
    if _forked or _address is None:
        _say_once()
        return 1
    return torch.get_num_threads()


def _say_once() -> None:
    global _said
    if not _said:
        _said = True
        why = "this process is a child of fork" if _forked else "torch's OpenMP library was not found"
        LOG.warning("narrowgate: the CPU kernels run on one thread: %s", why)


@intrinsic(prefer_literal=False)
def parallel(typingctx, body, arguments, tasks, team):
    """Call body(task, *arguments) for task in 0 .. tasks - 1 on `team` threads; returns when all are done."""
    if not isinstance(body, types.Dispatcher) or not isinstance(arguments, types.BaseTuple):
        return None
    inner = (types.int64, *arguments.types)
    body.get_call_type(typingctx, inner, {})
    sig = types.void(body, arguments, types.int64, types.int64)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return _emit(context, builder, body, arguments, inner, args)

    return sig, codegen


def _emit(context: Any, builder: ir.IRBuilder, body: Any, arguments: Any, inner: Any, args: Any) -> Any:
    long, byte = ir.IntType(64), ir.IntType(8)
    packed = context.get_value_type(arguments)
    record = ir.LiteralStructType([long, long, packed])  # the next task, the number of tasks, the arguments
    with builder.goto_entry_block():
        space = builder.alloca(record)
    zero, one = ir.Constant(long, 0), ir.Constant(long, 1)
    builder.store(ir.LiteralStructType([long, long, packed])(ir.Undefined), space)
    _, values, tasks, team = args
    for index, value in enumerate((zero, tasks, values)):
        builder.store(value, builder.gep(space, [ir.Constant(ir.IntType(32), 0), ir.Constant(ir.IntType(32), index)]))
    worker = _worker(context, builder, body, arguments, inner, record)
    opaque = builder.bitcast(space, byte.as_pointer())
    team = builder.select(builder.icmp_signed("<", tasks, team), tasks, team)
    with builder.if_else(builder.icmp_signed(">", team, one)) as (several, single):
        with several:
            kind = ir.FunctionType(ir.VoidType(), [worker.type, opaque.type, ir.IntType(32), ir.IntType(32)])
            launch = builder.module.globals.get(_SYMBOL) or ir.Function(builder.module, kind, _SYMBOL)
            builder.call(launch, [worker, opaque, builder.trunc(team, ir.IntType(32)), ir.Constant(ir.IntType(32), 0)])
        with single:
            builder.call(worker, [opaque])
    return context.get_dummy_value()


def _worker(context: Any, builder: ir.IRBuilder, body: Any, arguments: Any, inner: Any, record: ir.Type) -> ir.Function:
    """void worker(record *): take the next task until there is none."""
    module, long, word = builder.module, ir.IntType(64), ir.IntType(32)
    name = module.get_unique_name("parallel_worker")
    worker = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), name)
    worker.linkage = "internal"
    compiled = body.dispatcher.get_compile_result(types.void(*inner))
    context.active_code_library.add_linking_library(compiled.library)
    target = context.declare_function(module, compiled.fndesc)
    b = ir.IRBuilder(worker.append_basic_block("entry"))
    loop, work, done = (worker.append_basic_block(n) for n in ("loop", "work", "done"))
    space = b.bitcast(worker.args[0], record.as_pointer())
    field = [b.gep(space, [ir.Constant(word, 0), ir.Constant(word, i)]) for i in range(3)]
    tasks = b.load(field[1])
    values = b.load(field[2])
    b.branch(loop)
    b.position_at_end(loop)
    task = b.atomic_rmw("add", field[0], ir.Constant(long, 1), "monotonic")
    b.cbranch(b.icmp_signed("<", task, tasks), work, done)
    b.position_at_end(work)
    unpacked = [b.extract_value(values, i) for i in range(len(arguments.types))]
    context.call_conv.call_function(b, target, types.void, inner, [task, *unpacked])
    b.branch(loop)
    b.position_at_end(done)
    b.ret_void()
    return worker
