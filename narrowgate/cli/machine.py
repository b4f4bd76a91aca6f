"""On what a figure was measured: without it a figure means little."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def machine(device: str) -> dict[str, Any]:
    """CPU model, threads, versions, and the GPU if one is used."""
    import torch

    from narrowgate._version import __version__

    found = {
        "narrowgate": __version__, "python": platform.python_version(), "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}", "cpu": _cpu(), "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(), "device": device,
    }  # fmt: skip
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command as one would type it again."""
    return shlex.join(["narrowgate", *(sys.argv[1:] if argv is None else argv)])
