"""A gang's record: its events on disk during the run, one JSON list per line.

``%gang show`` replays it after a kernel restart, and a new kernel finds gangs in it whose kernel
died. There is one directory per gang, readable only by its owner::

    $HYDROGEN_MAGIC_HOME/runs/<gang>/events.jsonl     written here, by the kernel
                                     rank-<r>.log     written by the agent
                                     <library>-timeline-<n>.json   written by the library
                                     kept/           finished rows of %%infer, or a link to them
                                     owner.sock      where the owner of an outliving gang listens
                                     results-<r>     results of a rank that no kernel has got

A record is optional: failure to write it never disturbs the run.
"""

from hydrogen_magic.core.run_log.abandoned import (
    end_abandoned,
    going_on,
    is_elsewhere,
    is_over,
    is_owner_gone,
    unfinished,
    why_over,
)
from hydrogen_magic.core.run_log.ending import complete, write_end
from hydrogen_magic.core.run_log.folders import (
    ARRIVING,
    CHECKPOINTS,
    OWNER_SOCKET,
    RESULTS,
    UNSEEN,
    delete,
    delete_kept,
    drop_incomplete,
    is_unseen,
    kept_dir,
    mark_seen,
    mark_unseen,
    recent_ids,
    run_dir,
    runs_dir,
    state_dir,
    why_inaccessible,
    written_at,
)
from hydrogen_magic.core.run_log.lines import is_recorded
from hydrogen_magic.core.run_log.owners import (
    is_alive,
    is_stopped,
    owner_of_this_process,
    pid_of,
)
from hydrogen_magic.core.run_log.pruning import is_certainly_over, prune
from hydrogen_magic.core.run_log.reading import (
    Summary,
    read,
    read_on,
    recent,
    summary,
    unreadable,
    why_unreadable,
)
from hydrogen_magic.core.run_log.record import Record, write_through

__all__ = [
    "ARRIVING",
    "CHECKPOINTS",
    "OWNER_SOCKET",
    "RESULTS",
    "UNSEEN",
    "Record",
    "Summary",
    "complete",
    "delete",
    "delete_kept",
    "drop_incomplete",
    "end_abandoned",
    "going_on",
    "is_alive",
    "is_certainly_over",
    "is_elsewhere",
    "is_over",
    "is_owner_gone",
    "is_recorded",
    "is_stopped",
    "is_unseen",
    "kept_dir",
    "mark_seen",
    "mark_unseen",
    "owner_of_this_process",
    "pid_of",
    "prune",
    "read",
    "read_on",
    "recent",
    "recent_ids",
    "run_dir",
    "runs_dir",
    "state_dir",
    "summary",
    "unfinished",
    "unreadable",
    "why_inaccessible",
    "why_over",
    "why_unreadable",
    "write_end",
    "write_through",
    "written_at",
]
