"""The pages in a real browser, by its own mouse and keyboard events: what a reader sees, and what they can do.

Skipped where no Chromium or Firefox is installed, or the packages that drive and draw are missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.overflow import MEMORY, TIMELINE
from kvpolicy.reporting.findings import MOMENTS
from kvpolicy.reporting.measurements import Mark
from kvpolicy.reporting.pipeline import report
from tests.reporting import test_bench_page as a_bench
from tests.reporting import test_demo_page as a_demo
from tests.reporting.measured_runs import served_run, with_runs

browsers = pytest.importorskip("playwright.sync_api", reason="no playwright to drive a browser")
pytest.importorskip("plotly", reason="no plotly, so that pages are static")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
    # asyncio's pipes to the browser, closed by the collector after its loop
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
NAMES = ("overflow", "bench", "demo", "served")


@pytest.fixture(scope="module")
def pages(report_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    report([a_bench.bench(folder / "bench")], folder / "bench.html")
    (folder / "demo").mkdir()
    report([a_demo.write_run(folder / "demo")], folder / "demo.html")
    shutil.copy(report_folder / "page.html", folder / "overflow.html")
    (folder / "served.html").write_text(_served())
    return {name: folder / f"{name}.html" for name in NAMES}


def _served() -> str:
    """The figures of served runs alone, in the style of a page."""
    from kvpolicy.reporting.figures import draw
    from kvpolicy.reporting.page import inline, templates

    marks = tuple(Mark(at / 4, kind) for at, kind in enumerate(("recompute", "swap") * 4))
    runs = [served_run(figure=MEMORY, arm=arm, level=level, repeat=repeat, overhead_s=1.0 + repeat)
            for arm in ("always-recompute", "always-swap") for level in (12, 50) for repeat in range(2)]  # fmt: skip
    drawings = (draw(with_runs(*runs), MEMORY), draw(with_runs(served_run(preempted=marks, resumed=marks)), TIMELINE))
    bodies = [inline(one, f"served-{number}", "served") for number, one in enumerate(drawings)]
    page = templates().from_string(
        '<!doctype html><html lang="en"><meta name="viewport" content="width=device-width"><title>served</title>'
        '<meta name="color-scheme" content="light dark"><style>{% include "style.css.j2" %}</style><main>'
        '{% for one in bodies %}<section class="card">{{ one }}</section>{% endfor %}</main>'
        '<script type="application/gzip+base64" id="chart-library">{{ charts() }}</script>'
        '<script>{% include "charts.js.j2" %}</script></html>'
    )
    return page.render(bodies=bodies)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsers.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


class Reader:
    """A page as it is open in front of somebody, and what its console said."""

    def __init__(self, browser: Any, file: Path, width: int = 1280, scheme: str = "light", **more: Any) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
        self.said: list[str] = []
        self.fetched: list[str] = []
        self.page.on("console", lambda one: self.said.append(one.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda one: self.fetched.append(one.url))
        self.page.goto(file.as_uri())
        if more.get("java_script_enabled", True):
            self.page.wait_for_selector("html[data-charts=ready]", state="attached", timeout=60_000)


OFTEN = ((390, "light"), (1280, "dark"))
looks = pytest.mark.parametrize(
    ("width", "scheme"),
    [
        pytest.param(*look, id="-".join(map(str, look)), marks=[] if look in OFTEN else pytest.mark.slow)
        for look in product(WIDTHS, SCHEMES)
    ],
)
"""In which every page is opened, in those of :data:`OFTEN` by `make test`."""


@looks
def test_it_opens_without_an_error_or_a_network_and_nothing_overflows(
    browser: Any, pages: dict[str, Path], width: int, scheme: str
) -> None:
    for name in NAMES:
        reader = Reader(browser, pages[name], width, scheme)
        try:
            assert reader.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is (scheme == "dark")
            assert reader.said == []
            assert [url for url in reader.fetched if not url.startswith(("file:", "data:", "blob:"))] == []
            assert reader.page.evaluate("document.documentElement.scrollWidth") <= width
            assert reader.page.locator(".live .plot .main-svg").count() > 0
            wider = reader.page.evaluate(
                "[...document.querySelectorAll('.plot')].filter(one => one.querySelector('.main-svg')"
                ".getBoundingClientRect().right > one.parentElement.getBoundingClientRect().right + 1).length"
            )
            assert wider == 0
        finally:
            reader.page.close()


CELLS = """
() => [...document.querySelectorAll("table.arms")].map(table => ({
  head: table.querySelector("thead").getClientRects().length > 0,
  arms: [...table.querySelectorAll("thead th + th")].map(one => one.textContent),
  scrolls: table.parentElement.scrollWidth > table.parentElement.clientWidth,
  rows: [...table.querySelectorAll("tbody tr")].map(row => [...row.querySelectorAll("td + td")].map(cell => ({
    named: getComputedStyle(cell, "::before").content.replaceAll('"', ""),
    right: Math.max(...[cell, ...cell.children].map(one => one.getBoundingClientRect().right)),
  }))),
}))
"""


def of_demo(pages: dict[str, Path]) -> dict[str, Any]:
    """The loads of the demo whose page is open, by name."""
    return dict(json.loads((pages["demo"].parent / "demo" / "demo.json").read_text())["scenarios"])


@pytest.mark.parametrize("width", WIDTHS)
def test_every_arm_of_a_demo_is_seen_without_scrolling(browser: Any, pages: dict[str, Path], width: int) -> None:
    """Also the last one, which is the headline's; where there is no head, each figure says of which arm it is."""
    reader = Reader(browser, pages["demo"], width)
    tables, loads = reader.page.evaluate(CELLS), of_demo(pages).values()
    assert [(len(one["arms"]), len(one["figures"]["vllm"])) for one in loads] == [(4, 5), (3, 4)]
    assert [table["arms"] for table in tables] == [[*one["arms"]] for one in loads]
    assert [len(table["rows"]) for table in tables] == [6, 5], "preemptions, too"
    for table in tables:
        assert table["head"] is (width > 620) and not table["scrolls"]
        for row in table["rows"]:
            assert max(cell["right"] for cell in row) <= width
            assert [cell["named"] for cell in row] == (["none"] * len(row) if table["head"] else table["arms"])
    reader.page.close()


