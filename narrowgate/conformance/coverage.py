"""Which case or test holds which item of the specification: `python -m narrowgate.conformance.coverage` writes the page.

Cases say what they hold (`spec`), tests carry `@pytest.mark.spec(...)`, which is read from their source, and a row of section R
is held when cases or tests build its rivals. Nothing is run. Left out: judging whether a claim is true; that is a reader's work,
and that of the planted faults."""

from __future__ import annotations

import ast
import fnmatch
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from narrowgate.conformance.case import Case
from narrowgate.conformance.run import all_cases

PAGE = Path("docs/spec-coverage.md")
SHOWN = 3  # names of cases or tests in a cell, the rest is counted
GROUPS = {
    "Z": "Traps", "A": "Packed operands", "B": "Microscaling FP6", "C": "Layer glue and embedding rows",
    "D": "The gated delta rule family", "R": "Rival readings", "F": "Known failures: formats, packing, products",
    "G": "Known failures: the gated delta rule, convolution, state, loading",
}  # fmt: skip
STATUSES = ("superseded", "information", "gpu", "later")


@dataclass
class Item:
    """One item, what it is about, its status if it has one, and who holds it."""

    name: str
    title: str
    status: str = ""
    cases: list[str] = field(default_factory=list)  # "op/case"
    tests: list[str] = field(default_factory=list)  # "tests/file.py::test"
    rivals: tuple[str, ...] = ()

    @property
    def settled(self) -> bool:
        """Held by something, or with a status that asks for nothing here."""
        return bool(self.cases or self.tests or self.status)


def items() -> dict[str, Item]:
    """All items of items.toml, nothing yet known about who holds them."""
    data = tomllib.loads(files("narrowgate.conformance").joinpath("items.toml").read_text(encoding="utf-8"))
    found = {name: Item(name, title) for part in ("specification", "failures") for name, title in data[part].items()}
    found |= {name: Item(name, row["title"], rivals=tuple(row["rivals"])) for name, row in data["rivals"].items()}
    for name, status in data["status"].items():
        found[name].status = status
    for name in found:
        if name[0] == "Z":
            found[name].status = "information"
    return found


def collect(root: Path) -> dict[str, Item]:
    """Every item with the cases of the package and the tests under `root` that hold it."""
    found = items()
    cases = [case for group in all_cases().values() for case in group]
    for case in cases:
        for name in case.spec:
            _item(found, name, case.id).cases.append(case.id)
    for test, name in marks(root):
        _item(found, name, test).tests.append(test)
    for item in found.values():
        if item.rivals:
            item.cases += _showing(item, cases)
    return found


def _item(found: dict[str, Item], name: str, who: str) -> Item:
    if name not in found:
        raise LookupError(f"{who} says that it holds {name!r}, which is no item")
    return found[name]


def _showing(item: Item, cases: list[Case]) -> list[str]:
    """The cases that build the rivals of a row: one at least for each of its wrong readings ("a|b" is one reading)."""
    shown: list[str] = []
    for reading in item.rivals:
        names = reading.split("|")
        having = [c.id for c in cases if any(fnmatch.fnmatchcase(f"{c.op}: {r.name}", n) for r in c.rivals for n in names)]
        if not having:
            return []
        shown += having
    return list(dict.fromkeys(shown))


def marks(root: Path) -> Iterator[tuple[str, str]]:
    """(test, item) for each `pytest.mark.spec` in the tests, from the source alone."""
    for path in sorted(root.joinpath("tests").rglob("test_*.py")):
        where = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                for decorator in node.decorator_list:
                    yield from ((f"{where}::{node.name}", name) for name in _marked(decorator))
            elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets):
                yield from ((where, name) for name in _marked(node.value))


def _marked(node: ast.AST) -> Iterator[str]:
    """The items of a `pytest.mark.spec("A1", "A2")` anywhere in an expression."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "spec":
            for argument in call.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    raise TypeError(f"line {argument.lineno}: expected the items of pytest.mark.spec as plain strings")
                yield argument.value


def render(found: dict[str, Item]) -> str:
    """The page."""
    held = sum(bool(item.cases or item.tests) for item in found.values())
    stated = {kind: sum(_bare(item).startswith(kind) for item in found.values()) for kind in STATUSES}
    told = ", ".join(f"{count} {kind}" for kind, count in stated.items() if count)
    waiting = sum(not item.settled for item in found.values())
    lines = [
        "# What holds each item of the specification", "",
        "Made by `python -m narrowgate.conformance.coverage` from the cases' `spec` and the tests' `pytest.mark.spec`; not",
        "edited by hand. How to read and run the cases: [conformance.md](conformance.md).", "",
        f"{len(found)} items: {held} held by cases or tests; of the others {told or 'none'}, {waiting} pending.",
    ]  # fmt: skip
    for letter, title in GROUPS.items():
        group = [item for item in found.values() if item.name[0] == letter]
        lines += ["", f"## {letter}. {title}", "", "| item | what | held by |", "|---|---|---|"]
        lines += [f"| {item.name} | {_escaped(item.title)} | {_holders(item)} |" for item in group]
    return "\n".join(lines) + "\n"


def _bare(item: Item) -> str:
    """The status of an item that nothing holds."""
    return "" if item.cases or item.tests else item.status


def _holders(item: Item) -> str:
    by_op: dict[str, list[str]] = {}
    for name in item.cases:
        op, _, case = name.partition("/")
        by_op.setdefault(op, []).append(case)
    parts = [f"`{op}`: {_named(names)}" for op, names in by_op.items()]
    tests = list(dict.fromkeys(item.tests))
    parts += (
        [_named([f"[{name.partition('::')[2] or Path(name).stem}](../{name.partition('::')[0]})" for name in tests])]
        if tests
        else []
    )
    text = "; ".join(parts)
    if not text:
        return {"gpu": "where there is a GPU"}.get(item.status, _escaped(item.status)) or "**pending**"
    return text


def _named(names: list[str]) -> str:
    shown = ", ".join(_escaped(name) for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    root = Path.cwd()
    found = collect(root)
    root.joinpath(PAGE).write_text(render(found), encoding="utf-8")
    waiting = [item.name for item in found.values() if not item.settled]
    print(f"{PAGE}: {len(found)} items, {len(waiting)} pending: {' '.join(waiting)}", file=sys.stderr)


if __name__ == "__main__":
    main()
