"""Every item of the specification is held by a case or a test or has a status, and the committed page says by which."""

from pathlib import Path

import pytest

from narrowgate.conformance import coverage
from narrowgate.conformance.run import all_cases

ROOT = Path(__file__).parents[2]
RENEW = "run `python -m narrowgate.conformance.coverage` and commit docs/spec-coverage.md"

# Items that nothing holds yet. Exactly these: whoever covers one takes it out here.
PENDING = """

""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def found():
    return coverage.collect(ROOT)


def test_every_item_is_settled(found):
    waiting = {name for name, item in found.items() if not item.settled}
    assert waiting - set(PENDING) == set(), "nothing holds these: add a case, a test or a status"
    assert set(PENDING) - waiting == set(), "these are held now: take them out of PENDING"


def test_the_page_is_up_to_date(found):
    assert (ROOT / coverage.PAGE).read_text(encoding="utf-8") == coverage.render(found), RENEW


def test_claims_name_items_and_items_have_titles():
    known = coverage.items()
    assert len(known) > 300
    for case in (case for cases in all_cases().values() for case in cases):
        assert set(case.spec) <= set(known), case.id
    for item in known.values():
        assert len(item.title.split()) > 1
        assert not item.title.endswith(".")
        assert not item.status or item.status.startswith(coverage.STATUSES)


def test_marks_are_read_from_source_alone(tmp_path):
    tests = tmp_path / "tests" / "deep"
    tests.mkdir(parents=True)
    (tests / "test_x.py").write_text(
        'import no_such_module, pytest\npytestmark = [pytest.mark.slow, pytest.mark.spec("A1")]\n'
        '@pytest.mark.spec("A2", "B3")\n@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.spec("C4"))])\n'
        'def test_one(x): ...\n\n@pytest.mark.spec("D5")\nclass TestMany: ...\n\ndef test_none(): ...\n'
    )
    one = "tests/deep/test_x.py::test_one"
    want = {("tests/deep/test_x.py", "A1"), (one, "A2"), (one, "B3"), (one, "C4"), ("tests/deep/test_x.py::TestMany", "D5")}
    assert set(coverage.marks(tmp_path)) == want


def test_false_claims_are_refused(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_x.py").write_text('import pytest\n@pytest.mark.spec("A999")\ndef test_one(): ...\n')
    with pytest.raises(LookupError, match="A999"):
        coverage.collect(tmp_path)
    (tests / "test_x.py").write_text('import pytest\nNAME = "A1"\n@pytest.mark.spec(NAME)\ndef test_one(): ...\n')
    with pytest.raises(TypeError, match="plain strings"):
        coverage.collect(tmp_path)


def test_a_row_of_rivals_needs_each_of_its_readings():
    item = coverage.Item("R99", "x", rivals=("l2_norm: mean for sum", "no_op: no such rival|l2_norm: eps after the root"))
    cases = list(all_cases()["l2_norm"])
    assert coverage._showing(item, cases)
    item.rivals = ("l2_norm: mean for sum", "no_op: no such rival")
    assert coverage._showing(item, cases) == []
