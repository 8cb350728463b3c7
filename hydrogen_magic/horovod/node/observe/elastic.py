"""``hvd.elastic`` in a gang: what was committed outlives the attempt.

Upstream, ranks that are left after a failure go back to the last commit in their memory and form a
smaller ring, for which a driver must tell each of them its new place. Here the gang is started again as
a whole (``--retries``), with as many ranks: rank 0 keeps every commit on disk beside the checkpoints, and
the next attempt goes on from the last one. A cell may call several elastic functions, one after the
other: each call has its own commits, and the next attempt's n-th goes on from the n-th's. An error of
Horovod's ends the rank, and nobody listens for news of hosts.

``hvd.elastic.run`` itself stays what it is: a function may have been decorated in the notebook, and
travels as such. What it calls on a rank is replaced: where it would begin and end to listen, its state is
restored and written to the end.

A commit is a copy in memory as it ever was; a thread writes it to disk. The next one waits for that:
at most one commit can be lost, by a rank 0 that is killed meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import sys
import threading
from typing import Any

from hydrogen_magic.node.worker import api, checkpoint
from hydrogen_magic.node.worker import reporter as _reporter

__all__ = ["attach"]

_NAME = "horovod-elastic-"
"""What a call's last commit is called beside the user's own checkpoint, up to the call's number."""
_PLACE = "_hydrogen_magic_commits"
"""Attribute of a state: name of its commits."""
_numbers = itertools.count(1)


def attach() -> None:
    """Replace what ``hvd.elastic.run`` and ``State.commit`` do on a rank. Horovod has been imported."""
    from horovod.common.elastic import State
    from horovod.runner.elastic.worker import WorkerNotificationManager

    State.commit = _commit
    WorkerNotificationManager.init = lambda manager, *_: None
    WorkerNotificationManager.register_listener = lambda manager, state: _begin(state)
    WorkerNotificationManager.remove_listener = lambda manager, state: _writer.wait()


def _begin(state: Any) -> None:
    """Bring ``state`` to its last commit, and have an error of Horovod's not lead back to it again."""
    from horovod.common.exceptions import HorovodInternalError

    name = f"{_NAME}{next(_numbers)}"
    vars(state)[_PLACE] = name
    _restore(state, name)
    restore = state.restore

    def restore_unless_failed() -> None:
        error = sys.exc_info()[1]
        if isinstance(error, HorovodInternalError):
            raise error  # upstream would make a ring of the ranks that are left
        restore()

    state.restore = restore_unless_failed


def _commit(state: Any) -> None:
    """Be ``State.commit``: keep what ``save`` has copied. There is no news of hosts to look for."""
    state.save()
    name = vars(state).get(_PLACE)
    if name is not None and api.rank() == 0 and _may_be_restarted():
        try:
            snapshot = _snapshot(state)
        except Exception as error:  # pickling runs the classes' own code
            _warn(f"is not kept: {type(error).__name__}: {error}")
        else:
            _writer.write(snapshot, name)


def _may_be_restarted() -> bool:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return attempt < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


# ── what a state has saved ───────────────────────────────────────────────────────────────────────


def _snapshot(state: Any) -> dict[str, Any]:
    """Return what ``state.save()`` has copied. Raises what pickling its values does."""
    if not hasattr(state, "_saved_state"):
        raise TypeError(
            f"{type(state).__name__} is not an ObjectState, and does not list its saved values"
        )
    return {
        # Pickled here and now: these are the user's own objects, not copies of them.
        "values": pickle.dumps(state._saved_state, protocol=5),
        "handled": {
            name: {key: value for key, value in vars(handler).items() if key != "value"}
            for name, handler in getattr(state, "_handlers", {}).items()
        },
    }


def _restore(state: Any, name: str) -> None:
    """Bring ``state`` to what an earlier attempt's same call committed last, if there is such a thing.

    On every rank: upstream's ``sync`` has ranks whose optimizer is new take a step with it.
    """
    kept = checkpoint.kept(name)
    if kept is None:
        return
    for name, handler in getattr(state, "_handlers", {}).items():
        vars(handler).update(kept["handled"].get(name, {}))
    state._saved_state = {**state._saved_state, **pickle.loads(kept["values"])}
    state.restore()
    reporter = _reporter.current()
    if reporter is not None and api.rank() == 0:
        reporter.notice("info", "training continues from the last commit of its elastic state")


@functools.cache
def _warn(text: str) -> None:
    """Say something of commits, once: training goes on, and only a restart would be the worse."""
    reporter = _reporter.current()
    if reporter is not None:
        reporter.notice("warning", f"the last commit of its elastic state {text}")


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


class _Writer:
    """Writes snapshots by a thread, one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def write(self, snapshot: dict[str, Any], name: str) -> None:
        """Begin to write, once the one before is on disk."""
        self.wait()
        self._thread = threading.Thread(
            target=_keep, args=(snapshot, name), name="hydrogen_magic.elastic", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when all is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _keep(snapshot: dict[str, Any], name: str) -> None:
    try:
        checkpoint.keep(snapshot, name)
    except Exception as error:  # a full disk, what cannot be pickled: nobody waits for this thread
        _warn(f"is not kept: {error}")


_writer = _Writer()
