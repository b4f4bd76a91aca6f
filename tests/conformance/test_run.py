"""The runner catches planted faults: in the result, in its inputs, beside its buffers, in memory it left unwritten."""

import pytest
import torch

from narrowgate.conformance.case import Case, Rival
from narrowgate.conformance.compare import close
from narrowgate.conformance.run import all_cases, run
from narrowgate.errors import InputError, UnsupportedError
from narrowgate.ops import l2_norm


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


@pytest.mark.spec("A4")
def test_what_a_kernel_cannot_do_is_skipped_with_the_reason():
    """A named kernel may refuse a call by name; the reference may not, and nothing else is a refusal."""

    def narrow(x, *, impl=None, out=None):
        raise UnsupportedError(f"double: impl={impl!r} cannot take this call: needs 16 columns a line, this device has 4")

    def lost(x, *, impl=None, out=None):
        raise UnsupportedError("double: out of workspace")

    skipped = run(CASE, narrow, impl="gpu")
    assert skipped.status == "skipped"
    assert "needs 16 columns a line" in skipped.detail
    assert run(CASE, narrow, impl="reference").status == "failed"
    assert run(CASE, lost, impl="gpu").status == "failed"
    seen = Case("double", "values", inputs, raises=(InputError, "x"), cpu_only=True)
    assert "only the CPU" in run(seen, narrow, device="cuda").detail


def test_other_ways_to_be_wrong():
    def odd_address(x, *, out=None):
        return double(x, out=out) if x.data_ptr() % 64 == 0 else double(x, out=out).mul_(1 + 1e-6)

    def other_dtype_wrong(x, *, out=None):
        return double(x) if out is None else out.copy_(x * 2 if out.dtype == x.dtype else x * 2.5)

    assert "second call" in run(CASE, lambda x: odd_address(x)).detail
    assert "given out" in run(CASE, odd_address).detail
    assert run(CASE, other_dtype_wrong)  # nothing declares which types an out of `double` may have
    real = next(case for case in all_cases()["l2_norm"] if case.name == "shape (5, 127)")

    def norm(x, *, eps=1e-6, out=None):
        y = l2_norm(x, eps=eps, out=out)
        return y if out is None or out.dtype == x.dtype else y.mul_(1.5)

    assert "given out" in run(real, norm).detail
    assert "expected torch.float32 back" in run(real, lambda x: l2_norm(x).double()).detail
    assert "expected 1 tensors back, got 2" in run(CASE, lambda x: (double(x), x)).detail


def test_rows_that_are_left_alone():
    """An output that is not written everywhere: zeros where it is allocated, what it held where it is given."""

    def skips(x, *, out=None):
        out = torch.zeros_like(x) if out is None else out
        out[[0, 2]] = x[[0, 2]] * 2
        return out

    def oracle_of(x):
        return {"y": torch.where(mask, 0.0, x * 2)}

    mask = torch.tensor([False, True, False, True, True])[:, None]
    case = Case("double", "left alone", inputs, oracle_of, left_alone=lambda x: mask)
    assert run(case, skips), run(case, skips).detail

    def fills(x, *, out=None):
        return skips(x) if out is None else out.copy_(skips(x))

    assert "must leave alone" in run(case, fills).detail
    assert not run(Case("double", "not said", inputs, oracle_of), skips)
