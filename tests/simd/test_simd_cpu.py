"""The SIMD layer against torch and numpy, bit for bit; threads, fork and the compile cache."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")
from numba import types  # noqa: E402

from narrowgate.simd import cpu as simd  # noqa: E402
from narrowgate.simd.cpu_compile import compiled  # noqa: E402
from narrowgate.simd.cpu_threads import parallel  # noqa: E402

ADDRESS = types.int64


@numba.njit
def _step(task, x, y, z, out):
    """Every operation once; task is ignored."""
    a, b, c = simd.load_f32(x), simd.load_f32(y), simd.load_f32(z)
    index = simd.load_i32(z + 64)
    simd.store_f32(out, simd.add(simd.mul(a, b), c))
    simd.store_f32(out + 64, simd.fma(a, b, c))
    simd.store_f32(out + 128, simd.permute(a, index))
    simd.store_f32(out + 192, simd.permute2(a, b, index))
    simd.store_f32(out + 256, simd.load_bf16(z + 128))
    simd.store_f32(out + 320, simd.load_f16(z + 160))
    simd.store_f32(out + 384, simd.e4m3(simd.load_u8(z + 192)))
    simd.store_i32(out + 448, simd.dot_bytes(index, simd.as_int(a), simd.as_int(b)))
    simd.store_i32(out + 512, simd.permute_bytes(simd.as_int(a), simd.bit_and(index, simd.splat_i32(np.int32(0x0F0F0F0F)))))
    simd.store_f32(out + 576, simd.splat(simd.total(a)))
    simd.store_f32(out + 640, simd.round_even(b))
    simd.store_first_bf16(out + 704, a, 5)
    simd.store_first_f16(out + 736, a, 16)
    simd.store_first_f32(out + 768, a, 3)
    simd.store_f32(out + 832, simd.splat(simd.largest(a)))


def every_operation(x, y, z, out, team):
    parallel(_step, (x, y, z, out), 1, team)


@numba.njit
def _count(task, out):
    simd.store_f32(out + task * 64, simd.splat(np.float32(task)))


def count_tasks(out, tasks, team):
    parallel(_count, (out,), tasks, team)


def test_every_operation():
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, generator=g), torch.randn(16, generator=g)
    c = -(x * y) * (1 + 2.0**-23)  # cancels, so that one rounding and two differ
    index = torch.randint(-(2**31), 2**31 - 1, (16,), generator=g, dtype=torch.int64).to(torch.int32)
    bf16, f16 = torch.randn(16, generator=g).bfloat16(), torch.randn(16, generator=g).half() * 2.0**-20
    codes = torch.tensor([0, 1, 7, 8, 0x7E, 0x7F, 0x80, 0x83, 0xFF, 0x38, 0xB9, 200, 100, 50, 25, 12], dtype=torch.uint8)
    parts = (c, index, bf16, f16, codes)
    z = torch.cat([p.contiguous().view(torch.uint8) for p in parts])
    out = torch.full((14, 16), torch.nan)
    run = compiled(every_operation, (ADDRESS,) * 5, "test")
    run(x.data_ptr(), y.data_ptr(), z.data_ptr(), out.data_ptr(), 1)
    fused = (x.double() * y.double() + c.double()).float()
    assert torch.equal(out[0], x * y + c)
    assert torch.equal(out[1], fused)
    assert not torch.equal(out[0], out[1])
    assert torch.equal(out[2], x[(index & 15).long()])
    assert torch.equal(out[3], torch.cat([x, y])[(index & 31).long()])
    assert torch.equal(out[4], bf16.float())
    assert torch.equal(out[5], f16.float())
    assert torch.equal(out[6].view(torch.int32)[~out[6].isnan()], _e4m3(codes).view(torch.int32)[~_e4m3(codes).isnan()])
    assert torch.equal(out[6].isnan(), _e4m3(codes).isnan())
    unsigned, signed = x.view(torch.uint8).view(16, 4).int(), y.view(torch.int8).view(16, 4).int()
    assert torch.equal(out[7].view(torch.int32), index + (unsigned * signed).sum(1).int())
    octets, picks = x.view(torch.uint8).view(4, 16), (index.view(torch.uint8) & 15).view(4, 16).long()
    assert torch.equal(out[8].view(torch.uint8).view(4, 16), octets.gather(1, picks))
    half = x[:8] + x[8:]
    quarter = half[:4] + half[4:]
    assert torch.equal(out[9], ((quarter[0] + quarter[2]) + (quarter[1] + quarter[3])).expand(16))
    assert torch.equal(out[10], y.round())
    assert torch.equal(out[11].view(torch.bfloat16)[:5], x.bfloat16()[:5])
    assert torch.equal(out[11].view(torch.int16)[5:16], torch.full((16,), torch.nan).view(torch.int16)[5:16])  # untouched
    assert torch.equal(out[11].view(torch.float16)[16:], x.half())
    assert torch.equal(out[12, :3], x[:3])
    assert out[12, 3:].isnan().all()
    assert torch.equal(out[13], x.max().expand(16))


def _e4m3(codes):
    return codes.view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("team", [1, 2, 5])
def test_every_task_runs_once(team):
    out = torch.full((1000, 16), torch.nan)
    compiled(count_tasks, (ADDRESS,) * 3, "test")(out.data_ptr(), 999, team)
    assert torch.equal(out[:999], torch.arange(999.0)[:, None].expand(999, 16))
    assert out[999].isnan().all()


def script(text, **environment):
    """Run a few lines in a fresh interpreter, from a folder where `kernel.py` is this test's own kernel."""
    code = textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )


