"""The command `check`: exit codes, the list, JSON, a user's own kernel, and what is said when a question makes no sense."""

import json
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from narrowgate.cli import check as module
from narrowgate.conformance import suite
from narrowgate.dispatch import OPERATORS

APP = typer.Typer()
APP.callback()(lambda: None)
module.register(APP)

MINE = """
import torch

def my_l2_norm(x, *, eps=1e-6):
    return (x.double() / (x.double().square().sum(-1, keepdim=True) + eps).sqrt()).to(x.dtype)

def my_mean_norm(x, *, eps=1e-6):
    return (x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)

def no_eps(x):
    return my_l2_norm(x)

def doubles(x, *, eps=1e-6):
    return my_l2_norm(x, eps=eps).double()

def other(y):
    return y

def greedy(x, mode, *, eps=1e-6):
    return x

def positional(x, /):
    return x

def named(*, eps=1e-6, x):
    return my_l2_norm(x, eps=eps)

def prints(x, *, eps=1e-6):
    print("here", x.shape)
    return my_l2_norm(x, eps=eps)

def leaves(x, *, eps=1e-6):
    raise SystemExit(0)

NUMBER = 3
"""


def ask(*words):
    return CliRunner().invoke(APP, ["check", *words])


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "kernels_of_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    yield lambda name, *words: ask("--op", "l2_norm", "--mine", f"kernels_of_mine:{name}", *words)
    sys.modules.pop("kernels_of_mine", None)


def test_all_held():
    result = ask("--op", "l2_norm", "--op", "grouped_lin*")
    assert result.exit_code == 0, result.output
    assert "l2_norm" in result.output
    assert "failed" not in result.output


def test_list_runs_nothing():
    shown = ask("--list").output
    for op, cases in suite.choose().items():
        assert all(f"{op}/{case.name}" in shown for case in cases)
    listed = json.loads(ask("--list", "--json", "--op", "l2_norm").output)
    assert {entry["op"] for entry in listed} == {"l2_norm"}


def test_json_is_one_document():
    record = json.loads(ask("--json", "--op", "l2_norm", "--impl", "reference", "--seed", "3").stdout)
    assert record["ok"]
    assert record["counts"]["held"] == len([r for r in record["cases"] if r["status"] == "held"]) > 0
    assert record["environment"]["torch"] == torch.__version__
    assert any(row["gaps"] for row in record["cases"])
    assert all("spec" in row for row in record["cases"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--op", "no_such_op"], "no operator with cases matches"), (["--impl", "fast"], "expected reference, cpu or gpu"),
        (["--device", "tpu"], "expected cpu, cuda"), (["--device", "cpu:7"], "expected cpu, cuda"), (["--seed", "9" * 30], "equal to"),
        (["--mine", "no_colon"], "expected module:function"),
        (["--mine", "no_such_module_here:f", "--op", "l2_norm"], "cannot load"),
        (["--mine", "math:hypot"], "with the one operator"),
        (["--mine", "json:dumps", "--op", "*norm*", "--op", "linear"], "the one operator"),
    ],
)  # fmt: skip
def test_questions_that_make_no_sense(words, message):
    result = ask(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu():
    assert ask("--device", "cuda").exit_code == 2


def test_a_kernel_of_mine(mine):
    held = mine("my_l2_norm")
    assert held.exit_code == 0, held.output
    wrong = mine("my_mean_norm", "--json")
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)["counts"]["failed"] > 0
    assert "expected torch.float32 back, got torch.float64" in mine("doubles", "--json").stdout


def test_what_a_kernel_prints_is_no_part_of_the_report(mine):
    assert json.loads(mine("prints", "--json").stdout)["ok"]


def test_whoever_leaves_the_process_has_held_nothing(mine):
    record = mine("leaves", "--json")
    assert record.exit_code == 1
    assert {row["detail"] for row in json.loads(record.stdout)["cases"] if row["status"] == "failed"} == {"SystemExit: 0"}


def test_arguments_go_by_name_in_laws_too(mine):
    assert json.loads(mine("named", "--json").stdout)["counts"] == json.loads(mine("my_l2_norm", "--json").stdout)["counts"]


@pytest.mark.parametrize(
    ("module", "text", "message"),
    [
        ("unfinished", "def f(x:", "SyntaxError"), ("boom", "raise RuntimeError('boom')", "RuntimeError: boom"),
        ("leaving", "raise SystemExit(0)", "SystemExit: 0"), (".dotted", "", "relative import"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_imported(module, text, message, tmp_path, monkeypatch):
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    result = ask("--op", "l2_norm", "--mine", f"{module}:f")
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("place", "message"), [("no/such/page.html", "no such folder"), (".", "is a directory")])
def test_a_page_that_cannot_be_written_is_refused_before_the_long_part(place, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "check", lambda *a, **k: pytest.fail("the cases ran"))
    result = ask("--op", "l2_norm", "--html", place)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_page_is_written_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ask("--op", "l2_norm", "--html", "page.html").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "</html>" in (tmp_path / "page.html").read_text()


def test_arguments_that_mine_lacks_are_skipped_with_the_reason(mine):
    record = json.loads(mine("no_eps", "--json").stdout)
    assert "no_eps takes no eps" in {row["detail"] for row in record["cases"] if row["status"] == "skipped"}
    assert record["counts"]["held"] > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other", "it takes no x"), ("greedy", "it requires mode"), ("positional", "cannot be given by name"),
        ("NUMBER", "expected a function"), ("missing", "cannot load"),
    ],
)  # fmt: skip
def test_other_signatures(mine, name, message):
    result = mine(name)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_failure_and_a_kernel_that_is_not_there(monkeypatch):
    import narrowgate.ops as ops

    honest = ops.l2_norm
    monkeypatch.setattr(ops, "l2_norm", lambda x, *, eps=1e-6, impl=None: honest(x, eps=eps) * 2)
    failed = ask("--op", "l2_norm", "--impl", "reference")
    assert failed.exit_code == 1
    assert "failed: l2_norm/" in failed.output.replace("\n", "")
    absent = ask("--op", "l2_norm", "--impl", "gpu")
    assert absent.exit_code == 1  # nothing was held, so nothing is proved
    assert "skipped" in absent.output


def test_every_operator_with_cases_is_public_and_the_names_agree():
    import narrowgate.ops as ops

    for op in suite.choose():
        assert op in OPERATORS
        assert module.signature_problem(op, getattr(ops, op)) == ""
