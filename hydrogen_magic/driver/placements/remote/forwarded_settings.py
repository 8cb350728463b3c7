"""The notebook's settings of libraries, for ranks on other machines, and a library's timeline back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from hydrogen_magic import plugins
from hydrogen_magic.core.timeline_files import given_path, path_of_given
from hydrogen_magic.driver.placements import Attempt, Job
from hydrogen_magic.node.worker import sparkdl

_PREFIXES = ("KERAS_BACKEND", "OMP_", "TZ", sparkdl.VARIABLE)
"""Beside those of each rendezvous."""
_TERRAFORM = ("TF_CLI_", "TF_TOKEN_", "TF_VAR_")
"""No settings of TensorFlow, and some of them are credentials."""


def forwarded(environ: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """Return the variables of the notebook that ranks on other machines get too."""
    prefixes, owned = (*_PREFIXES, *plugins.forwarded()), plugins.owned_variables()
    names = {name for name in environ if name.startswith(prefixes)} - owned
    return tuple((n, environ[n]) for n in sorted(names) if not n.startswith(_TERRAFORM))


def environment(job: Job) -> dict[str, str]:
    """Return the variables for a job's ranks: of the notebook, and of ``--env``, which takes precedence."""
    return {**dict(job.plan.forwarded), **dict(job.spec.env)}


def leave_timeline(attempt: Attempt) -> str:
    """Copy an attempt's timeline to the path that the user has named, relative to the notebook.

    It was written on rank 0's host and is in the gang's record. Returns an error message, or an empty text.
    """
    timeline = attempt.job.rendezvous.timeline
    path = given_path(timeline, environment(attempt.job)) if timeline is not None else ""
    if timeline is None or not path:
        return ""
    written = path_of_given(timeline, str(attempt.job.record_dir), attempt.number)
    if not os.path.exists(written):
        return ""
    try:
        shutil.copyfile(written, os.path.join(attempt.job.surroundings.directory, path))
    except OSError as error:
        what = f"the timeline of {timeline.name}"
        return f"{what} cannot be copied to its path: {error}; it is in {written}"
    return ""
