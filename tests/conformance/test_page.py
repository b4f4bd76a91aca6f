"""The page of a report: self-contained, complete, the same at any width. A headless Chromium lays it out where there is one."""

import html.parser
import re
import shutil
import subprocess

import pytest

from narrowgate.conformance.page import GLYPHS, bar, page, share
from narrowgate.conformance.suite import STATUSES, Report, Row

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=1""".split()  # noqa: SIM905
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH to lay the page out")


def row(i, status, **changed):
    given = {
        "op": f"an_operator_with_a_rather_long_name_{i % 5}", "case": f"case {i}, <b>with</b> & a name that goes on and on",
        "impl": "reference", "status": status, "compare": "close(abs=1e-06, rel=0)", "spec": ("A1", "D99"),
        "detail": "" if status == "held" else "y" * 300 + f": error 8 at [3, 4] {status}", "errors": {"y": i / 50},
        "gaps": {"mean for sum": 4.2e4, "read before the decay": float("inf")}, "seconds": 0.25, "first_call": 0.125,
    }  # fmt: skip
    return Row(**{**given, **changed})


def report():
    rows = [row(i, "held") for i in range(140)]
    rows += [row(141, "failed", errors={"y": float("inf")}), row(142, "blind"), row(143, "skipped", errors={}, gaps={})]
    return Report({"device": "cpu, " + "x" * 120, "torch": "2.13.0"}, rows, left_out=3, seconds=71.0)


class Reader(html.parser.HTMLParser):
    """Tags, ids and links, with a check that tags nest."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.tags, self.text = [], set(), set(), set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        names = dict(attrs)
        self.ids |= {names["id"]} if "id" in names else set()
        self.links |= {names["href"]} if "href" in names else set()
        assert "src" not in names
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(text):
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


def test_is_complete_and_self_contained():
    text = page(report())
    reader = read(text)
    assert not reader.tags & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in text
    assert "http" not in text
    assert reader.links == {f"#c{i}" for i in range(143)}  # a cell a case, each with its place on the page
    assert {link[1:] for link in reader.links} <= reader.ids
    assert "<b>with</b>" not in text  # names are escaped
    for words in (
        "2 of 142 cases did not hold",
        "mean for sum",
        "4.2e+04 limits",
        "beyond any limit",
        "D99",
        "torch",
        "--full",
    ):
        assert words in " ".join(reader.text.split())
    for media in ("prefers-color-scheme: dark", "@media print", "max-width"):
        assert media in text


def test_every_status_has_a_glyph_of_its_own():
    assert set(GLYPHS) == set(STATUSES)
    assert len(set(GLYPHS.values())) == len(GLYPHS)
    text = page(report())
    assert all(f'class="glyph {status}"' in text and glyph in text for status, glyph in GLYPHS.items())


def test_verdicts():
    assert "All 2 cases held" in page(Report({}, [row(1, "held"), row(2, "held"), row(3, "skipped")]))
    assert "No case ran" in page(Report({}, [row(3, "skipped")]))
    assert "No case ran" in page(Report({}, []))


def test_bars():
    assert bar(0.0) == ""
    assert "width:25%" in bar(0.25)
    assert "over" not in bar(1.0)
    assert "over" in bar(1.01)
    assert "width:100%" in bar(float("inf"))
    assert share(0.25) == "25% of its limit"


def chromium(tmp_path, *words):
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@needs_chromium
@pytest.mark.parametrize("width", [360, 1280])
def test_lays_out_without_sideways_scrolling(tmp_path, width):
    """Measured in a frame of that width, with everything unfolded and hidden overflow counted as overflow."""
    inner = page(report()).replace("<details>", "<details open>").replace("&", "&amp;").replace('"', "&quot;")
    measure = (
        "const d = f.contentDocument; const wide = [...d.body.querySelectorAll('*')].filter(e => "
        "e.getBoundingClientRect().right > d.documentElement.clientWidth + 0.5).length;"
        "document.body.dataset.found = [d.documentElement.scrollWidth, wide, d.body.scrollHeight].join(' ');"
    )
    frame = f'<iframe id=f style="width:{width}px;height:900px;border:0" srcdoc="{inner}" onload="{measure}"></iframe>'
    (tmp_path / "frame.html").write_text(f"<!doctype html><body>{frame}</body>", encoding="utf-8")
    dom = chromium(tmp_path, "--window-size=1400,1000", "--dump-dom", f"file://{tmp_path}/frame.html")
    scroll, wide, height = map(int, re.search(r'data-found="(\d+) (\d+) (\d+)"', dom).groups())
    assert scroll <= width
    assert wide == 0
    assert height > 900


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False)])
def test_is_not_blank(tmp_path, width, dark):
    """The picture has paper, ink and the colours of held and failed; in the dark the paper is dark."""
    image = pytest.importorskip("matplotlib.image")
    (tmp_path / "page.html").write_text(page(report()), encoding="utf-8")
    shot = tmp_path / "page.png"
    mode = ["--blink-settings=preferredColorScheme=0"] if dark else []
    chromium(tmp_path, *mode, f"--window-size={width},1600", f"--screenshot={shot}", f"file://{tmp_path}/page.html")
    pixels = (image.imread(shot)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (1600, width)
    share_of = lambda colour: (abs(pixels - colour).sum(-1) <= 6).mean()  # noqa: E731
    paper, held, failed = ((18, 22, 27), (61, 143, 214), (232, 132, 60)) if dark else ((255,) * 3, (10, 94, 168), (181, 71, 8))
    assert 0.3 < share_of(paper) < 0.99
    assert share_of(held) > 0.002
    assert share_of(failed) > 0.0002
