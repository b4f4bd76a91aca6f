"""Golden bytes hold in both directions: the stored bytes decode to the values, and the codes pack to the stored bytes."""

import pytest
import torch

import narrowgate.ops as ops
from narrowgate.conformance import golden
from narrowgate.conformance.run import run
from narrowgate.formats import element, schemes
from narrowgate.ops import dequantize
from narrowgate.packing import pack
from narrowgate.packing.ggml import to_ggml_blocks

RECORDS = golden.records()


@pytest.mark.parametrize("case", golden.cases(), ids=lambda case: case.name)
def test_holds(case):
    assert case.rivals
    result = run(case, getattr(ops, case.op), impl="reference")
    assert result, result.detail


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_packs_to_the_same_bytes(record):
    w = golden.packed(record)
    if "ggml" in record:
        assert bytes(to_ggml_blocks(w).flatten().tolist()).hex() == record["data"]
        return
    again = pack(w.codes(), w.element, scales=w.scales, layout=w.layout)
    assert bytes(again.data.view(torch.uint8).flatten().tolist()).hex() == record["data"]


def test_every_kind_of_element_is_there():
    found = {record["element"] for record in RECORDS}
    assert {element(name).kind for name in found} == {"int", "uint", "index", "float", "exponent"} or len(found) >= 9
    assert {record["layout"] for record in RECORDS} == {"words@1", "fp6_bytes@1", "bytes@1"}
    assert all(record["source"] for record in RECORDS)


def test_every_scheme_is_encoded():
    encoded = {case.draw()["scheme"] for case in golden.cases() if case.op == "quantize"}
    assert set(schemes()) - encoded == {"bf16"}  # whose bytes are torch's own


def test_a_flipped_bit_is_seen():
    for record in RECORDS:
        damaged = {**record, "data": f"{int(record['data'][:2], 16) ^ 4:02x}" + record["data"][2:]}
        before, after = (dequantize(golden.packed(r), impl="reference") for r in (record, damaged))
        assert not torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0)), record["name"]
