"""The finished picture: what it says, that it is harmless, and that it stays small."""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import mistune
import nbformat
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbconvert import HTMLExporter, MarkdownExporter

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.gang_state import GangState, replay
from hydrogen_magic.driver.state.output_lines import OutputLine
from hydrogen_magic.driver.state.span_tracks import SpanTracks
from hydrogen_magic.views.curves import Curves
from hydrogen_magic.views.line_shares import kept_lines
from hydrogen_magic.views.static_svg import colours, html
from hydrogen_magic.views.static_svg.ansi import to_html
from hydrogen_magic.views.static_svg.charts import overlaid_html
from hydrogen_magic.views.static_svg.fills import FILLS, KINDS, fills
from hydrogen_magic.views.static_svg.scales import Scale, seconds_ticks, value_scale
from hydrogen_magic.views.static_svg.swimlanes import _covered
from hydrogen_magic.views.widget.static_html import StaticView
from tests import seconds
from tests.pictures import drawn, ended, launched, trained

TAGS = {"div", "p", "b", "span", "pre", "table", "tr", "th", "td", "img", "details", "summary"}
ATTRIBUTES = {"class", "style", "align", "src", "alt", "width", "height"}
SHAPES = {f"{{http://www.w3.org/2000/svg}}{tag}" for tag in ("svg", "path", "text", "circle")}
HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "</pre></td></table><script>alert(1)</script>",
    "\"' onload=alert(1) x='",
    "]]></text><script>alert(1)</script>",
    "&lt;b&gt;",
    "&#60;i&#62;",
    "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "\x1b[31m<b>",
    "\x1b[38;2;1;2",
    "\u202egnp.exe",
    "\x00\x07\x1b",
    "\ufffe\uffff\ud800",
    "[a](javascript:alert(1))",
    "$\\href{x}{y}$",
    "\n\n# x\n\n",
]
ANYTHING = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_categories=()), max_size=40),
    st.tuples(st.sampled_from(HOSTILE), st.sampled_from(HOSTILE)).map("".join),
)


@dataclass
class Parsed(HTMLParser):
    """A piece of HTML as a browser reads it."""

    source: str
    tags: list[str] = field(default_factory=list)
    attributes: list[tuple[str, str]] = field(default_factory=list)
    open_tags: list[str] = field(default_factory=list)
    text: str = ""
    cells: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "img":
            self.open_tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert tag == "img" or self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        data = data.replace("\xa0", " ")
        self.text += data
        if {"td", "th"} & set(self.open_tags):
            self.cells[-1] += data

    def images(self) -> list[str]:
        """Return the SVG of every picture."""
        head = "data:image/svg+xml;base64,"
        sources = [value for name, value in self.attributes if name == "src"]
        assert all(source.startswith(head) for source in sources)
        return [base64.b64decode(source[len(head) :]).decode("utf-8") for source in sources]

    def words(self) -> list[str]:
        """Return the texts inside of pictures."""
        shapes = (each for image in self.images() for each in ElementTree.fromstring(image).iter())
        return [each.text or "" for each in shapes if each.tag.endswith("text")]

    def alts(self) -> list[str]:
        return [value for name, value in self.attributes if name == "alt"]


def checked(fragment: str) -> Parsed:
    """Return ``fragment`` parsed, after a look at whether it is ours alone and asks for nothing."""
    parsed = Parsed(fragment)
    assert parsed.open_tags == []
    assert set(parsed.tags) <= TAGS
    assert {name for name, _ in parsed.attributes} <= ATTRIBUTES
    assert not any("url(" in value for name, value in parsed.attributes if name == "style")
    for image in parsed.images():
        tree = ElementTree.fromstring(image)
        assert {each.tag for each in tree.iter()} <= SHAPES
        assert not any(
            name.startswith("on") or "href" in name for each in tree.iter() for name in each.attrib
        )
    return parsed


