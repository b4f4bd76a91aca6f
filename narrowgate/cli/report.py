"""What `compare` prints: one table that fits 80 columns, and beneath it what one needs to trust or repeat it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from rich.table import Table

from narrowgate.cli import console

if TYPE_CHECKING:
    from narrowgate.cli.compare import Comparison, Row

Note = tuple[str, str]  # what it is about, and the text


def show(found: Comparison) -> None:
    out = console.out()
    out.print(_table(found))
    print()
    for key, text in _notes(found):
        lines = textwrap.wrap(text, min(out.width, 120) - 10, break_long_words=False, break_on_hyphens=False)
        print("\n".join((key if i == 0 else "").ljust(10) + line for i, line in enumerate(lines)))


def _table(found: Comparison) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("scheme", no_wrap=True)
    compared = len(found.rows) > 1
    names = ["bits/value", "model bytes", "bits/byte", *(("KL nats", "top-1 %") if compared else ()), "prefill/s", "decode/s"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(row.label, *_cells(row, compared))
    return table


def _cells(row: Row, compared: bool) -> list[str]:
    assert row.score is not None
    assert row.size is not None
    assert row.speed is not None
    distance = []
    if compared:
        distance = ["-", "-"] if row.reference else [_small(row.score.kl), f"{100 * row.score.top1:.2f}"]
    return [
        f"{row.size.bits_per_value:.3f}", console.nbytes(row.size.nbytes), f"{row.score.bits_per_byte:.4f}", *distance,
        console.rate(row.speed.prefill), console.rate(row.speed.decode),
    ]  # fmt: skip


def _small(value: float) -> str:
    """Three digits, without an exponent as long as that is readable."""
    return f"{value:.1e}" if 0 < abs(value) < 1e-5 else f"{value:.3g}" if abs(value) >= 1 else f"{value:.6f}"[:8]


def _notes(found: Comparison) -> list[Note]:
    p, t, m = found.passage, found.task, found.machine
    python = f" of Python {p.python}" if p.python else ""
    start = f"after {t.start}" if t.start else "without a start token"
    notes = [
        (
            "text",
            f"{p.origin}{python}: {', '.join(p.names)}; {_amount(found)}; {t.scored_bytes:,} bytes, {t.tokens:,} tokens scored",
        ),
        ("sha256", f"{p.sha256} (the scored text)"),
        (
            "scoring",
            f"each document alone, {start}, in windows of at most {t.context} tokens; bits/byte: -log2 p over UTF-8 bytes",
        ),
        ("compared", _reference(found)),
        *_packed(found),
        *_contracts(found.rows),
        ("tokens/s", _speed(found)),
        *(("note", note) for note in dict.fromkeys(note for row in found.rows for note in row.notes)),
    ]
    threads = "1 thread" if m["threads"] == 1 else f"{m['threads']} threads"
    gpu = f", {m['gpu']}" if "gpu" in m else ""
    versions = f"Python {m['python']}, torch {m['torch']}, narrowgate {m['narrowgate']}"
    return [
        *notes,
        ("machine", f"{m['cpu']}, {threads}{gpu}; {versions}"),
        ("command", f"{found.command} ({found.seconds:.0f} s)"),
    ]


def _amount(found: Comparison) -> str:
    p = found.passage
    if p.nbytes == p.total_bytes:
        return "all of it"
    return f"the beginning{' of each' if len(p.names) > 1 else ''}, {p.nbytes:,} of {p.total_bytes:,} bytes"


def _reference(found: Comparison) -> str:
    if len(found.rows) == 1:
        return "with nothing: a packed checkpoint is its own row, unless --reference FOLDER says what to compare it with"
    first = found.rows[0]
    return (
        f"with {first.label} ({first.path}): KL({first.label} || scheme) in nats, mean over tokens, whole vocabulary; top-1: how "
        f"often both rank the same token first. Its logits took {console.nbytes(found.spilled)} bytes of temporary disk, now free"
    )


def _packed(found: Comparison) -> list[Note]:
    """Which rows packed what: most often all the same."""
    users: dict[str, list[str]] = {}
    for row in found.rows:
        s = row.size
        if s is not None and s.packed_tensors:
            where = [name for name in ("embedding", "head") if name in row.packed_ends]
            ends = " and ".join(where) + " among them" if where else "neither embedding nor head"
            text = f"{s.packed_tensors} tensors, {s.packed_values:,} values, {ends}"
            text += f"; {s.kept_tensors} tensors, {s.kept_bytes:,} bytes, kept as in the checkpoint"
            users.setdefault(text, []).append(row.label)
    overrides = f" (overrides: {', '.join(found.overrides)})" if found.overrides else ""
    packed_rows = sum(len(names) for names in users.values())
    return [
        ("packed", text + (f" ({_who(names, packed_rows)})" if len(users) > 1 else "") + overrides)
        for text, names in users.items()
    ]


def _contracts(rows: list[Row]) -> list[Note]:
    """One line for each different contract, with the schemes that ran under it."""
    users: dict[str, list[str]] = {}
    for row in rows:
        for plan in row.contracts:
            names = users.setdefault(_contract(plan), [])
            if row.label not in names:
                names.append(row.label)
    return [("contract", f"{text} ({_who(names, len(rows))})") for text, names in users.items()]


def _who(names: list[str], rows: int) -> str:
    return "every row" if len(names) == rows else f"{', '.join(names)}"


def _contract(plan: dict[str, Any]) -> str:
    batch = "batch-invariant" if plan["batch_invariant"] else "not batch-invariant"
    what = plan["contract"] or f"{plan['accumulate']} sums"
    refused = f"; fallback: {'; '.join(plan['refusals'])}" if plan["refusals"] else ""
    return f"{plan['op']}, {plan['impl']}: {what}; {batch}{refused}"


def _speed(found: Comparison) -> str:
    speeds = [row.speed for row in found.rows if row.speed is not None]
    steps = sorted({s.steps for s in speeds})
    span = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    return f"prefill: {speeds[0].prompt_tokens} tokens, median of 3; decode: median of {span} single steps after them"
