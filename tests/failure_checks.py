"""Checks of failures that hold on every placement."""

from __future__ import annotations

from typing import Any

import hydrogen_magic as hm
from tests import ranks
from tests.gangs import failure_of


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