# ── what it says ─────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_told_in_tables_curves_and_a_timeline() -> None:
    lines = [OutputLine(1, "stdout", "hello"), OutputLine(0, "stderr", "oh \x1b[31mred\x1b[0m")]
    parsed = checked(drawn(ended(trained(4, 200, ("loss", "lr"))), lines))
    assert "✓ gang 3f2a · 4 ranks · succeeded in 4.3 s · local · torch" in parsed.text
    assert parsed.cells[:8] == [
        "rank",
        "state",
        "device",
        "progress",
        "steps",
        "loss",
        "lr",
        "memory",
    ]
    assert parsed.cells[8:13] == ["■ rank 0", "done", "cpu", "epoch 200/200", "200"]
    assert parsed.cells[15] == "1.2 GB"
    assert len(parsed.images()) == 1 + 2 + 1, "key, two curves, timeline"
    assert parsed.alts()[1].startswith("loss: 2.")
    assert parsed.alts()[3].startswith("Timeline of 4 ranks over 4.3 s: backward 40 %")
    assert "Output: 2 lines" in parsed.text and "[1] hello\n[0] oh red" in parsed.text
    assert {"rank 3", "backward 40 %", "running"} <= set(parsed.words())


def test_a_run_over_a_frame_tells_its_rows_and_how_fast_each_rank_was() -> None:
    events = [
        *launched(2),
        *(ev.Progress(at_s, 0, -1, "", n, None, "rows") for at_s, n in ((1.0, 0), (3.0, 7000))),
        ev.RowsDone(3.0, 1.0, 10_000, 12_000, 4, 2),
    ]
    parsed = checked(drawn(ended(events)))
    assert "10,000 of 12,000 rows · 5,000 rows/s · 2 rows failed" in parsed.text
    assert {"7,000 rows", "3,500 rows/s"} <= set(parsed.cells)
    assert "· local" in parsed.text and "· torch" not in parsed.text, "ranks do not meet"


def test_where_the_time_goes_names_the_ranks_that_differ() -> None:
    parsed = checked(drawn(ended(trained(4, 400))))
    at = parsed.cells.index("■ data")
    share, mean, least, most = parsed.cells[at + 1 : at + 5]
    assert share.endswith(" %") and mean.endswith(" s")
    assert "(rank 2)" in most and "(rank 2)" not in least


def test_a_failure_stands_on_top_with_the_culprits_lines() -> None:
    events = [
        *launched(2),
        ev.RankExited(3.0, 1, 1),
        ev.RankExited(3.1, 0, None, "SIGTERM", True),
        ev.GangEnded(3.2, "FAILED", "rank 1 failed", 1),
    ]
    parsed = checked(drawn(events, report="rank 1 failed: ValueError: <bad>\n\n  x = y"))
    assert parsed.text.index("✕ gang 3f2a") < parsed.text.index("ValueError: <bad>\n\n  x = y")
    assert parsed.text.index("ValueError: <bad>") < parsed.text.index("failed: exit status 1")


def test_the_culprit_alone_is_crossed_in_the_timeline() -> None:
    error = ev.RankFailed(9.1, 0, ev.ErrorReport("ConnectionResetError", "closed"), "running")
    failed = [ev.RankExited(9.0, 1, 1), error, ev.RankExited(9.1, 0, 1)]
    page = drawn([*trained(2, 50), *failed, ev.GangEnded(9.2, "FAILED", "rank 1 failed", 1)])
    images = re.findall(r"svg\+xml;base64,([^\"]*)", page)
    crossed = [base64.b64decode(image).count(b"l8 8m0 -8l-8 8") for image in images]
    assert sum(crossed) == 1
    assert "stopped" in checked(page).cells
    named = [*trained(2, 50), *failed, ev.GangEnded(9.2, "FAILED", "rank 0 failed", 0)]
    assert "failed: ConnectionResetError" in checked(drawn(named)).cells


def test_notices_and_the_rate_are_told() -> None:
    events = [
        *trained(2, 100),
        ev.Notice(3.0, "info", "all is well"),
        ev.Notice(3.0, "error", "no"),
    ]
    parsed = checked(drawn(events))
    assert "all is well" in parsed.text and "! all" not in parsed.text and "! no" in parsed.text
    assert "local · torch · 100 steps/s" in parsed.text
    assert "steps/s" not in checked(drawn(ended(events))).text, "as in the live view"


