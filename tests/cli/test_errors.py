"""Every error that a user can make: one line on stderr, exit code 2, no traceback, nothing on stdout and nothing on disk."""

import dataclasses
import json
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from narrowgate.dispatch import OPERATORS

FILE = "model.safetensors"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def edit_header(folder, change):
    data = (folder / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def poison(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")


def claim_more(header):
    last = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"][1])
    header[last]["shape"][0] *= 1000
    header[last]["data_offsets"][1] = header[last]["data_offsets"][0] + (
        (header[last]["data_offsets"][1] - header[last]["data_offsets"][0]) * 1000
    )


def special(path):
    """A device that can be read for ever."""
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


DAMAGE = {
    "missing file": (lambda f: (f / FILE).unlink(), FILE),
    "truncated file": (lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:-100]), "truncated"),
    "empty file": (lambda f: (f / FILE).write_bytes(b""), "truncated"),
    "corrupt header": (lambda f: (f / FILE).write_bytes(b"\x10" + bytes(7) + b"{not json at all"), "corrupt header"),
    "claims more bytes": (lambda f: edit_header(f, claim_more), "claims bytes up to"),
    "missing tensor": (lambda f: edit_tensors(f, lambda t: t.pop("model.norm.weight")), "missing tensor 'model.norm.weight'"),
    "wrong shape": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.norm.weight": torch.zeros(35, dtype=torch.bfloat16)})),
        "expected shape [36], got [35]",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "not JSON"),
    "unknown model type": (lambda f: edit_config(f, model_type="llama"), "got 'llama'"),
    "a device for a config": (lambda f: special(f / "config.json"), "expected a file"),
    "eos of words": (lambda f: edit_config(f, eos_token_id="<end>"), "eos_token_id: expected a token id"),
    "generation settings no object": (lambda f: (f / "generation_config.json").write_text("[]"), "expected a JSON object"),
    "foreign quantization": (lambda f: edit_config(f, quantization_config={"quant_method": "awq"}), "'awq'"),
}
COMMANDS = {
    "quantize": lambda f: ("quantize", f, f.parent / "out", "--scheme", "mxfp4"),
    "generate": lambda f: ("generate", f, "--prompt", "x", "--max-new-tokens", 1),
    "compare": lambda f: ("compare", f, "--schemes", "mxfp4", "--text", f / "config.json"),
    "inspect": lambda f: ("inspect", f),
}


def one_line(result, *parts):
    code, _, err = result
    assert code == 2
    assert err.startswith("narrowgate: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folder(command, damage, broken, run):
    harm, says = DAMAGE[damage]
    harm(broken)
    before = sorted(broken.parent.iterdir())
    if command == "compare":  # the text must be readable whatever is wrong with the model
        (broken.parent / "t.txt").write_text("some text")
        before = sorted(broken.parent.iterdir())
        result = run("compare", broken, "--schemes", "mxfp4", "--text", broken.parent / "t.txt")
    else:
        result = run(*COMMANDS[command](broken))
    one_line(result, says)
    assert sorted(broken.parent.iterdir()) == before
    if command != "inspect":
        assert result[1] == ""


def test_nan_in_weights(broken, run, text):
    edit_tensors(broken, poison)
    before = sorted(broken.parent.iterdir())
    for argv in (
        ("quantize", broken, broken.parent / "out", "--scheme", "nvfp4"),
        ("generate", broken, "--scheme", "mxfp4", "--prompt", "x"),
    ):
        one_line(run(*argv), "model.layers.0.mlp.up_proj", "not finite")
    one_line(run("compare", broken, "--schemes", "int4_g32", "--text", text, "--max-bytes", 40), "not finite")
    assert sorted(broken.parent.iterdir()) == before


def test_k_that_the_scheme_cannot_divide(tiny, tmp_path, run):
    one_line(run("quantize", tiny, tmp_path / "out", "--scheme", "q8_0"), "q8_0 needs K", "32", "36")
    one_line(run("generate", tiny, "--scheme", "q4_0", "--prompt", "x"), "q4_0 needs K", "36")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("quantize", "TINY", "OUT"), "--scheme"),
        (("quantize", "TINY", "OUT", "--scheme", "fp3"), "got 'fp3'"),
        (("quantize", "TINY", "TINY", "--scheme", "mxfp4"), "another folder"),
        (("quantize", "TINY", "TINY/inside", "--scheme", "mxfp4"), "apart"),
        (("quantize", "TINY", "OUT/a/b", "--scheme", "mxfp4"), "no such folder"),
        (("quantize", "TINY", "OUT", "--scheme", "mxfp4", "--override", "lm_head"), "pattern=scheme"),
        (("quantize", "TINY", "OUT", "--scheme", "mxfp4", "--override", "nothing=bf16"), "nothing=bf16"),
        (("quantize", "nowhere", "OUT", "--scheme", "mxfp4"), "nowhere"),
        (("generate", "TINY"), "--prompt"),
        (("generate", "TINY", "--prompt", ""), ""),
        (("generate", "TINY", "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("generate", "TINY", "--prompt", "x", "--device", "cuda:99"), "cuda:99"),
        (("generate", "TINY", "--prompt", "x", "--device", "bridge"), "bridge"),
        (("compare", "TINY"), "--text"),
        (("compare", "TINY", "--schemes", "mxfp4,fp3", "--text", "x"), "fp3"),
        (("compare", "TINY", "--text", "nowhere.txt"), "nowhere.txt"),
        (("compare", "TINY", "--text", "TINY/config.json", "--plot", "OUT/a/b.png"), "no such folder"),
        (("compare", "TINY", "--text", "TINY/config.json", "--plot", "b.pdf"), ".png"),
        (("inspect", "nowhere"), "nowhere"),
        (("inspect", "TINY/config.json"), ".safetensors"),
        (("frobnicate",), "frobnicate"),
        (("compare", "TINY", "--frobnicate"), "--frobnicate"),
    ],
)  # fmt: skip
def test_wrong_arguments(argv, says, tiny, tmp_path, run):
    tiny_files = sorted(tiny.rglob("*"))
    argv = [a.replace("TINY", str(tiny)).replace("OUT", str(tmp_path / "out")) for a in argv]
    result = run(*argv)
    if argv[-1] == "":
        assert result[0] in (0, 2)  # a tokenizer with a start token makes an empty prompt legal
        return
    one_line(result, says)
    assert result[1] == ""
    assert not list(tmp_path.iterdir())
    assert sorted(tiny.rglob("*")) == tiny_files


