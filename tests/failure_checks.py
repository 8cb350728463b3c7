"""Checks of failures that hold on every placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from tests import ranks
from tests.gangs import failure_of

REPORTED_WITHIN_S = 5.0
"""An exception whose message never comes is reported within this time, and a second for a busy machine."""


def check_ranks_that_fail_together(**options: Any) -> None:
    """Rank 0 is interrupted while it waits for a message that never comes; rank 1 has a huge one."""
    gang = hm.launch(ranks.fail_together, "the end", np=2, **options)
    error = failure_of(gang)
    assert error.rank == 1
    assert "ValueError: bad batch xxx" in error.report and "xxx the end" in error.report
    assert len(error.report) < 20_000
    assert list(gang.logs.values()) == ["", ""]
    late = gang.ranks[0].failure
    assert late is not None and late.error.frames[-1].text == "raise NeverSaysError"
    assert "NeverSaysError.__str__ did not return in time" in late.error.message


def check_a_message_that_never_comes(**options: Any) -> None:
    """The only rank fails: nothing else ends the gang meanwhile."""
    gang = hm.launch(ranks.fail_without_message, np=1, **options)
    error = failure_of(gang)
    (failed,) = [e for e in gang.events() if isinstance(e, ev.RankFailed) and not e.in_flight]
    assert failed.error.type == "tests.ranks.NeverSaysError"
    assert "NeverSaysError.__str__ did not return in time" in failed.error.message
    frame = failed.error.frames[-1]
    assert Path(frame.file).samefile(ranks.__file__) and frame.text == "raise NeverSaysError"
    lines = Path(ranks.__file__).read_text().splitlines()
    assert lines[frame.line - 2 : frame.line] == [
        '    print("about to fail", flush=True)',
        "    raise NeverSaysError",
    ]
    assert error.rank == 0 and "tests.ranks.NeverSaysError" in str(error)
    assert f"  File {frame.file}, line {frame.line}, in fail_without_message\n" in error.report
    printed_s = next(e.at_s for e in gang.events() if isinstance(e, ev.Output))
    ended_s = next(e.at_s for e in gang.events() if isinstance(e, ev.RankExited))
    assert failed.at_s - printed_s < REPORTED_WITHIN_S + 1
    assert ended_s - printed_s < REPORTED_WITHIN_S + 1, "nor does the message keep it from exiting"
