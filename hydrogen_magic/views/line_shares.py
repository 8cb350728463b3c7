"""Which lines of the ranks' output a saved notebook has, where there are too many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice

from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import OutputLine


def kept_lines(
    lines: Sequence[OutputLine],
    most: int,
    most_characters: int,
    render: Callable[[OutputLine], str],
) -> list[str]:
    """Return the newest lines, rendered, in order, but at least one; the ranks share half of them equally.

    So a rank that prints without end does not hide what others have printed. The limits are those of the
    lines, and of the characters of what ``render`` returns.
    """
    by_rank: dict[int, list[int]] = {}
    for place, line in enumerate(lines):
        by_rank.setdefault(line.rank, []).append(place)
    turns = range(1, max(1, most // (2 * max(1, len(by_rank)))) + 1)
    shares = (own[-turn] for turn in turns for own in by_rank.values() if turn <= len(own))
    wanted = dict.fromkeys(chain(islice(shares, most // 2), reversed(range(len(lines)))))
    kept, left = dict[int, str](), most_characters
    for place in islice(wanted, most):
        text = render(lines[place])
        left -= len(text)
        if left < 0 and kept:
            break
        kept[place] = text
    return [text for _, text in sorted(kept.items())]


def output_summary(n_shown: int, lines: Sequence[OutputLine], state: GangState) -> str:
    """Return ``2 lines``, or how many of more lines are shown, and where the others are."""
    n_lines = len(lines) + sum(max(0, line.n_left_out - 1) for line in lines)
    if n_shown == n_lines:
        return counted(n_lines, "line")
    return f"{n_shown:,} of {counted(n_lines, 'line')}; all of them: %gang logs {state.gang}"
