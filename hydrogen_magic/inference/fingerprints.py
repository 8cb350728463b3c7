"""Decides whether a run of ``%%infer`` may continue an earlier one, by what their predictions depend on.

The frame's values are compared later, when its rows are read (:mod:`~hydrogen_magic.inference.kept_parts`).
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from hydrogen_magic.core import run_log, syntax
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.agent.file_versions import modified_ns
from hydrogen_magic.serialization.closure import unbundle

if TYPE_CHECKING:
    from hydrogen_magic.capture import Captured
    from hydrogen_magic.node.prediction.options import InferOptions

T = TypeVar("T")


NOTHING_KEPT = (
    "--resume: no finished rows of this cell and frame are kept, starting with the first row"
)
JOURNAL = "journal"
"""File whose first line has the fingerprint."""
FILES = "files"
"""The only key of a later line that lists the files read by ranks, with their modification times in ns."""
WRITTEN = -1
"""Stands for that time if the run itself writes the file."""
SETTABLE = {"--on-error": ("fail", "null"), "--schema": ("None",)}
"""Options that a continued run may set if the earlier one had one of these values: the failures of finished
rows are kept with their reasons, and their types can be converted."""
_MAX_SHOWN = 6
_CELL = "the cell"
_COLUMNS = "the frame's columns"
_N_ROWS = "the frame's number of rows"
_ATTRS = "the frame's attrs"
_MODULE = "module "


def of_cell(captured: Captured) -> dict[str, str]:
    """Return digests of the cell and what it uses, by their names for the user."""
    header, _ = unbundle(captured.payload)
    imports = sorted(line.text for line in header.imports if line.required)
    return {
        _CELL: _digest(_without_layout(header.code)),
        **{f"{_MODULE}{name}": _digest(module.source) for name, module in header.modules.items()},
        **{f"`{name}`" if name else "the call": text for name, text in captured.digests().items()},
        "an import": _digest((imports, header.futures)),
    }


def _without_layout(code: str) -> str:
    """Return what Python reads in a cell: without comments, blank lines and spaces."""
    return ast.dump(syntax.parse(code, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))


def of_ranks(captured: Captured, cell: Mapping[str, str]) -> str:
    """Return a digest of what ranks that have run the cell depend on; ``cell`` is that of :func:`of_cell`.

    A cell that is run again has another number, so that its closure has other bytes.
    """
    header, _ = unbundle(captured.payload)
    shown = sorted(header.sources.values()), header.line_offset
    objects = sorted(captured.setting_digests().items())
    return _digest((sorted(cell.items()), header.settings, objects, header.seed, shown))


def of_options(options: InferOptions, env: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return digests of options, by their names for the user."""
    return {
        "--batch-size": str(options.batch_size),
        "--schema": str(options.schema),
        "--on-error": options.on_error,
        "--env": _digest(sorted(env)),
        # A kept answer has a changed column of the frame only with --replace.
        **({"--replace": ",".join(options.replace)} if options.replace else {}),
    }


def of_columns(columns: Sequence[tuple[str, str]], n_rows: int | None = None) -> dict[str, str]:
    """Return a digest of the names and types of a frame's columns, and its number of rows if known."""
    return {_COLUMNS: _digest(columns), _N_ROWS: str(n_rows)}


def of_attrs(attrs: Any, captured: Captured) -> dict[str, str]:
    """Return a digest of a frame's ``attrs``, if it has some."""
    return {_ATTRS: captured.digest_of(attrs)} if attrs else {}


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def earlier(
    wanted: Mapping[str, str],
    is_of_frame: Callable[[str], bool] = lambda gang: True,
    settable: Mapping[str, Sequence[str]] = {},
) -> str | None:
    """Return the gang whose run can be resumed, among those with kept answers: see :func:`matching`."""
    runs = ((gang, gang, known) for gang, known in kept_runs())
    return matching(wanted, runs, is_of_frame, settable)


def matching(
    wanted: Mapping[str, str],
    runs: Iterable[tuple[str, T, Mapping[str, str]]],
    is_of_frame: Callable[[T], bool] = lambda run: True,
    settable: Mapping[str, Sequence[str]] = {},
) -> T | None:
    """Return the first of ``runs`` with this fingerprint, None if there is none of this cell or frame.

    ``runs``: the gang of each run, the run itself, and its fingerprint. ``is_of_frame``: whether a run with
    this fingerprint is one over this frame, not over another of the same columns and length. ``settable``:
    entries that do not count in a run that has one of these values. Raises InferError with the changes if
    only runs with another fingerprint exist.
    """
    differing: list[tuple[str, list[str]]] = []
    for gang, run, found in runs:
        free = [name for name, texts in settable.items() if found.get(name) in texts]
        known = {**found, **{name: wanted[name] for name in free}}
        changes = [name for name in {**known, **wanted} if _differs(name, known, wanted)]
        if not changes and is_of_frame(run):
            return run
        if changes and (_CELL not in changes or not {_COLUMNS, _N_ROWS}.intersection(changes)):
            differing.append((gang, changes))
    if differing:
        raise _changed(*min(differing, key=lambda each: len(each[1])))
    return None


def _differs(name: str, known: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether an entry changed; a local module changes if both kernels had it loaded.

    Every loaded local module is sent, also those that the cell does not use: a cell that needs one more is
    itself another cell.
    """
    if name.startswith(_MODULE) and not (name in known and name in wanted):
        return False
    return known.get(name) != wanted.get(name)


def _changed(gang: str, changes: Sequence[str]) -> InferError:
    shown = [*changes[:_MAX_SHOWN]]
    if len(changes) > len(shown):
        shown.append(f"{len(changes) - len(shown)} more")
    return InferError(
        f"--resume: run {gang} has finished rows, but {', '.join(shown)} changed since: undo that to continue"
        " it, or run the cell without --resume to start over"
    )


def has_answers(gang: str) -> bool:
    """Return whether finished rows of a run are kept: in the journal, or written by tasks of Spark."""
    folder = run_log.kept_dir(gang)
    with suppress(OSError):
        is_described = (folder / JOURNAL).read_bytes().count(b"\n") > 1
        return is_described or any(folder.rglob("*.part"))
    return False


def kept_runs() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the gangs that have ended and have kept answers, newest first, with their fingerprints.

    A file that their ranks have read, and that has changed since, is an entry, too.
    """
    for summary in run_log.recent(with_kept=True):
        path = run_log.kept_dir(summary.gang) / JOURNAL
        if run_log.is_certainly_over(summary):
            with suppress(OSError, ValueError, KeyError), path.open("rb") as journal:
                known = json.loads(journal.readline())["fingerprint"]
                yield summary.gang, {**known, **_changed_files(journal)}


def _changed_files(journal: Iterable[bytes]) -> dict[str, str]:
    times_ns: dict[str, int] = {}
    for line in journal:
        if line.startswith(f'{{"{FILES}"'.encode()) and line.endswith(b"\n"):
            for file, time_ns in json.loads(line)[FILES].items():
                times_ns[file] = time_ns if time_ns == WRITTEN else times_ns.get(file, time_ns)
    compared = ((file, time_ns) for file, time_ns in times_ns.items() if time_ns != WRITTEN)
    return {f"file {file}": "changed" for file, time_ns in compared if modified_ns(file) != time_ns}
