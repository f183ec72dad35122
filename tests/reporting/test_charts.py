"""Charts out of drawn figures: series, intervals and axes; what a browser makes of them is in test_in_browser.py."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from markupsafe import Markup

from kvpolicy.reporting.charts import MAX_ROWS, with_chart
from kvpolicy.reporting.figures import INK, new_figure


def chart(figure: Any) -> tuple[dict[str, Any], str]:
    text = with_chart(Markup("<svg></svg>"), figure, "a <chart>", {INK: "var(--ink)"})
    found = re.search(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None and 'data-label="a &lt;chart&gt;"' in text
    return json.loads(found[1]), str(text)


def test_points_and_intervals_are_those_that_were_drawn() -> None:
    figure, (axes,) = new_figure(2.0)
    axes.errorbar([1.0, 2.0], [10.0, 20.0], yerr=[[1.0, 2.0], [3.0, 4.0]], color=INK, marker="s", label="</script>")
    axes.set_ylabel("ms")
    axes.invert_yaxis()
    spec, text = chart(figure)
    (one,) = spec["data"]
    assert (one["x"], one["y"], one["meta"]) == ([1.0, 2.0], [10.0, 20.0], "ms")
    assert (one["error_y"]["arrayminus"], one["error_y"]["array"]) == ([1.0, 2.0], [3.0, 4.0])
    assert one["marker"]["symbol"] == "square" and one["marker"]["color"] == "--ink" and one["first"]
    low, high = spec["layout"]["yaxis"]["range"]
    assert low > high, "as it was drawn, upside down"
    assert "<td>9 to 13</td>" in text and "&lt;/script&gt;" in text


def test_bars_lines_across_and_names_of_ticks() -> None:
    figure, (axes,) = new_figure(2.0)
    axes.bar([0, 1], [3.0, 4.0], 0.5, label="one")
    axes.axhline(2.0)
    axes.set_xticks([0, 1], ["short\n(3)", "long\n(4)"])
    spec, _ = chart(figure)
    assert [(one["type"], one["x"], one["y"]) for one in spec["data"]] == [("bar", [0.0, 1.0], [3.0, 4.0])]
    assert [(line["y0"], line["y1"], line["xref"]) for line in spec["layout"]["shapes"]] == [(2.0, 2.0, "x domain")]
    assert spec["layout"]["xaxis"]["ticktext"] == ["short<br>(3)", "long<br>(4)"]


def cells_of(text: str) -> list[list[str]]:
    rows = re.findall("<tr>(.*?)</tr>", text)
    return [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_a_table_names_the_rows_of_a_figure_and_not_their_places() -> None:
    figure, (axes,) = new_figure(2.0)
    for offset, label in ((-0.22, "one"), (0.22, "another")):
        axes.errorbar([0.5, 2.0], [offset, 1 + offset], xerr=[[0.1, 1.0], [0.2, 1.0]], label=label)
    axes.set_yticks([0, 1], ["its p99", "tokens/s"])
    axes.set_xlabel("over stock vLLM")
    spec, text = chart(figure)
    assert [one["rows"] for one in spec["data"]] == [["its p99", "tokens/s"]] * 2
    assert cells_of(text) == [
        ["quantity", "series", "over stock vLLM", "interval"],
        ["its p99", "one", "0.5", "0.4 to 0.7"], ["tokens/s", "one", "2", "1 to 3"],
        ["its p99", "another", "0.5", "0.4 to 0.7"], ["tokens/s", "another", "2", "1 to 3"],
    ]  # fmt: skip


def test_a_table_names_groups_of_bars() -> None:
    figure, (axes,) = new_figure(2.0)
    axes.bar([0.8, 1.8], [3.0, 4.0], 0.4, label="one")
    axes.set_xticks([1, 2], ["short\n(3)", "long\n(4)"])
    axes.set(xlabel="tokens", ylabel="regret, ms")
    assert cells_of(chart(figure)[1]) == [
        ["quantity", "series", "tokens", "value", "interval"],
        ["regret, ms", "one", "short (3)", "3", ""], ["regret, ms", "one", "long (4)", "4", ""],
    ]  # fmt: skip


def test_panels_share_an_axis_only_where_the_last_one_alone_names_it() -> None:
    for first, shared in (("", True), ("another", False)):
        figure, panels = new_figure(3.0, 2)
        for axes in panels:
            axes.plot([1, 2], [1, 2], label="one")
        panels[0].set_xlabel(first)
        panels[1].set_xlabel("x")
        spec, _ = chart(figure)
        assert ("matches" in spec["layout"]["xaxis2"]) == shared
        assert [one["first"] for one in spec["data"]] == [True, False], "each name stands once in the legend"


def test_long_series_are_thinned_in_the_table_and_it_says_so() -> None:
    figure, (axes,) = new_figure(2.0)
    axes.plot(range(1000), range(1000), label="one")
    spec, text = chart(figure)
    assert len(spec["data"][0]["x"]) == 1000 and text.count("<tr>") == 1 + MAX_ROWS and "thinned" in text


def test_a_map_of_colours_stays_as_it_was_drawn() -> None:
    figure, (axes,) = new_figure(2.0)
    axes.pcolormesh([[1.0, 2.0], [3.0, 4.0]])
    assert with_chart(Markup("<svg></svg>"), figure, "map", {}) == "<svg></svg>"