CALL = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO)
sys.path.insert(0, {here!r})
import test_simd_cpu as t
from narrowgate.simd.cpu_threads import threads
from narrowgate.simd.cpu_compile import COMPILED
out = torch.zeros(10, 16)
f = t.compiled(t.count_tasks, (t.ADDRESS,) * 3, "test")
f(out.data_ptr(), 10, threads())
"""


def call():
    return CALL.format(here=os.path.dirname(__file__))


def test_a_child_of_fork_runs_on_one_thread_and_says_so_once():
    ran = script(call() + """
import os
child = os.fork()
if child == 0:
    out.zero_()
    for _ in range(3):
        f(out.data_ptr(), 10, threads())
    os._exit(0 if threads() == 1 and out[9, 0] == 9 else 3)
assert os.waitpid(child, 0)[1] == 0
assert threads() == torch.get_num_threads()
""")  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("one thread: this process is a child of fork") == 1


def test_kernels_are_compiled_once_for_a_cache_directory(tmp_path):
    first = script(call() + "print(COMPILED)", XDG_CACHE_HOME=str(tmp_path))
    second = script(call() + "print(COMPILED)", XDG_CACHE_HOME=str(tmp_path))
    assert "count_tasks" in first.stdout, first.stderr
    assert "compiling count_tasks" in first.stderr
    assert second.stdout.strip() == "[]", second.stderr


def test_several_processes_may_fill_the_cache_at_once(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(call() + "assert out[9, 0] == 9")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    running = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def test_a_damaged_cache_file_is_compiled_again(tmp_path):
    script(call(), XDG_CACHE_HOME=str(tmp_path))
    stored = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert stored
    for kind in (".nbi", ".nbc"):
        for path in stored:
            if path.suffix == kind:
                path.write_bytes(path.read_bytes()[:20])
        ran = script(call() + "assert out[9, 0] == 9", XDG_CACHE_HOME=str(tmp_path))
        assert ran.returncode == 0, ran.stderr
        assert "compiling it again" in ran.stderr
    assert script(call() + "print(COMPILED)", XDG_CACHE_HOME=str(tmp_path)).stdout.strip() == "[]"


def test_another_processor_finds_nothing_of_this_one_s(tmp_path):
    script(call(), XDG_CACHE_HOME=str(tmp_path))
    ran = script(call() + "print(COMPILED)", XDG_CACHE_HOME=str(tmp_path), NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=AVX2)
    assert "count_tasks" in ran.stdout, ran.stderr


def test_threads_of_python_may_call_at_once():
    """Each has a team of its own from torch's library, so parallel regions of several threads need no lock; Numba's own
    threading layers, of which one does, are not used."""
    run = compiled(count_tasks, (ADDRESS,) * 3, "test")
    outs = [torch.full((500, 16), torch.nan) for _ in range(4)]

    def work(out):
        for _ in range(50):
            out.fill_(torch.nan)
            run(out.data_ptr(), 500, 3)
            assert torch.equal(out[:, 0], torch.arange(500.0))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, outs))
    loaded = script(call() + "print(*[m for m in sys.modules if m.startswith('numba.np.ufunc') and 'pool' in m])")
    assert loaded.stdout.strip() == ""


def test_a_home_that_cannot_be_written_is_said_and_worked_round(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    ran = script(call() + "assert out[9, 0] == 9", XDG_CACHE_HOME=str(blocked))
    assert ran.returncode == 0, ran.stderr
    assert "cannot keep compiled kernels" in ran.stderr


@pytest.mark.parametrize("name", ["haswell"])
def test_avx2_alone(name, tmp_path):
    here = os.path.dirname(__file__)
    ran = script(
        f"""
        import sys; sys.path.insert(0, {here!r})
        import test_simd_cpu as t
        from narrowgate.simd.cpu_features import FEATURES
        assert FEATURES.level == "avx2"
        t.test_every_operation()
        """,
        NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=AVX2, XDG_CACHE_HOME=str(tmp_path),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


AVX2 = "+avx2,+fma,+f16c,+avx,+sse4.2,+sse4.1,+ssse3,+popcnt,+bmi,+bmi2,+lzcnt,+movbe,+cx16,-avx512f"


def test_less_than_avx2_is_refused(tmp_path):
    ran = script(call(), NUMBA_CPU_NAME="nehalem", NUMBA_CPU_FEATURES="+sse4.2,+ssse3,-avx", XDG_CACHE_HOME=str(tmp_path))
    assert "need AVX2, FMA and F16C" in ran.stderr
