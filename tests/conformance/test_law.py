"""A law holds two ways against each other, sees a planted fault, and is blind when its rival obeys it too."""

import torch

from narrowgate.conformance.case import Case, Rival
from narrowgate.conformance.run import run


def double(x, *, out=None, impl=None):
    out = torch.empty_like(x) if out is None else out
    return out.copy_(x * 2)


def rows_alone(ops, x):
    return {"y": (torch.stack([ops.double(x=row) for row in x]), ops.double(x=x))}


def mixes_rows(x):
    return {"y": x * 2 + x.sum(0) * (x.ndim > 1)}


def case(*rivals):
    return Case("double", "rows alone", lambda g: {"x": torch.randn(5, 7, generator=g)}, law=rows_alone, rivals=rivals)


def test_holds():
    assert run(case(Rival("rows mixed", mixes_rows)), double)


def test_sees_a_fault():
    assert run(case(), lambda x: mixes_rows(x)["y"]).status == "failed"


def test_blind():
    assert run(case(Rival("triple", lambda x: {"y": x * 3})), double).status == "blind"


def test_skips_where_an_operator_is_absent():
    lonely = Case("double", "other", lambda g: {"x": torch.ones(3)}, law=lambda ops, x: {"y": (ops.l2_norm(x), x)})
    assert run(lonely, double, impl="nobody").status == "skipped"
