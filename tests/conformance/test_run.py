"""The runner catches planted faults: in the result, in its inputs, beside its buffers, in memory it left unwritten."""

import pytest
import torch

from narrowgate.conformance.case import Case, Rival
from narrowgate.conformance.compare import close
from narrowgate.conformance.run import run
from narrowgate.errors import InputError


def double(x, *, out=None):
    out = torch.empty_like(x) if out is None else out
    return out.copy_(x * 2)


def oracle(x):
    return {"y": x * 2}


def inputs(g):
    return {"x": torch.randn(5, 7, generator=g)}


CASE = Case("double", "plain", inputs, oracle, rivals=(Rival("triple", lambda x: {"y": x * 3}),))


def test_holds():
    result = run(CASE, double)
    assert result, result.detail
    assert result.gaps["triple"] > 1


def test_blind_case_fails():
    blind = Case("double", "blind", inputs, oracle, close(abs=1e9), rivals=CASE.rivals)
    assert run(blind, double).status == "blind"


def beside(x, *, out=None):
    out = double(x, out=out)
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0) if out.storage_offset() else None
    return out


def before(x, *, out=None):
    x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(1.0)
    return double(x, out=out)


def changes_input(x, *, out=None):
    result = double(x, out=out)
    x[0, 0] += 1
    return result


def forgets_last(x, *, out=None):
    out = torch.empty_like(x) if out is None else out
    out[:-1] = x[:-1] * 2
    return out


def other_bits_with_out(x, *, out=None):
    return double(x) if out is None else out.copy_(x * 2 + 1e-6)


def returns_another(x, *, out=None):
    double(x, out=out)
    return double(x)


def crashes(x, *, out=None):
    raise ZeroDivisionError("planted")


FAULTS = [
    (beside, "beside a buffer"),
    (before, "beside a buffer"), (changes_input, "input was changed"), (forgets_last, "NaN astray"),
    (other_bits_with_out, "other bits"), (returns_another, "not the tensor returned"), (crashes, "planted"),
    (lambda x, *, out=None: double(x, out=out).neg_(), "bits"), (lambda x: None, "nothing came back"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_catches(fault, words):
    result = run(CASE, fault)
    assert result.status == "failed"
    assert words in result.detail


def test_refusals():
    case = Case("double", "refuses", inputs, raises=(InputError, "expected 3-D"))

    def refuses(x):
        raise InputError("double: expected 3-D, got 2-D")

    def late(x):
        x.zero_()
        raise InputError("double: expected 3-D, got 2-D")

    def vague(x):
        raise InputError("no")

    assert run(case, refuses)
    assert "written" in run(case, late).detail
    assert "contain" in run(case, vague).detail
    assert "nothing was raised" in run(case, double).detail
