"""`narrowgate warmup`: compile the CPU kernels now, so that the first model, or a container that starts cold, need not.

It runs every operator of a model once, and each product that a scheme has, on small tensors: kernels take sizes as numbers, so
these are the very ones that large models use. They are kept under the user's cache directory (docs/performance.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from narrowgate.cli import console
from narrowgate.cli.machine import machine
from narrowgate.cli.options import Json
from narrowgate.errors import InputError, UnsupportedError

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "intermediate_size": 64,
}  # fmt: skip


def warmup(
    scheme: Annotated[list[str] | None, typer.Option(help="only products of this scheme; repeatable; by default all")] = None,
    json: Json = False,
) -> None:
    """Compile the CPU kernels ahead and keep them on disk."""
    from narrowgate.formats import schemes
    from narrowgate.ops.host import missing

    wanted = scheme or list(schemes())
    for name in wanted:
        if name not in schemes():
            raise InputError(f"warmup: expected --scheme among {', '.join(schemes())}, got {name!r}")
    if missing():
        raise UnsupportedError(f"warmup: there are no CPU kernels on this machine: {missing()[0]}")
    from narrowgate.simd import cpu_compile

    began = time.perf_counter()
    with console.progress() as bar:
        task = bar.add_task("compiling", total=len(wanted))
        cpu_compile.on_compile.append(console.notice)
        try:
            for name in _all(wanted):
                bar.update(task, description=name)
                bar.advance(task)
        finally:
            cpu_compile.on_compile.remove(console.notice)
    seconds = time.perf_counter() - began
    ready, made = cpu_compile.SPECIALISATIONS, cpu_compile.COMPILED
    document: dict[str, Any] = {
        "kernels": [{"name": name, "seconds": took, "compiled": name in made} for name, took in ready.items()],
        "compiled": len(made), "seconds": seconds, "directory": str(cpu_compile.cache_directory()), "machine": machine("cpu"),
    }  # fmt: skip
    if json:
        console.print_json(document)
        return
    for kernel in document["kernels"]:
        print(f"{kernel['seconds']:7.2f} s  {kernel['name']}" + ("" if kernel["compiled"] else "  (was there)"))
    print(f"{len(ready)} kernels, {len(made)} of them compiled now, {seconds:.1f} s, kept in {document['directory']}")


def _all(schemes: list[str]) -> Iterator[str]:
    """Run everything once; gives each scheme's name when it is done."""
    import torch

    from narrowgate import ops
    from narrowgate.bench.model import from_config
    from narrowgate.models.published import PUBLISHED
    from narrowgate.nn.weight import Weight

    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    for name in schemes:
        w = ops.quantize(x.repeat(4, 1), name)
        ready = ops.prepare(w)
        w.dequantize(torch.float32)
        ops.embedding(torch.tensor([1]), w)
        ops.linear(x, w)
        for rows in (1, 3, 9):
            for input_scheme in (None, "int8_g32"):
                ops.linear(x[:rows], ready, input_scheme=input_scheme)
        model = from_config({**PUBLISHED["qwen3.5-0.8b"], **SIZES}, name)
        cache = model.new_cache(2)
        for _ in range(2):
            model.step(torch.zeros(2, 2, dtype=torch.int64), cache)
            model.step(torch.zeros(2, 1, dtype=torch.int64), cache)
        yield name
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        dense = Weight(x.repeat(4, 1).to(dtype))
        dense.prepare()
        for rows in (1, 3, 9):
            ops.linear(x[:rows], dense())
    ops.matmul(x[:3, :3], x[:3])
    ops.quantize_grouped(x[None], torch.tensor([9]), "mxfp8_e4m3", global_scale=1.0)