def test_many_ranks_are_folded_to_those_that_differ() -> None:
    events = [*trained(40, 20), ev.RankExited(5.0, 33, None, "SIGKILL")]
    parsed = checked(drawn(ended(events, "FAILED")))
    assert "40 ranks: 39 done, 1 failed" in parsed.text
    assert sum(cell.startswith("rank ") for cell in parsed.cells) == 16
    assert "rank 33" in parsed.cells and "failed: SIGKILL" in parsed.cells
    assert "16 of 40 ranks" in parsed.text


def test_the_rank_that_ended_last_is_among_those_shown() -> None:
    events = [
        *trained(40, 20),
        *(ev.RankPhase(5.0 + (rank == 30), rank, "done") for rank in range(40)),
    ]
    assert "rank 30" in checked(drawn(ended(events))).cells


def test_of_many_metrics_the_first_are_drawn_and_the_others_named() -> None:
    parsed = checked(drawn(ended(trained(2, 20, [f"m{n}" for n in range(40)], spans=False))))
    assert "the first 12 of 40 metrics; not drawn: m12, m13," in parsed.text
    assert "m23 and 16 more" in parsed.text
    assert [alt.split(":")[0] for alt in parsed.alts()[1:13]] == [f"m{n}" for n in range(12)]


def test_ranks_that_agree_are_one_line() -> None:
    same = checked(drawn(ended(trained(4, 50, ("lr",), spans=False)))).images()[1]
    different = checked(drawn(ended(trained(4, 50, ("loss",), spans=False)))).images()[1]
    assert not any(colours.of_rank(rank) in same for rank in range(4))
    assert all(colours.of_rank(rank) in different for rank in range(4))


def test_ranks_are_not_one_line_where_one_has_nan() -> None:
    events = trained(2, 50, ("lr",), spans=False)
    nan = ev.Metrics(3.0, 1, (50, 51), (3.0, 3.0), {"lr": (math.nan, math.nan)})
    drawing = checked(drawn(ended([*events, nan]))).images()[1]
    assert all(colours.of_rank(rank) in drawing for rank in range(2))


@pytest.mark.parametrize("bad_ranks", [(3,), (3, 5)])
def test_ranks_without_a_line_of_their_own_may_have_nan(bad_ranks: tuple[int, ...]) -> None:
    events = trained(20, 50, ("lr",), spans=False)
    events += [ev.Metrics(3.0, rank, (50,), (3.0,), {"lr": (math.nan,)}) for rank in bad_ranks]
    legend, chart = checked(drawn(ended(events))).alts()[:2]
    assert legend == "Legend"
    assert "lowest" in chart and "not finite at step 50 (rank" in chart


def test_long_names_that_end_alike_stay_different() -> None:
    names = [f"{part}/validation/mean_of_the_objective_head" for part in "abcd"]
    parsed = checked(drawn(ended(trained(2, 20, names, spans=False))))
    titles = [word for word in parsed.words() if "…" in word]
    assert len(set(titles)) == 4


def test_a_failure_that_the_cell_shows_too_is_folded() -> None:
    state, text = replay(launched(2)), "rank 1 failed\n  line"
    folded = html(state, Curves(), SpanTracks(), [], text, is_folded=True)
    assert "<summary>rank 1 failed</summary>" in folded and "line" in checked(folded).text


def test_large_and_small_values_are_whole() -> None:
    for values, labels, last in (
        ((0, 98_765_432), {"0", "20000000", "80000000"}, "98765432"),
        ((-1.25e-4, 1.25e-4), {"-0.00010", "0.00000", "0.00010"}, "0.000125"),
        ((1.7e9, 1.7e9 + 100), {"1700000000", "1700000100"}, "1.7e+09"),
        ((1.25e-12, 1.75e-12), {"1.3e-12", "1.7e-12"}, "1.75e-12"),
        ((0.0, 0.0), {"-1.0", "0.0", "1.0"}, "0"),
    ):
        logged = ev.Metrics(2.0, 0, (0, 1), (0.0, 1.0), {"m": values})
        parsed = checked(drawn(ended([*launched(1), logged])))
        assert labels <= {*parsed.words()} and last in parsed.words(), parsed.words()
        places = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*end', parsed.images()[1])]
        shown = re.findall(r'<text x="[\d.]+"[^>]*end[^>]*>([^<]*)<', parsed.images()[1])
        for x, text in zip(places, shown, strict=True):
            assert x > 5 * len(text), "it begins inside the picture"