def test_the_mouse_shows_a_value_zooms_and_switches_a_series(browser: Any, pages: dict[str, Path]) -> None:
    reader = Reader(browser, pages["bench"])
    page, chart = reader.page, reader.page.locator(".chart").first
    chart.scroll_into_view_if_needed()
    point = chart.locator(".points path.point").first.bounding_box()
    page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
    chart.locator(".hoverlayer .hovertext").first.wait_for()
    assert "vllm" in chart.locator(".hoverlayer").text_content()
    plot = chart.locator(".plot")
    before = plot.evaluate("one => one.layout.xaxis.range.slice()")
    area = chart.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(area["x"] + area["width"] * 0.3, area["y"] + area["height"] * 0.3)
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 0.6, area["y"] + area["height"] * 0.7, steps=8)
    page.mouse.up()
    after = plot.evaluate("one => one.layout.xaxis.range.slice()")
    assert after[1] - after[0] < 0.5 * (before[1] - before[0])
    drawn = chart.locator(".points path.point").count()
    chart.get_by_role("button", name="kvpolicy").click()
    assert chart.locator(".points path.point").count() < drawn
    assert reader.said == []
    page.close()


def test_the_keyboard_does_the_same(browser: Any, pages: dict[str, Path]) -> None:
    reader = Reader(browser, pages["bench"])
    page, chart = reader.page, reader.page.locator(".chart").first
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "(document.activeElement.closest('.chart') === document.querySelector('.chart')) && "
            "(document.activeElement.className || document.activeElement.tagName)"
        )
        if focused == "BUTTON" and "BUTTON" not in seen:
            page.keyboard.press("Space")
            assert chart.get_by_role("button", name="vllm").get_attribute("aria-pressed") == "false"
            page.keyboard.press("Space")
        if focused and "plot" in focused and "plot" not in seen:
            seen.add("plot")
            page.keyboard.press("ArrowRight")
            assert "vllm: 0, messages per second" in chart.locator(".said").inner_text()
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowDown")
            assert "kvpolicy: 0," in chart.locator(".said").inner_text()
            before = chart.locator(".plot").evaluate("one => one.layout.xaxis.range.slice()")
            page.keyboard.press("+")
            after = chart.locator(".plot").evaluate("one => one.layout.xaxis.range.slice()")
            assert after[1] - after[0] < before[1] - before[0]
            page.keyboard.press("0")
            assert chart.locator(".plot").evaluate("one => one.layout.xaxis.range") == before
        if focused == "SUMMARY":
            page.keyboard.press("Enter")
            assert chart.locator("details.numbers table").is_visible()
            seen.add("SUMMARY")
            break
        seen.add(focused)
    assert {"BUTTON", "plot", "SUMMARY"} <= seen and reader.said == []
    page.close()


