"""The worked example of docs/tile.md, as it stands there: under the interpreter, and on a GPU where there is one."""

import re
from pathlib import Path

import pytest
from gpu_scripts import run_script

pytest.importorskip("triton")

TEXT = (Path(__file__).parents[2] / "docs" / "tile.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL).group(1)


def test_the_kernel_is_as_short_as_it_says():
    kernel = EXAMPLE[EXAMPLE.index("@triton.jit") : EXAMPLE.index("device =")].strip()
    assert len(kernel.splitlines()) <= 15


def test_example_under_the_interpreter(tmp_path):
    run_script(tmp_path, EXAMPLE.replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cpu"'), interpret=True)


@pytest.mark.gpu
def test_example_on_the_gpu(tmp_path):
    run_script(tmp_path, EXAMPLE + 'assert device == "cuda"\n', interpret=False)
