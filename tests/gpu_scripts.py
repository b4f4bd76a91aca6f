"""Run a script in a process of its own, under Triton's interpreter or compiling for an absent GPU: Triton fixes which at import."""

import os
import subprocess
import sys
import textwrap


def run_script(tmp_path, *parts, interpret):
    """The parts, dedented and joined, as one file (Triton reads a kernel's source from its file). Returns what it printed."""
    path = tmp_path / "script.py"
    path.write_text("\n".join(textwrap.dedent(part) for part in parts))
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