CONTRAST = """
() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = colour => { paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => { const one = [r, g, b].map(v => (v /= 255) <= .03928 ? v / 12.92
    : ((v + .055) / 1.055) ** 2.4); return .2126 * one[0] + .7152 * one[1] + .0722 * one[2]; };
  const behind = one => { for (; one; one = one.parentElement) {
    const colour = rgba(getComputedStyle(one).backgroundColor); if (colour[3] === 255) return colour; }
    return [255, 255, 255, 255]; };
  const low = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement, style = getComputedStyle(one);
    if (!walk.currentNode.data.trim() || !one.getClientRects().length || one.closest("script, style, .hoverlayer"))
      continue;
    const text = rgba(one.closest("svg") ? style.fill : style.color), ground = behind(one);
    const [high, dim] = [light(text), light(ground)].sort((a, b) => b - a), ratio = (high + .05) / (dim + .05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${walk.currentNode.data.trim().slice(0, 40)}`);
  }
  return low;
}
"""


@looks
def test_text_has_contrast(browser: Any, pages: dict[str, Path], width: int, scheme: str) -> None:
    for name in NAMES:
        reader = Reader(browser, pages[name], width, scheme)
        marks = "●■▲▼◆━╍┈▮"  # of a key, at 3:1 as graphics
        low = [one for one in reader.page.evaluate(CONTRAST) if not (one[-1] in marks and float(one.split()[0]) >= 3)]
        assert low == [], name
        reader.page.close()


def test_a_row_of_a_demo_is_read_by_its_name(browser: Any, pages: dict[str, Path]) -> None:
    reader = Reader(browser, pages["demo"])
    chart = reader.page.locator(".chart").first
    chart.locator(".plot").focus()
    reader.page.keyboard.press("ArrowRight")
    ratio = next(iter(of_demo(pages).values()))["ratios"]["TTFT best threshold / vllm"]["value"]
    assert chart.locator(".said").inner_text() == f"best threshold: time to first token {ratio:.4g}"
    hover = chart.locator(".hoverlayer .hovertext").first
    hover.wait_for()
    assert f"time to first token: {ratio:.4g}" in hover.text_content()
    assert reader.said == []
    reader.page.close()


def test_the_theme_is_followed_while_the_page_is_open(browser: Any, pages: dict[str, Path]) -> None:
    reader = Reader(browser, pages["demo"])
    ink = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    light = reader.page.evaluate(ink)
    reader.page.emulate_media(color_scheme="dark")
    reader.page.wait_for_function(f"{ink} !== {light!r}")
    reader.page.close()


def test_without_scripts_and_in_print_the_static_figures_are_shown(browser: Any, pages: dict[str, Path]) -> None:
    reader = Reader(browser, pages["overflow"], java_script_enabled=False)
    assert reader.page.locator(".static > svg").first.is_visible() and reader.page.locator(".plot").count() == 0
    reader.page.close()
    reader = Reader(browser, pages["overflow"])
    assert not reader.page.locator(".static > svg").first.is_visible()
    reader.page.emulate_media(media="print")
    assert reader.page.locator(".static > svg").first.is_visible()
    assert not reader.page.locator(".plot").first.is_visible()
    reader.page.close()


def test_a_chart_has_the_numbers_of_its_figure(browser: Any, pages: dict[str, Path]) -> None:
    """Hover, table and static figure come from one drawing: means and intervals as in the table below it."""
    reader = Reader(browser, pages["served"])
    panels = reader.page.locator(".chart").last.locator(".plot").evaluate(
        "one => one.data.map(line => [line.meta, line.name, line.x.length, line.y[0]])"
    )  # fmt: skip
    assert ["tokens/s", "", MOMENTS + 1] in [one[:3] for one in panels]
    assert {"host pool, MiB", "device KV, %", "requests"} <= {one[0] for one in panels}
    assert {"preempted, swap", "back, recompute", "running", "waiting"} <= {one[1] for one in panels}
    overhead = (
        reader.page.locator(".chart").first.locator(".plot").evaluate("one => [one.data[0].y, one.data[0].error_y]")
    )
    assert overhead[0] == [1.5, 1.5] and overhead[1]["array"][0] == pytest.approx(6.353, abs=1e-3)
    reader.page.close()
