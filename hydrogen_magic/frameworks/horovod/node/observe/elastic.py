"""``hvd.elastic`` in a gang: commits survive a failed attempt.

Upstream, the remaining ranks return to the last commit in their memory after a failure and form a smaller
ring, with new places from a driver. Here, the whole gang is restarted (``--retries``) with the same number
of ranks: rank 0 saves every commit on disk beside the checkpoints, and the next attempt continues from the
last one. A cell may call several elastic functions one after the other: each call has its own commits, and
the n-th call of the next attempt continues from those of the n-th. An error of Horovod ends the rank, and
there are no notifications about hosts.

``hvd.elastic.run`` itself is not changed: a function may have been decorated in the notebook, and is sent
in that form. The functions it calls on a rank are replaced: in place of starting notifications,
its state is restored.

A commit is still a copy in memory. On rank 0 of a gang that may be restarted, it also waits until that copy
is on disk.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import sys
from typing import Any

from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.checkpoints import checkpoint
from hydrogen_magic.node.worker.reporting import reporter as _reporter

_NAME = "horovod-elastic-"
"""Name of a call's last commit beside the user's own checkpoint, without the call's number."""
_PLACE = "_hydrogen_magic_commits"
"""Attribute of a state: name of its commits."""
_numbers = itertools.count(1)


def attach() -> None:
    """Replace functions that ``hvd.elastic.run`` and ``State.commit`` call on a rank, after Horovod's
    import.
    """
    from horovod.common.elastic import State
    from horovod.runner.elastic.worker import WorkerNotificationManager

    State.commit = _commit
    WorkerNotificationManager.init = lambda manager, *_: None
    WorkerNotificationManager.register_listener = lambda manager, state: _begin(state)
    WorkerNotificationManager.remove_listener = lambda manager, state: None


def _begin(state: Any) -> None:
    """Restore ``state`` to its last commit, and prevent a second restore after an error of Horovod."""
    from horovod.common.exceptions import HorovodInternalError

    name = f"{_NAME}{next(_numbers)}"
    vars(state)[_PLACE] = name
    _restore(state, name)
    restore = state.restore

    def restore_unless_failed() -> None:
        error = sys.exc_info()[1]
        if isinstance(error, HorovodInternalError):
            raise error  # upstream would form a ring of the remaining ranks
        restore()

    state.restore = restore_unless_failed


def _commit(state: Any) -> None:
    """Implements ``State.commit``: saves the copies of ``save``. There are no host updates to check."""
    state.save()
    name = vars(state).get(_PLACE)
    if name is not None and api.rank() == 0 and _may_be_restarted():
        try:
            checkpoint.keep(_snapshot(state), name)
        except Exception as error:  # a full disk; and pickling runs the classes' own code
            _warn(f"is not kept: {type(error).__name__}: {error}")


def _may_be_restarted() -> bool:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return attempt < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


# ── the saved values of a state ───────────────────────────────────────────────────────────────────


def _snapshot(state: Any) -> dict[str, Any]:
    """Return the copies made by ``state.save()``. Raises pickling errors."""
    if not hasattr(state, "_saved_state"):
        raise TypeError(
            f"{type(state).__name__} is not an ObjectState, and does not list its saved values"
        )
    return {
        # Pickled apart: the next attempt unpickles them after the handlers.
        "values": pickle.dumps(state._saved_state, protocol=5),
        "handled": {
            name: {key: value for key, value in vars(handler).items() if key != "value"}
            for name, handler in getattr(state, "_handlers", {}).items()
        },
    }


def _restore(state: Any, name: str) -> None:
    """Restore ``state`` to the last commit of an earlier attempt's same call, if there is one.

    On every rank: upstream's ``sync`` makes ranks with a new optimizer take a step with it.
    """
    kept = checkpoint.kept(name)
    if kept is None:
        return
    for name, handler in getattr(state, "_handlers", {}).items():
        vars(handler).update(kept["handled"].get(name, {}))
    state._saved_state = {**state._saved_state, **pickle.loads(kept["values"])}
    state.restore()
    if api.rank() == 0:
        _reporter.notice("info", "training continues from the last commit of its elastic state")


@functools.cache
def _warn(text: str) -> None:
    """Report a problem with commits once: the training continues, and only a restart would be affected."""
    _reporter.notice("warning", f"the last commit of its elastic state {text}")