def test_a_curve_over_many_decades_gets_a_logarithmic_axis() -> None:
    parsed = checked(drawn(ended(trained(1, 400, ("lr",), spans=False))))
    assert {"0.001", "1e-05", "1e-07"} <= set(parsed.words())


def test_few_spans_are_boxes_with_names_and_many_are_shares() -> None:
    few = seconds.spans(3.0, 0, ("epoch one",), (2.0,), (3.0,), (0,))
    words = checked(drawn(ended([*launched(1), few]))).words()
    assert "epoch one" in words
    many = checked(drawn(ended(trained(1, 300)))).words()
    assert "forward" not in many and any(word.startswith("forward ") for word in many)


def test_many_spans_inside_of_one_that_has_not_ended() -> None:
    """A rank that was killed in the outer span has sent the inner ones alone."""
    n = 300
    starts, ends = zip(*((2 + k / 100, 2.009 + k / 100) for k in range(n)), strict=True)
    inner = seconds.spans(5.0, 0, ("step",) * n, starts, ends, (1,) * n)
    words = checked(drawn(ended([*launched(1), inner]))).words()
    assert any(word.startswith("step ") for word in words)


def fed_curves(events: list[ev.Event]) -> Curves:
    curves = Curves()
    curves.feed(events)
    return curves


def test_runs_of_a_sweep_that_are_not_drawn_cost_the_others_no_points() -> None:
    drawn_runs = [fed_curves(trained(1, 400, ("loss",), spans=False)) for _ in range(3)]
    few = overlaid_html(drawn_runs, ["a", "b", "c"])
    many = overlaid_html([*drawn_runs, *[Curves()] * 9000], [*"abc", *map(str, range(9000))])
    assert len("".join(many)) == pytest.approx(len("".join(few)), rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 5)), min_size=1, max_size=30))
def test_stretches_of_time_hold_what_lies_in_them(spans: list[tuple[float, float]]) -> None:
    starts, lengths = (np.array(column) for column in zip(*spans, strict=True))
    edges = np.linspace(0, 10, 8)
    inside = [
        sum(max(0.0, min(b, s + d) - max(a, s)) for s, d in spans) for a, b in pairwise(edges)
    ]
    assert _covered(starts, lengths, edges) == pytest.approx(inside, abs=1e-6)


# ── nothing, one, and not a number ───────────────────────────────────────────────────────────────


def test_a_gang_of_which_nothing_is_known() -> None:
    assert "running" not in checked(html(GangState(), Curves(), SpanTracks(), [], "")).text


def test_a_gang_that_failed_before_it_started() -> None:
    head = launched(2)[:2]
    parsed = checked(drawn([*head, ev.GangEnded(0.5, "FAILED", "no room")], report="no room"))
    assert "failed after 0.5 s: no room" in parsed.text
    assert parsed.cells[2:4] == ["■ rank 0", "waiting"]


def test_phases_alone_are_a_timeline() -> None:
    parsed = checked(drawn(ended(launched(2))))
    assert {"starting", "loading", "running"} <= set(parsed.words())
    assert "Curves" not in parsed.text and "Where the time goes" not in parsed.text


def test_the_phases_of_a_cell_of_milliseconds_are_no_timeline() -> None:
    short = [replace(event, at_s=event.at_s / 1000) for event in ended(launched(2))]
    assert checked(drawn(short)).alts() == []
    span = ev.Spans(0.002, 0, ("step",), (1_000_000,), (2_000_000,), (0,))
    assert checked(drawn([*short[:-1], span, short[-1]])).alts() != []


