"""The layers, and what each may import. Lazy imports count: the walk reads every import statement of every file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "narrowgate"
CHAIN = ["errors", "strides", "dispatch", "formats", "packing", "quantize", "ops", "nn", "models", "engine", "cli"]
EXTRA = {  # what a layer may import beside those to its left in the chain
    "io": {"errors", "formats", "packing"},
    "engine": {"io", "simd"},
    "cli": {"io", "conformance", "bench", "simd"},
    "conformance": {"errors", "dispatch", "formats", "packing", "quantize", "ops", "io"},
    "bench": {
        "errors",
        "dispatch",
        "formats",
        "packing",
        "quantize",
        "ops",
        "io",
        "conformance",
        "nn",
        "models",
        "engine",
        "simd",
    },
    "tile": {"errors", "strides", "dispatch", "formats", "packing"},
    "simd": {"errors", "strides", "dispatch"},
    "packing": {"simd"},  # in kernel files only, which are the only ones that may import Numba
    "quantize": {"simd"},
    "ops": {"simd", "tile"},
    "nn": {"simd", "tile"},
}


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, `from narrowgate import x` counted as narrowgate.x."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: expected absolute imports"
            found.add(node.module)
            if node.module == "narrowgate":
                found |= {f"narrowgate.{alias.name}" for alias in node.names}
    return found


def allowed(name: str) -> set[str]:
    left = set(CHAIN[: CHAIN.index(name)]) if name in CHAIN else set()
    return left | EXTRA.get(name, set()) | {name, "_version"}


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem in ("errors", "dispatch"))


def offences(path: Path) -> list[str]:
    own = path.relative_to(PACKAGE).with_suffix("").parts
    may = allowed(own[0])
    names = imports(path)
    bad = []
    for name in sorted(names):
        if not name.startswith("narrowgate"):
            root = name.split(".")[0]
            kernel = {"triton": ("gpu", "gpu_", "_gpu"), "numba": ("cpu", "cpu_", "_cpu"), "llvmlite": ("cpu", "cpu_", "_cpu")}
            if root in kernel:
                exact, head, tail = kernel[root]
                if not (path.stem == exact or path.stem.startswith(head) or path.stem.endswith(tail)):
                    bad.append(f"{root} is imported only by files named for its device")
            continue
        target = layer(name)
        if target == "conformance" and path.stem.split("_")[0] == "cases":
            continue  # cases are data of the suite; no operator imports them
        if target and target not in may:
            bad.append(f"{own[0]} imports {name}")
        stem = name.split(".")[-1]
        if path.stem == "reference" and any(part in stem.split("_") for part in ("cpu", "gpu")):
            bad.append(f"a reference imports the kernel {name}")
        if (path.stem.startswith("cpu") and "gpu" in stem.split("_")) or (
            path.stem.startswith("gpu") and "cpu" in stem.split("_")
        ):
            bad.append(f"kernels of two devices meet: {name}")
    return bad


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_direction(path):
    assert not offences(path)


def test_the_walk_sees_an_offence(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "formats").mkdir()
    wrong = tmp_path / "formats" / "elements.py"
    wrong.write_text("def late():\n    from narrowgate.ops import linear\n    import triton\n")
    assert len(offences(wrong)) == 2


def test_import_loads_no_kernel_and_no_optional_library():
    code = "import narrowgate, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"numba", "transformers", "matplotlib", "tokenizers", "safetensors", "gguf", "jinja2", "typer", "rich"}
    assert not heavy & set(loaded)
    ours = [m for m in loaded if m.startswith("narrowgate")]
    assert not [m for m in ours if {"cpu", "gpu", "cases"} & set(m.rsplit(".", 1)[-1].split("_")) or ".conformance" in m]
