"""``%debug`` after a failed gang: the debugger on the rank that failed."""

from __future__ import annotations

import sys

from IPython.core.error import UsageError

from hydrogen_magic.driver import calls, session
from hydrogen_magic.errors import RankFailedError
from hydrogen_magic.node.worker.interactive import post_mortem


def last_failure() -> RankFailedError | None:
    """Return the notebook's last error if a rank failed by it, or if that is why ``%debug`` refused."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, UsageError):
        error = error.__cause__
    return error if isinstance(error, RankFailedError) else None


def debug(failed: RankFailedError) -> None:
    """Open the debugger where the culprit raised. Raises UsageError if its process has ended."""
    if session.live(failed.session) is None:
        whose = f"gang {failed.gang}" if failed.session is None else f"session {failed.session!r}"
        raise UsageError(
            f"%debug cannot look at rank {failed.rank}: the ranks of {whose} have ended. Run the cell "
            "again with --pdb, which opens the debugger at the exception, or with --session, whose ranks "
            "stay for %debug"
        ) from failed
    calls.run(post_mortem.debug, session=failed.session, ranks=[failed.rank], run_name="%debug")