@pytest.mark.parametrize("n_ranks", [4, 17])
def test_the_mean_of_the_ranks_ends_where_most_of_them_are(n_ranks: int) -> None:
    """Rank 0 logged one step more than the others."""
    logged: list[ev.Event] = []
    for rank in range(n_ranks):
        steps = tuple(range(21 if rank == 0 else 20))
        times_s, values = tuple(map(float, steps)), {"loss": (float(rank),) * len(steps)}
        logged.append(ev.Metrics(30.0, rank, steps, times_s, values))
    parsed = checked(drawn(ended([*launched(n_ranks), *logged])))
    mean = (n_ranks - 1) / 2
    assert f"{mean:g}" in parsed.words(), "beside the name"
    [words] = [words for words in parsed.alts() if words.startswith("loss")]
    assert words == f"loss: {mean:g} to {mean:g}, lowest 0, highest {n_ranks - 1}, steps 0 to 19"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((3.25,), "m: 3.25 to 3.25, lowest 3.25"),
        ((0.0, 0.0, 0.0), "m: 0 to 0"),
        ((math.nan, math.nan), "m: no finite value; not finite at step 0 (rank 0)"),
        (
            (1.0, math.inf, 2.0),
            "m: 1 to 2, lowest 1, highest 2, steps 0 to 2; not finite at step 1",
        ),
        ((1e38, -1e38), "m: 1e+38 to -1e+38"),
        ((1e-40, 1e30), "m: "),
        ((5e-324, 1.0), "m: "),
        ((None, 1.0), "m: 1 to 1"),
    ],
)
def test_odd_curves_are_drawn_too(values: tuple[float | None, ...], words: str) -> None:
    steps = tuple(range(len(values)))
    odd = ev.Metrics(2.0, 0, steps, tuple(map(float, steps)), {"m": values})
    parsed = checked(drawn(ended([*launched(1), odd])))
    assert parsed.alts()[1].startswith(words)
    assert not any("nan" in image.lower() or "inf" in image for image in parsed.images()[2:])


def test_a_clock_that_is_wrong_squeezes_nobody() -> None:
    starts, ends = (-9e8, 1.0, 9e8), (1.5, 8e8, 8e8)
    wrong = seconds.spans(2.0, 0, "abc", starts, ends, (0, 0, 200))
    parsed = checked(drawn(ended([*launched(1), wrong])))
    assert "1.5 s" in parsed.words()


# ── harmless ─────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60)
@given(ANYTHING, ANYTHING, ANYTHING)
def test_whatever_ranks_say_is_text(one: str, two: str, three: str) -> None:
    events = [
        ev.GangLaunched(0.0, "3f2a", one, 2, two, three, 1.0, "b:1:1", {}),
        ev.AttemptStarted(0.0, 0),
        ev.RankStarted(0.1, 0, 7, one, two),
        ev.RankStarted(0.1, 1, 7, two, three),
        ev.RankPhase(0.2, 0, "running", three),
        ev.RankPhase(0.2, 1, two),
        ev.Progress(1.0, 0, 1, one, 3, None, two),
        ev.Metrics(1.0, 0, (0, 1), (0.5, 1.0), {one: (1.0, 2.0), two: (math.nan, 2.0)}),
        seconds.spans(
            1.5, 0, (one, two, three), (0.3, 0.4, 0.5), (1.2, 0.5, 0.7), (0, 1, 0), 0, one
        ),
        ev.Notice(1.6, "warning", two),
        ev.RankFailed(1.8, 1, ev.ErrorReport(three, one), "running"),
        ev.RankExited(1.9, 1, None, two),
        ev.GangEnded(2.0, "FAILED", three, 1),
    ]
    streams = (("stdout", one), ("stderr", two), ("note", three))
    lines = [OutputLine(rank, *line) for rank, line in enumerate(streams)]
    fragment = drawn(events, lines, report=f"{two}\n{three}")
    fragment.encode("utf-8")
    assert "\n\n" not in fragment and "\x1b" not in fragment and "\u202e" not in fragment
    checked(fragment)


@given(st.text(st.sampled_from("ab<&\x1b[;:0134578m \u202e\x9b\r\n")))
def test_colours_leave_the_text_as_it_is(line: str) -> None:
    parsed = Parsed(to_html(line))
    assert parsed.open_tags == [] and set(parsed.tags) <= {"span"}
    assert "\x1b" not in parsed.text and "\u202e" not in parsed.text


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[31mred\x1b[0m plain", '<span style="color:#d02030">red</span> plain'),
        (
            "\x1b[1;3;4mx\x1b[22;23;24my",
            '<span style="font-weight:bold;font-style:italic;text-decoration:underline">x</span>y',
        ),
        ("\x1b[48;5;16mx", '<span style="color:#ffffff;background-color:#000000">x</span>'),
        (
            "\x1b[38;2;0;0;0;48;2;255;255;255mx",
            '<span style="color:#000000;background-color:#ffffff">x</span>',
        ),
        ("\x1b[38:2::80:144:255mx\x1b[39my", '<span style="color:#5090ff">x</span>y'),
        ("\x1b[7mx\x1b[27my", '<span style="color:#ffffff;background-color:#707070">x</span>y'),
        ("\x1b[38;5;999mx\x1b[39m\x1b[38mx", '<span style="color:#949494">x</span>x'),
        ("\x1b[99999999999999999999mx", "x"),
    ],
)
def test_colours_become_spans(line: str, shown: str) -> None:
    assert to_html(line) == shown