def test_strict_fails_where_a_kernel_refuses(tiny, run, monkeypatch):
    kernels = OPERATORS["linear"].kernels
    monkeypatch.setitem(kernels, "cpu", dataclasses.replace(kernels["cpu"], refuse=lambda *a, **k: ("not today",)))
    one_line(run("generate", tiny, "--prompt", "x", "--scheme", "mxfp4", "--strict"), "strict", "not today")


@pytest.mark.parametrize(("data", "says"), [(b"caf\xe9 au lait", "UTF-8"), (b"", "empty"), (b"\xff", "0xff")])
def test_text_that_is_none(data, says, tiny, tmp_path, run):
    (tmp_path / "t").write_bytes(data)
    one_line(run("compare", tiny, "--text", tmp_path / "t"), says)


def test_ctrl_c_while_writing_leaves_nothing(tiny, tmp_path, run, monkeypatch):
    import narrowgate.engine.quantize as module

    real, calls = module.pack_dense, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module, "pack_dense", interrupted)
    code, out, err = run("quantize", tiny, tmp_path / "out", "--scheme", "mxfp4")
    assert (code, out, err) == (130, "", "narrowgate: interrupted\n")
    assert len(calls) == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "code"), [(MemoryError("no memory"), 1), (OSError(28, "No space left"), 1)])
def test_real_failures_are_one_line(error, code, tiny, run, monkeypatch):
    import narrowgate.engine

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(narrowgate.engine, "load", fail)
    found, _, err = run("generate", tiny, "--prompt", "x")
    assert found == code
    assert err.count("\n") == 1


def test_a_fault_of_ours_shows_where(tiny, run, monkeypatch):
    import narrowgate.engine

    monkeypatch.setattr(narrowgate.engine, "load", lambda *a, **k: [][1])
    code, _, err = run("generate", tiny, "--prompt", "x")
    assert code == 1
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("narrowgate: a fault")


def test_sigterm_while_writing_leaves_nothing(tiny, tmp_path, capsys, monkeypatch):
    import narrowgate.engine.quantize as module
    from narrowgate.cli import main

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(module, "pack_dense", lambda *args: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as ended:
            main(["quantize", str(tiny), str(tmp_path / "out"), "--scheme", "mxfp4"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
    assert capsys.readouterr().err == "narrowgate: terminated\n"
    assert not list(tmp_path.iterdir())


def test_inspect_sees_a_scheme_that_lies(tiny, tmp_path, run):
    packed = tmp_path / "packed"
    assert run("quantize", tiny, packed, "--scheme", "mxfp4")[0] == 0
    config = json.loads((packed / "config.json").read_text())
    next(iter(config["quantization_config"]["tensors"].values()))["scheme"] = "nvfp4"
    (packed / "config.json").write_text(json.dumps(config))
    one_line(run("inspect", packed), "said to be 'nvfp4', but holds 'mxfp4'")


def test_sigterm_ends_a_check_and_is_no_failure_of_a_kernel(monkeypatch, capsys):
    import narrowgate.ops as ops
    from narrowgate.cli import main

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ops, "l2_norm", lambda **arguments: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as ended:
            main(["check", "--op", "l2_norm", "--impl", "reference"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
    assert capsys.readouterr().err == "narrowgate: terminated\n"
