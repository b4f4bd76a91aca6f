"""`narrowgate bench model`: tokens a second of a published geometry with random weights, and where the time goes.

Left out: how it is measured (narrowgate.bench.model and model_gpu), and what a format costs in quality (the compare command)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from narrowgate.cli import console
from narrowgate.cli.machine import command_line, machine
from narrowgate.cli.options import Device, Json, Strict, existing_device
from narrowgate.errors import InputError

if TYPE_CHECKING:
    from narrowgate.engine.model import Model


def model(
    config: Annotated[
        str, typer.Option(help="a published geometry: qwen3.5-0.8b, -4b, -27b, -35b-a3b, qwen3-next-80b-a3b")
    ] = "qwen3.5-0.8b",
    scheme: Annotated[str, typer.Option(help="of the packed weights")] = "int4_g32",
    layers: Annotated[int | None, typer.Option(help="only so many of its layers, where memory is short")] = None,
    prompt: Annotated[int, typer.Option(help="tokens of the prompt")] = 512,
    steps: Annotated[int, typer.Option(help="decoded tokens that are timed")] = 32,
    threads: Annotated[int | None, typer.Option(help="by default torch's number")] = None,
    device: Device = "cpu",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Build a random model of a real geometry in a scheme; time prefill and decoding, part by part, against the memory floor."""
    import torch

    from narrowgate import dispatch
    from narrowgate.bench.model import random_model
    from narrowgate.formats import schemes

    if scheme not in schemes():
        raise InputError(f"bench model: expected --scheme among {', '.join(schemes())}, got {scheme!r}")
    if min(prompt, steps, 1 if threads is None else threads) < 1:
        raise InputError("bench model: expected --prompt, --steps and --threads of at least 1")
    existing_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    with dispatch.strict(strict):
        console.notice(f"building {config} in {scheme}")
        built = random_model(config, scheme, layers=layers, device=device)
        console.notice("measuring")
        document = (_on_cpu if device == "cpu" else _on_gpu)(built, prompt, steps)
    document = {
        "config": config, "scheme": scheme, "layers": built.config.layers, "all_layers": layers is None, "model_bytes": built.nbytes,
        **document, "machine": machine(device), "command": command_line(),
    }  # fmt: skip
    if json:
        console.print_json(document)
    else:
        _print(document)


def _on_cpu(built: Model, prompt: int, steps: int) -> dict[str, Any]:
    from narrowgate.bench.model import measure
    from narrowgate.bench.timing import roofs

    roof = roofs("cpu")["read"]
    found = measure(built, prompt=prompt, steps=steps)
    floor = found.token_bytes / roof * 1e6
    return {
        "peak_bytes": found.peak_bytes, "prompt_tokens": found.speed.prompt_tokens,
        "prefill_tokens_per_second": found.speed.prefill, "decode_tokens_per_second": found.speed.decode,
        "prefill_seconds_by_layer": found.prompt_kinds, "token_bytes": found.token_bytes, "weight_bytes": found.weight_bytes,
        "state_bytes": found.state_bytes, "read_roof_bytes_per_second": roof, "floor_microseconds": floor,
        "step_microseconds": found.step, "share_of_floor": floor / found.step, "decode_microseconds_by_layer": found.kinds,
        "decode_microseconds_by_kernel": found.kernels, "calls": found.calls, "call_cost_microseconds": found.call_cost,
        "outside_kernels": found.outside,
    }  # fmt: skip