@given(st.integers(0, 2**24 - 1))
def test_every_colour_of_text_can_be_read_on_white_and_on_black(number: int) -> None:
    shown = colours.readable(f"#{number:06x}")
    assert min(colours.contrast(shown, page) for page in ("#ffffff", "#1e1e1e")) >= 2.9


def test_colours_stand_out_on_every_page_and_are_those_of_the_live_view() -> None:
    pages = ("#ffffff", "#111111", "#1e1e1e")
    assert min(colours.contrast(rank, page) for rank in colours.EITHER for page in pages) >= 3
    assert min(colours.contrast(colours.INK, page) for page in ("#ffffff", "#111111")) >= 4
    theme = (Path(colours.__file__).parents[1] / "widget/front/src/theme.ts").read_text()
    assert _colours_in(theme, "PALETTE") == colours.EITHER
    (dashes,) = re.findall(r"DASHES.* = \[(.*)\];", theme)
    assert tuple(re.findall(r"\[(.*?)\]", dashes.replace(",", ""))) == colours.DASHES
    spans = (Path(colours.__file__).parents[1] / "widget/front/src/timeline/colors.ts").read_text()
    assert _colours_in(spans, "FILLS") == FILLS
    assert re.findall(r"(?<=/)[^/\n]+(?=/i)", spans) == list(KINDS)
    # test/timeline_colors.test.ts of the live view has the same names.
    names = ["load", "augment", "réseau", "load 2", "a", "b", "c"]
    assert [FILLS.index(fill) for fill in fills(names).values()] == [11, 7, 9, 10, 8, 9, 10]


def _colours_in(typescript: str, name: str) -> tuple[str, ...]:
    declared = typescript.partition(f"export const {name}")[2].partition("];")[0]
    return tuple(re.findall("#[0-9a-f]{6}", declared))


def notebook_with(fragment: str) -> nbformat.NotebookNode:
    output = nbformat.v4.new_output("display_data", {"text/html": fragment, "text/plain": "gang"})
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[output])])


def whole(page: str) -> Parsed:
    """Return the picture in a page; its output comes last."""
    start = page.index('<div class="hydrogen-magic')
    return checked(page[start : page.index("</details>") + 10] + "</div>")


@cache
def exporters() -> tuple[HTMLExporter, MarkdownExporter]:
    return HTMLExporter(template_name="basic"), MarkdownExporter()


@pytest.mark.parametrize("hostile", HOSTILE)
def test_text_stays_text_in_what_nbconvert_makes(hostile: str) -> None:
    lines = [OutputLine(0, "stdout", text) for text in ("before", "", hostile, "", hostile)]
    fragment = drawn(ended(trained(2, 20, (f"loss {hostile}",))), lines, report=f"x\n\n{hostile}")
    notebook = notebook_with(fragment)
    for_html, for_markdown = exporters()
    page, _ = for_html.from_notebook_node(notebook)
    assert whole(page).text.split() == checked(fragment).text.split()
    text, _ = for_markdown.from_notebook_node(notebook)
    assert fragment in text
    read = str(mistune.create_markdown(escape=False)(text))
    assert whole(read).text.split() == checked(fragment).text.split()


