"""Starting: what importing costs, how many kernels there are, another instruction set, a machine without Numba."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from small_models import build, tokens

import narrowgate as ng
from narrowgate.cli.app import run

AVX2 = "+avx2,+fma,+f16c,+avx,+sse4.2,+sse4.1,+ssse3,+popcnt,+bmi,+bmi2,+lzcnt,+movbe,+cx16,-avx512f"


def script(text, *arguments, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *arguments], capture_output=True, text=True, timeout=600, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    return ran


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("small")
    build("qwen3_5_text", made, seed=6)
    return made


STEPS = """
import sys, json, warnings, torch
torch.set_num_threads(1)
warnings.simplefilter("always")
import narrowgate as ng
model = ng.load(sys.argv[1], "mxfp4")
cache, ids = model.new_cache(), [5, 3, 9, 2, 4, 4]
found = [model.step([i], cache)[0].tolist() for i in ids]
"""


def expected(folder):
    model = ng.load(folder, "mxfp4")
    return model.logits([5, 3, 9, 2, 4, 4])


def test_importing_costs_little_beside_torch():
    """Processor time, which other work on the machine does not change; the best of three. The limit is 0.4 s."""
    text = "import time, torch; a = time.process_time(); import narrowgate; print(time.process_time() - a)"
    assert min(float(script(text).stdout) for _ in range(3)) < 0.4


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ImportError("No module named 'numba'")
sys.meta_path.insert(0, Blocked())
"""


def test_without_numba_a_model_runs_and_says_why(folder):
    ask = "print(json.dumps([found, len(cache.recordings), str(model.plan('model.layers.0.mlp.down_proj'))]))"
    ran = script(BLOCKED + STEPS + ask, str(folder))
    found, recordings, plan = json.loads(ran.stdout)
    assert (torch.tensor(found) - expected(folder)).abs().max() < 1e-4
    assert recordings == 0
    assert "plain torch (No module named 'numba')" in plan
    assert "FallbackWarning: rms_norm: the reference runs: cpu (rms_norm): No module named 'numba'" in ran.stderr


def test_avx2_alone_runs_the_same_model_with_at_most_twenty_kernels(folder):
    pytest.importorskip("numba")
    ask = """
from narrowgate.simd.cpu_compile import SPECIALISATIONS
from narrowgate.simd.cpu_features import FEATURES
print(json.dumps([found, FEATURES.level, [r.refused for r in cache.recordings.values()], list(SPECIALISATIONS)]))
"""
    ran = script(STEPS + ask, str(folder), NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=AVX2)
    found, level, refused, kernels = json.loads(ran.stdout)
    assert level == "avx2"
    assert refused == [None]
    assert 8 < len(kernels) <= 20
    assert (torch.tensor(found) - expected(folder)).abs().max() < 1e-4


def test_warming_up_leaves_nothing_to_compile_and_there_are_at_most_sixty_kernels(folder, capsys):
    pytest.importorskip("numba")
    from narrowgate.simd import cpu_compile

    assert run(["warmup", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {kernel["name"] for kernel in found["kernels"]}
    assert {"delta_rule", "convolution", "decode_rows"} <= names
    assert sum(not name.endswith("[test]") for name in names) <= 60
    before = len(cpu_compile.SPECIALISATIONS)
    for scheme in ng.schemes():
        model = ng.load(folder, scheme)
        model.complete([tokens(5).tolist(), tokens(3).tolist()], max_new_tokens=3)
    assert len(cpu_compile.SPECIALISATIONS) == before


def test_wrong_arguments(capsys):
    assert run(["warmup", "--scheme", "int3"]) == 2
    assert "expected --scheme among" in capsys.readouterr().err
