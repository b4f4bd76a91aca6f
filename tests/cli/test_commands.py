"""What the commands print and write, on a tiny model."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import narrowgate as ng
from narrowgate.cli.compare import DEFAULT_SCHEMES

PLAIN = {**os.environ, "COLUMNS": "80"}


def test_version_and_help(run):
    assert run("--version")[:2] == (0, f"narrowgate {ng.__version__}\n")
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in ("compare", "quantize", "generate", "inspect"))


def test_quantize_is_what_load_and_save_give(tiny, tmp_path, run):
    code, out, _ = run("quantize", tiny, tmp_path / "out", "--scheme", "mxfp4", "--override", "*.down_proj=int8_g32")
    assert code == 0
    ng.load(tiny, "mxfp4", overrides=["*.down_proj=int8_g32"]).save(tmp_path / "saved")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    assert re.search(r"kept      \d+ tensors", out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "saved"]


def test_quantize_figures(tiny, tmp_path, run):
    code, out, _ = run("quantize", tiny, tmp_path / "out", "--scheme", "nvfp4", "--json")
    found = json.loads(out)
    model = ng.load(tmp_path / "out")
    assert code == 0
    assert found["bytes_before"] == ng.load(tiny).nbytes
    assert found["bytes_after"] == model.nbytes
    packed = model.packed_tensors().values()
    assert found["packed_tensors"] == len(packed)
    assert found["bits_per_value"] == pytest.approx(8 * sum(w.nbytes for w in packed) / sum(w.numel for w in packed))


def test_force_replaces_only_our_checkpoints(tiny, tmp_path, run):
    out = tmp_path / "out"
    assert run("quantize", tiny, out, "--scheme", "mxfp4")[0] == 0
    first = (out / "model.safetensors").read_bytes()
    code, _, err = run("quantize", tiny, out, "--scheme", "int4_g32")
    assert code == 2
    assert "--force" in err
    assert (out / "model.safetensors").read_bytes() == first
    assert run("quantize", tiny, out, "--scheme", "q8_0", "--force")[0] == 2  # K % 32: fails, and nothing is lost
    assert (out / "model.safetensors").read_bytes() == first
    assert run("quantize", tiny, out, "--scheme", "int4_g32", "--force")[0] == 0
    assert ng.load(out).scheme == "int4_g32"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    assert run("quantize", tiny, precious, "--scheme", "mxfp4", "--force")[0] == 2
    assert [p.name for p in precious.iterdir()] == ["thesis.txt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "precious"]


def test_generate_streams_the_models_text(tiny, run):
    want = ng.load(tiny, "mxfp4").generate("def f", max_new_tokens=9)
    code, out, err = run("generate", tiny, "--scheme", "mxfp4", "--prompt", "def f", "--max-new-tokens", 9)
    assert (code, out) == (0, want + "\n")
    assert "tokens" in err
    code, out, err = run("generate", tiny, "--scheme", "mxfp4", "--prompt", "def f", "--max-new-tokens", 9, "--json")
    assert json.loads(out)["text"] == want
    assert err == ""
    out = run("generate", tiny, "--scheme", "mxfp4", "--prompt", "def f", "--max-new-tokens", 9, "--echo")[1]
    assert out == "def f" + want + "\n"


def test_generate_sampled_and_chat(tiny, run):
    model = ng.load(tiny)
    want = model.generate("ab", max_new_tokens=7, temperature=0.9, top_k=9, top_p=0.8, seed=5)
    options = ("--temperature", 0.9, "--top-k", 9, "--top-p", 0.8, "--seed", 5)
    assert run("generate", tiny, "--prompt", "ab", "--max-new-tokens", 7, *options)[1] == want + "\n"
    want = model.chat([{"role": "user", "content": "hi"}], max_new_tokens=5)
    assert run("generate", tiny, "--prompt", "hi", "--chat", "--max-new-tokens", 5)[1] == want + "\n"


def test_inspect(tiny, tmp_path, run):
    code, out, _ = run("inspect", tiny, "--json")
    found = json.loads(out)
    report = ng.load(tiny).report()
    assert code == 0
    assert (found["tensors"], found["bytes"]) == (len(report), sum(r.nbytes for r in report))
    assert found["model"]["hidden_size"] == 36
    run("quantize", tiny, tmp_path / "out", "--scheme", "nf4_g64")
    found = json.loads(run("inspect", tmp_path / "out", "--json")[1])
    model = ng.load(tmp_path / "out")
    assert found["bytes"] == model.nbytes
    assert found["packed_tensors"] == len(model.packed_tensors())
    stored = {g["name"]: g["stored"] for g in found["groups"]}
    assert stored["model.embed_tokens"] == "nf4_g64"
    assert stored["model.layers.*.linear_attn.A_log"] == "f32"
    code, out, _ = run("inspect", tiny / "model.safetensors")
    assert code == 0
    assert "model.layers.*.mlp.up_proj" in out


def test_inspect_reads_no_data(tiny, run, monkeypatch):
    from narrowgate.io.checkpoint import Checkpoint

    monkeypatch.setattr(Checkpoint, "read", None)
    monkeypatch.setattr(Checkpoint, "copy", None)
    assert run("inspect", tiny)[0] == 0


def compare(run, tiny, text, *more):
    code, out, err = run("compare", tiny, "--text", text, "--schemes", "int8_g32,mxfp4,int2_g32", "--json", *more)
    assert code == 0, err
    return json.loads(out)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    import narrowgate.engine.measure as measure

    monkeypatch.setattr(measure, "DECODE_SECONDS", 0.0)


def test_compare_against_a_plain_computation(tiny, text, run):
    """The figures again, from ng.load and logits alone, the whole text in one window."""
    found = compare(run, tiny, text)
    data = text.read_bytes()
    assert found["text"]["scored_bytes"] == len(data)
    reference = ng.load(tiny)
    ids = reference.tokenizer.encode(data.decode())
    assert ids[0] == 260
    p = reference.logits(ids[:-1]).double().log_softmax(-1)
    want = torch.tensor(ids[1:])
    for row, scheme in zip(found["rows"], (None, "int8_g32", "mxfp4", "int2_g32"), strict=True):
        model = ng.load(tiny, scheme)
        q = model.logits(ids[:-1]).double().log_softmax(-1)
        bits = -float(q.gather(1, want[:, None]).sum()) / torch.log(torch.tensor(2.0)).item()
        assert row["score"]["bits_per_byte"] == pytest.approx(bits / len(data), rel=1e-5)
        kl = float((p.exp() * (p - q)).sum(-1).mean())
        assert row["score"]["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-7)
        assert row["score"]["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=0.01)
        assert row["size"]["nbytes"] == model.nbytes
        other = float((q.exp() * (q - p)).sum(-1).mean())  # the rival: KL the other way round
        if scheme == "int2_g32":
            assert abs(other - kl) > 0.02 * kl
    assert found["rows"][0]["score"]["kl"] == 0


def test_compare_json_says_what_one_needs(tiny, text, run):
    found = compare(run, tiny, text, "--max-bytes", 50, "--override", "lm_head=bf16")
    assert found["text"]["total_bytes"] == len(text.read_bytes())
    assert found["text"]["scored_bytes"] == 48  # the text to the end of a line: two naïve ones need more
    assert len(found["text"]["sha256"]) == 64
    assert {"cpu", "threads", "torch", "python"} <= found["machine"].keys()
    row = found["rows"][1]
    assert row["size"]["packed_tensors"] == 3 + 4 + 6  # a delta layer, an attention layer, two MLPs
    assert {c["op"] for c in row["contracts"]} == {"linear"}
    assert row["contracts"][0]["accumulate"] == "float32"


def test_compare_table_fits_80_columns(tiny, text, tmp_path):
    argv = [
        sys.executable,
        "-m",
        "narrowgate",
        "compare",
        str(tiny),
        "--text",
        str(text),
        "--max-bytes",
        "60",
        "--schemes",
        "mxfp4",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, env={**PLAIN, "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("\n\n")[0]
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "KL nats" in table
    assert "…" not in table
    assert "\x1b" not in done.stdout + done.stderr
    assert "nats" in done.stdout


def test_compare_a_packed_checkpoint(tiny, text, tmp_path, run):
    run("quantize", tiny, tmp_path / "out", "--scheme", "mxfp4")
    code, out, _ = run("compare", tmp_path / "out", "--text", text)
    assert code == 0
    assert "--reference" in out
    assert "KL" not in out.splitlines()[0]
    code, _, err = run("compare", tmp_path / "out", "--text", text, "--schemes", "nvfp4")
    assert code == 2
    assert "packed already" in err
    code, out, _ = run("compare", tmp_path / "out", "--text", text, "--reference", tiny, "--json")
    packed = json.loads(out)["rows"][1]
    again = compare(run, tiny, text)["rows"][2]
    assert packed["label"] == again["label"] == "mxfp4"
    assert packed["score"] == again["score"]


def test_plot(tiny, text, tmp_path, run):
    pytest.importorskip("matplotlib")
    compare(run, tiny, text, "--max-bytes", 60, "--plot", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob(".*"))


def test_no_matplotlib_is_said_before_anything_runs(tiny, text, tmp_path, run, monkeypatch):
    import narrowgate.cli.plot as plot

    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    code, out, err = run("compare", tiny, "--text", text, "--plot", tmp_path / "a.png")
    assert (code, out) == (2, "")
    assert "narrowgate[plot]" in err


def test_default_schemes_exist():
    assert set(DEFAULT_SCHEMES.split(",")) <= set(ng.schemes())


def test_no_heavy_import_for_help():
    code = "import sys; from narrowgate.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr.split()
    assert not {"matplotlib", "safetensors", "tokenizers", "transformers"} & set(loaded)


def test_a_reader_that_leaves(tiny):
    command = f"{sys.executable} -m narrowgate inspect {tiny} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
