"""How the live view looks: what matters is in sight, nothing is clipped or over something else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from playwright.sync_api import Browser, Page, expect

from hydrogen_magic.driver.state.gang_state import replay
from hydrogen_magic.views import static_picture
from hydrogen_magic.views.static_svg.colours import of_rank
from hydrogen_magic.views.static_svg.fills import FILLS
from hydrogen_magic.views.widget.page_updates import PageUpdates
from tests.browser.played import PlayedView, messages_of, open_page
from tests.browser.scenes import SCENES, events_of
from tests.gangs import wait_until
from tests.pictures import launched, trained

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]

WIDTHS = (1000, 660, 600, 480)
"""Of a cell; in a window of 600 px it has 480, with a hidden sidebar."""

SECTIONS = {
    "running": {"ranks", "timeline"},
    "crash": {"ranks", "timeline", "output"},
    "flood": {"ranks", "curves", "timeline", "output"},
    "inferring": {"ranks", "timeline"},
}
"""Of the scenes that do not show ranks, curves and timeline."""
SIMILAR = ("training-24",)
"""Scenes for which another one has the same parts: "straggling-64" has more ranks than the table has rows."""

RGB = """(elements) => elements.map((element) =>
  getComputedStyle(element).stroke || getComputedStyle(element).backgroundColor)"""
SWATCHES = ".hm-swatch path"

LANES = """(canvas, colour) => {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  const has = (y) => {
    for (let i = 4 * y * width; i < 4 * (y + 1) * width; i += 4)
      if (colour.every((part, k) => data[i + k] === part)) return true;
    return false;
  };
  return [...Array(height).keys()].filter((y) => has(y) && (y === 0 || !has(y - 1))).length;
}"""
"""Counts the bands of a picture that have a colour."""
N_LANES = 16
"""That are drawn at a time."""

BESIDE = """(notice) => {
  const range = document.createRange();
  range.selectNodeContents(notice.lastChild);
  const [line, next] = range.getClientRects();
  const mark = notice.querySelector("svg").getBoundingClientRect();
  return next !== undefined && mark.top > line.top && mark.bottom < line.bottom;
}"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """A page for all tests: loading takes longer than a test."""
    page = open_page(browser)
    yield page
    page.close()


@pytest.fixture
def view(page: Page) -> Iterator[PlayedView]:
    view = PlayedView(page, WIDTHS[0])
    yield view
    view.close()


def play(view: PlayedView, scene: str) -> None:
    view.say(messages_of(*events_of(scene)))


def _rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(part, 16)) for part in re.findall('[0-9a-f]{2}', colour))})"


def _shows_a_straggler(view: PlayedView) -> None:
    row = view.widget.locator("tr[data-mark='straggler']")
    expect(row).to_contain_text("rank 41")
    expect(row).to_contain_text("straggler: 100 steps, median 200")
    expect(view.widget.locator(".hm-legend")).to_contain_text("4 in the table")
    expect(view.widget.locator(".hm-where-row")).to_have_count(16)


def _draws_each_rank(view: PlayedView) -> None:
    """Of those in sight, with what it did."""
    timeline = view.widget.locator(".hm-timeline")
    expect(timeline).to_contain_text(f"ranks 0–{N_LANES - 1} of")
    forward = [int(part, 16) for part in re.findall("[0-9a-f]{2}", FILLS[1])]
    wait_until(lambda: timeline.locator("canvas").evaluate(LANES, forward) == N_LANES)


def _asks_for_other_ranks(view: PlayedView) -> None:
    view.widget.get_by_role("button", name="ranks after").click()
    expect(view.widget.locator(".hm-timeline")).to_contain_text("ranks 16–31 of 64")
    assert view.orders("tracks")[-1]["ranks"] == list(range(16, 32))


def _has_rows_of_stopped_ranks(view: PlayedView) -> None:
    rows = view.widget.locator("tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.first).to_contain_text("stopped")


def _names_the_rank_with_nan(view: PlayedView) -> None:
    curves = view.widget.locator(".hm-curves")
    expect(curves.locator("figure").last).to_contain_text(
        "NaN or infinite, first at step 200, rank 1"
    )
    expect(curves).not_to_contain_text("the same on all ranks")


def _has_the_mark_of_a_notice_beside_its_first_line(view: PlayedView) -> None:
    notice = view.widget.locator(".hm-notice", has_text="8 rows got no prediction")
    assert notice.evaluate(BESIDE)


def _counts_a_flood_of_output(view: PlayedView) -> None:
    expect(view.widget.locator(".hm-output")).to_contain_text("of 10,002 lines")


def _reports_a_crash_once_and_whole(view: PlayedView) -> None:
    state = view.widget.locator("tr[data-phase='failed'] .hm-marked")
    expect(state).to_have_text("failed: ZeroDivisionError")
    expect(view.widget.locator(".hm-failure-title")).to_contain_text("ZeroDivisionError")
    expect(view.widget.locator(".hm-failure pre")).to_be_hidden()
    expect(view.widget.locator(".hm-track")).to_have_count(0)
    expect(view.widget.locator(".hm-timeline canvas")).to_have_count(0)
    expect(view.widget.locator(".hm-output .hm-note").first).to_have_text("1 line")


def _tells_metrics_apart_finds_and_pins_them(view: PlayedView) -> None:
    titles = view.widget.locator("thead th").all_inner_texts()
    assert len(set(titles)) == len(titles)
    search = view.widget.get_by_role("searchbox", name="Find a metric")
    search.fill("std")
    expect(view.widget.locator("figure")).to_have_count(1)
    search.fill("")
    view.widget.get_by_role("button", name="Pin train/part_3").click()
    expect(view.widget.locator(".hm-group-caption").first).to_have_text("pinned (1)")


def _has_the_same_colours_in_both_themes_and_in_the_saved_picture(view: PlayedView) -> None:
    seen = []
    for is_dark in (False, True):
        view.set_dark(is_dark)
        ranks = view.widget.locator(SWATCHES).evaluate_all(RGB)
        spans = view.widget.locator(".hm-name i").evaluate_all(
            "(all) => all.map((e) => getComputedStyle(e).backgroundColor)"
        )
        seen.append((ranks, spans))
    assert seen[0] == seen[1]
    assert seen[0][0] == [_rgb(of_rank(rank)) for rank in range(2)]
    assert set(seen[0][1]) == {_rgb(FILLS[kind]) for kind in range(3)}
    events, _ = events_of("done")
    picture = static_picture(replay(events), events)
    assert all(of_rank(rank) in picture for rank in range(2))


CHECKS: Mapping[str, Sequence[Callable[[PlayedView], None]]] = {
    "training-24": (_draws_each_rank,),
    "straggling-64": (_shows_a_straggler, _draws_each_rank, _asks_for_other_ranks),
    "stopped-64": (_has_rows_of_stopped_ranks, _draws_each_rank),
    "nan": (_names_the_rank_with_nan,),
    "inferring": (_has_the_mark_of_a_notice_beside_its_first_line,),
    "flood": (_counts_a_flood_of_output,),
    "crash": (_reports_a_crash_once_and_whole,),
    "metrics": (_tells_metrics_apart_finds_and_pins_them,),
    "done": (_has_the_same_colours_in_both_themes_and_in_the_saved_picture,),
}
"""What else a scene shows: to play it takes longer than to look at it."""


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in SIMILAR else [])
        for name in SCENES
    ],
)
def test_everything_is_in_sight_in_both_themes_and_widths(view: PlayedView, scene: str) -> None:
    """And what matters in the scene is shown."""
    play(view, scene)
    for section in SECTIONS.get(scene, {"ranks", "curves", "timeline"}):
        expect(view.widget.locator(f".hm-{section}")).to_be_visible()
    for width in WIDTHS:
        view.set_width(width)
        assert view.problems() == [], width
    view.set_dark(True)  # where there is least room; a theme has colours, and no sizes
    assert view.problems() == []
    view.set_dark(False)
    view.set_width(WIDTHS[0])
    for check in CHECKS.get(scene, ()):
        check(view)


def test_a_profile_is_shown_when_it_has_come(view: PlayedView) -> None:
    events, now_s = events_of("profile")
    n_before = len(trained(2, 200))
    feed = PageUpdates()
    view.say(messages_of(events[:n_before], now_s, feed))
    timeline = view.widget.locator(".hm-timeline")
    expect(timeline.get_by_role("button", name="Profile", exact=True)).to_have_count(0)
    message = feed.update(replay(events), events[n_before:], now_s + 1)
    assert message is not None
    view.say([message])
    expect(timeline).to_contain_text("the profiled steps")
    expect(timeline.get_by_role("button", name="Fit")).to_have_attribute("aria-pressed", "false")
    timeline.get_by_role("button", name="Fit").click()
    expect(timeline).not_to_contain_text("the profiled steps")
    timeline.get_by_role("button", name="Profile", exact=True).click()
    expect(timeline).to_contain_text("the profiled steps")


def test_a_timeline_of_phases_alone_is_folded(view: PlayedView) -> None:
    view.say(messages_of(launched(16), 20.0))
    timeline = view.widget.locator(".hm-timeline")
    expect(timeline.locator("canvas")).to_have_count(0)
    timeline.get_by_role("button", name="Timeline").click()
    expect(timeline.locator("canvas")).to_be_visible()