def _on_gpu(built: Model, prompt: int, steps: int) -> dict[str, Any]:
    from narrowgate.bench.model_gpu import measure
    from narrowgate.bench.timing import roofs

    found = measure(built, prompt=prompt, steps=steps)
    known = roofs("cuda")
    floors = {kind: k.floor(known) for kind, k in found.kinds.items()}
    floor, states = sum(floors.values()), sum(k.copied for k in found.kinds.values())
    weights = sum(k.read for k in found.kinds.values())
    return {
        "peak_bytes": found.peak_bytes, "prompt_tokens": found.speed.prompt_tokens,
        "prefill_tokens_per_second": found.speed.prefill, "decode_tokens_per_second": found.speed.decode,
        "prefill_seconds_by_layer": found.prompt_kinds, "token_bytes": weights + states, "weight_bytes": weights,
        "state_bytes": states, "read_roof_bytes_per_second": known["read"], "copy_roof_bytes_per_second": known["copy"],
        "floor_microseconds": floor, "step_microseconds": found.step, "replay_microseconds": found.replay,
        "capture_seconds": found.capture, "share_of_floor": floor / found.replay,
        "decode_microseconds_by_layer": {kind: k.microseconds for kind, k in found.kinds.items()},
        "floor_microseconds_by_layer": floors, "outside_kernels": max(0.0, 1 - found.replay / found.step),
    }  # fmt: skip


def _print(d: dict[str, Any]) -> None:
    console.out().print(_table(d))
    captured, memory = "replay_microseconds" in d, "device" if "replay_microseconds" in d else "process"
    part = "" if d["all_layers"] else f", {d['layers']} of its layers"
    print(
        f"{d['config']}{part}, {d['scheme']}: {d['model_bytes'] / 1e6:,.0f} MB of weights, "
        f"{memory} peak {d['peak_bytes'] / 1e9:.2f} GB"
    )
    print(f"prefill: {console.rate(d['prefill_tokens_per_second'])} tokens/s ({d['prompt_tokens']} tokens)")
    print(
        f"decode: {console.rate(d['decode_tokens_per_second'])} tokens/s, the median step {d['step_microseconds'] / 1e3:.2f} ms"
    )
    print(
        f"floor: {d['token_bytes'] / 1e6:.0f} MB a token ({d['weight_bytes'] / 1e6:.0f} of weights, {d['state_bytes'] / 1e6:.1f} of "
        f"states) at {d['read_roof_bytes_per_second'] / 1e9:.3g} GB/s = {d['floor_microseconds'] / 1e3:.2f} ms: "
        f"{100 * d['share_of_floor']:.0f} % of it reached"
    )  # fmt: skip
    if captured:
        print(
            f"one CUDA graph a step: {d['replay_microseconds'] / 1e3:.3f} ms replayed, captured in {d['capture_seconds']:.2f} s; "
            f"the kinds alone {sum(d['decode_microseconds_by_layer'].values()) / 1e3:.3f} ms; outside the graph "
            f"{100 * d['outside_kernels']:.1f} % of a step"
        )  # fmt: skip
    else:
        print(
            f"outside kernels: {100 * d['outside_kernels']:.1f} % of a step ({d['calls']} calls of "
            f"{d['call_cost_microseconds']:.2f} µs)"
        )  # fmt: skip
    print("machine: " + ", ".join(f"{key} {value}" for key, value in d["machine"].items()))
    print(f"command: {d['command']}")


def _table(d: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("kind of layer", no_wrap=True)
    floors = d.get("floor_microseconds_by_layer")
    for name in ("decode µs", "share", *(("floor µs", "reached") if floors else ()), "prefill ms", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    decode, prefill = d["decode_microseconds_by_layer"], d["prefill_seconds_by_layer"]
    both, all_decode, all_prefill = dict.fromkeys([*prefill, *decode]), sum(decode.values()), sum(prefill.values())
    for kind in both:
        a, b = decode.get(kind, 0.0), prefill.get(kind, 0.0)
        table.add_row(
            kind,
            f"{a:,.0f}",
            f"{100 * a / max(all_decode, 1e-9):.0f} %",
            *((f"{floors.get(kind, 0.0):,.1f}", f"{100 * floors.get(kind, 0.0) / max(a, 1e-9):.0f} %") if floors else ()),
            f"{1e3 * b:,.1f}",
            f"{100 * b / max(all_prefill, 1e-9):.0f} %",
        )
    return table
