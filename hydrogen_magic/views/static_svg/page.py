"""The static picture as self-contained HTML: no script, no style sheet, no file.

It must survive sanitizing: GitHub removes every style, JupyterLab untrusted parts. So a table is a
``<table>``, a curve an ``<img>`` with an alternative text, and colour is never the only information. There
are no empty lines, since Markdown would parse the text after one as Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hydrogen_magic.driver.state.culprit import failed_ranks
from hydrogen_magic.driver.state.formatting import number, progress_text
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import OutputLine
from hydrogen_magic.driver.state.span_tracks import SpanTracks
from hydrogen_magic.views.curves import Curves
from hydrogen_magic.views.line_shares import kept_lines, output_summary
from hydrogen_magic.views.static_svg.ansi import name_html, to_html
from hydrogen_magic.views.static_svg.charts import charts_html
from hydrogen_magic.views.static_svg.colours import ERROR
from hydrogen_magic.views.static_svg.ranks import ranks_html
from hydrogen_magic.views.static_svg.swimlanes import timeline_html
from hydrogen_magic.views.static_svg.times import times_of
from hydrogen_magic.views.text_table import MOST_ROWS, headline, slowest, warnings

_MOST_LINES = 1000
_LONGEST_LINE = 400
_LONGEST_REPORT_LINE = 4000
_MOST_OUTPUT_CHARACTERS = 100_000
"""Characters of HTML: a line with a colour per letter takes ten times as much as its text."""
_MOST_REPORT_CHARACTERS = 40_000
_MARKS = {"SUCCEEDED": "✓", "FAILED": "✕", "STOPPED": "■"}


def html(
    state: GangState,
    curves: Curves,
    tracks: SpanTracks,
    lines: Sequence[OutputLine],
    report: str,
    *,
    is_folded: bool = False,
) -> str:
    """Return the gang's current state, with the failure's ``report`` on top (empty: no failure).

    ``is_folded``: only the first line of the report is visible.
    """
    ranks = _listed_ranks(state)
    parts = [
        *_header(state),
        *_failure(report, is_folded),
        *ranks_html(state, ranks),
        *charts_html(curves, state),
        *timeline_html(state, tracks, times_of(tracks), ranks),
        *_output(lines, state),
    ]
    # MathJax would render a rank's text between two dollar signs, including links.
    head = '<div class="hydrogen-magic tex2jax_ignore mathjax_ignore">'
    return "\n".join([head, *(part for part in parts if part), "</div>"])


def _listed_ranks(state: GangState) -> list[int]:
    """Return all ranks if they are few; otherwise the first, the failed and the slowest ones."""
    if len(state.ranks) <= MOST_ROWS:
        return [rank.rank for rank in state.ranks]
    failed = [rank.rank for rank in failed_ranks(state)]
    last = [rank.rank for rank in slowest([r for r in state.ranks if r.rank not in failed])]
    culprit = [rank.rank for rank in state.ranks if rank.rank == state.culprit]
    chosen = [*culprit, 0, *failed[:8], *last]
    return sorted(list(dict.fromkeys(chosen))[:MOST_ROWS])


def _header(state: GangState) -> list[str]:
    mark = _MARKS.get(state.state, "●")
    where = [state.placement, state.rendezvous if state.rows is None else ""]
    rates = [rate for rank in state.ranks if (rate := rank.steps_per_s(state.now_s)) is not None]
    steps = [f"{number(min(rates))} steps/s"] if rates and not state.is_terminal else []
    about = "".join(f" · {name_html(part)}" for part in [*where, *steps] if part)
    title = f"<p><b>{mark} {name_html(headline(state, state.now_s), 400)}</b>{about}</p>"
    says = [] if state.rows is None else [progress_text(state.rows, state.is_terminal)]
    says += [f"! {warned.text}" for warned in warnings(state, state.now_s)]
    says += [
        f"{'' if notice.level == 'info' else '! '}{notice.text}" for notice in state.notices[-5:]
    ]
    return [title, *(f"<p>{name_html(text, 400)}</p>" for text in says)]


def _failure(report: str, is_folded: bool) -> list[str]:
    if not report:
        return []
    lines = [to_html(_short(line, _LONGEST_REPORT_LINE)) for line in report.split("\n")]
    kept = lines[: _n_within(lines, _MOST_REPORT_CHARACTERS)]
    bar = f"border-left:3px solid {ERROR};padding-left:10px"
    if not is_folded:
        return [f'<div style="{bar}">', _preformatted(kept), "</div>"]
    title = f"<summary>{kept[0]}</summary>"
    return [f'<details style="{bar}">', title, _preformatted(kept[1:]), "</details>"]


def _output(lines: Sequence[OutputLine], state: GangState) -> list[str]:
    if not lines:
        return []
    is_prefixed = len(state.ranks) > 1

    def render(line: OutputLine) -> str:
        prefix = f"[{line.rank}] " if is_prefixed else ""
        return to_html(prefix + _short(line.text, _LONGEST_LINE))

    kept = kept_lines(lines, _MOST_LINES, _MOST_OUTPUT_CHARACTERS, render)
    summary = name_html(output_summary(len(kept), lines, state), 100)
    head = f"<summary><b>Output</b>: {summary}</summary>"
    return ["<details>", head, _preformatted(kept), "</details>"]


def _n_within(lines: Sequence[str], most: int) -> int:
    """Return how many of the first lines have at most this many characters, but at least one."""
    sizes = accumulate(map(len, lines))
    return max(1, sum(size <= most for size in sizes))


def _preformatted(lines: Sequence[str]) -> str:
    # A character reference instead of a line end: see above.
    return f"<pre>{'&#10;'.join(lines)}</pre>"


def _short(line: str, most: int) -> str:
    return line if len(line) <= most else f"{line[:most]}…"