def test_a_rank_that_prints_without_end_does_not_hide_the_others() -> None:
    lines = [OutputLine(0, "stdout", f"line {n}") for n in range(5)]
    lines += [OutputLine(1, "note", "... not shown here", 100_001)]
    lines += [OutputLine(1, "stdout", f"flood {n} " + "x" * 50) for n in range(20_000)]
    events = ended(trained(2, 20, ()))
    shown = checked(drawn(events, lines)).text
    assert all(f"[0] line {n}" in shown for n in range(5)) and "[1] flood 19999 " in shown
    state = replay(events)
    assert re.search(
        rf"Output: [\d,]+ of 120,006 lines; all of them: %gang logs {state.gang}", shown
    )
    plain = [*StaticView(Curves(), SpanTracks(), lines).plain_lines(state)]
    assert plain[0].endswith(f"of 120,006 lines; all of them: %gang logs {state.gang}")
    many = [OutputLine(rank, "stdout", f"only line of {rank}") for rank in range(600)] + lines
    kept = kept_lines(many, 1000, 10**6, lambda line: line.text)
    assert len({text for text in kept if text.startswith("only line")}) == 498 and len(kept) == 1000
    assert plain[1:6] == [f"[0] line {n}" for n in range(5)] and len(plain) == 1001


# ── size ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_common_run_is_small() -> None:
    events = ended(trained(4, 10_000, ("loss", "accuracy", "lr", "grad_norm")))
    lines = [OutputLine(n % 4, "stdout", f"step {n} loss 0.123") for n in range(500)]
    assert len(drawn(events, lines)) < 150_000


@pytest.mark.parametrize(
    ("np", "steps"),
    [
        (256, 4),
        (8, 500),
        pytest.param(1024, 4, marks=pytest.mark.exhaustive),
        pytest.param(8, 1500, marks=pytest.mark.exhaustive),
    ],
)
def test_no_run_is_big(np: int, steps: int) -> None:
    events = trained(np, steps, [f"metric {n} {'x' * 100}" for n in range(40)])
    rich = [event for event in trained(np, steps, ()) if isinstance(event, ev.Spans)]
    for track in ("collectives", "profiler", "coordinator"):
        events += (replace(spans, track=track) for spans in rich)
    lines = [OutputLine(0, "stdout", "".join(f"\x1b[3{n % 8};1mx&" for n in range(2000)))] * 200
    report = "\n".join(["&" * 5000] * 500)
    assert len(drawn(ended(events), lines, report)) < 400_000


# ── axes ─────────────────────────────────────────────────────────────────────────────────────────


@given(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30), st.integers(2, 8))
def test_ticks_are_few_inside_and_told_apart(one: float, two: float, most: int) -> None:
    scale = value_scale(min(one, two), max(one, two), 100.0, 0.0)
    ticks = scale.ticks(most)
    assert len(ticks) <= most + 1
    assert all(scale.low * (1 - 1e-9) <= v or scale.low <= v for v, _ in ticks)
    assert all(-1e-9 <= float(scale(value)) <= 100 + 1e-9 for value, _ in ticks)  # rounded


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.0, 0.9, ["0.0", "0.2", "0.4", "0.6", "0.8"]),
        (3.25, 3.25, ["3.0", "3.2", "3.4"]),
        (1.00001, 1.00004, ["1.00001", "1.00002", "1.00003", "1.00004"]),
        (1e-6, 1.0, ["1e-06", "0.0001", "0.01", "1"]),
        (-200.0, 900.0, ["-250", "0", "250", "500", "750"]),
    ],
)
def test_ticks_are_round(low: float, high: float, labels: list[str]) -> None:
    assert [text for _, text in value_scale(low, high, 100.0, 0.0).ticks(6)] == labels


@pytest.mark.parametrize(
    ("until_s", "labels"),
    [
        (0.05, ["0 ms", "10 ms", "20 ms", "30 ms", "40 ms", "50 ms"]),
        (1.7, ["0.0 s", "0.5 s", "1.0 s", "1.5 s"]),
        (9.0, ["0 s", "2 s", "4 s", "6 s", "8 s"]),
        (100.0, ["0 s", "20 s", "40 s", "1:00", "1:20", "1:40"]),
        (7200.0, ["0 s", "20:00", "40:00", "1:00:00", "1:20:00", "1:40:00", "2:00:00"]),
    ],
)
def test_times_are_round(until_s: float, labels: list[str]) -> None:
    assert [text for _, text in seconds_ticks(until_s, 8)] == labels


def test_a_scale_maps_its_ends() -> None:
    scale = Scale(1, 1000, 10, 40, is_log=True)
    assert [float(scale(value)) for value in (1, 10, 1000, 9e9)] == [10, 20, 40, 40]
