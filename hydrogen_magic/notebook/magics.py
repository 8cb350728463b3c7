"""The magics: they parse the line, capture the cell, and pass both on."""

from __future__ import annotations

import os
import sys
import time
import tokenize
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from io import StringIO
from types import MappingProxyType
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import (
    Magics,
    cell_magic,
    line_cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)
from traitlets import Bool, Enum, Float, Int, Integer, Unicode, Union

from hydrogen_magic import capture, plugins
from hydrogen_magic.capture.imports import IMPORTED_ON_FIRST_USE
from hydrogen_magic.core.argument_types import parse_size_bytes
from hydrogen_magic.core.job import DEFAULT_MAX_CLOSURE_BYTES, JobSpec, Plan
from hydrogen_magic.core.masking import masked_line
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.driver import (
    attending,
    known_gangs,
    launcher,
    result_assignment,
    session,
    sweep,
    sweep_values,
)
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.interrupts import interrupts_held, interrupts_raise
from hydrogen_magic.driver.owner.start import launch_outliving
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.errors import CellSyntaxError, HydrogenError, OptionValueError, ResultError
from hydrogen_magic.notebook import gang_command, ipython_cells, outliving, post_mortem
from hydrogen_magic.notebook.arguments.distributed import Arguments, around_sweeps, parse, usage
from hydrogen_magic.notebook.arguments.gang import GangCommand, parse_gang
from hydrogen_magic.notebook.arguments.infer import InferArguments, infer_usage, parse_infer
from hydrogen_magic.notebook.arguments.parsing import ArgumentsError
from hydrogen_magic.serialization.identity import Originals
from hydrogen_magic.serialization.result_stream import CELL_VALUE
from hydrogen_magic.views import pick_view
from hydrogen_magic.views.tables import inventory_table, plan_table, sweep_table

T = TypeVar("T")
A = TypeVar("A", Arguments, InferArguments)

_PRELOADED = ("torch", *set(IMPORTED_ON_FIRST_USE.values()))
"""By the agent of the first gang."""

_BLANK = {tokenize.COMMENT, tokenize.ENDMARKER, tokenize.NEWLINE, tokenize.NL}
"""Tokens that may come after the last one of the code."""

_NO_VALUES: Mapping[str, Any] = MappingProxyType({})


@magics_class
class Distributed(Magics):
    """``%%distributed`` and ``%gang``; ``%config Distributed.np = 4`` sets its traits."""

    np = Int(JobSpec.np, min=1, help="number of ranks").tag(config=True)
    on = Enum(plugins.PLACEMENTS, JobSpec.placement, help="placement").tag(config=True)
    rendezvous = Enum(plugins.RENDEZVOUS, JobSpec.rendezvous, help="the default of --with").tag(
        config=True
    )
    gpu = Bool(
        None,
        allow_none=True,
        help="True: a GPU for every rank; False: none; None: if there are enough",
    ).tag(config=True)
    pack = Bool(
        None,
        allow_none=True,
        help="True: --pack; False: --spread; None: --pack for ranks with GPUs of their own",
    ).tag(config=True)
    retries = Int(JobSpec.retries, min=0, help="restarts of the gang after a failure").tag(
        config=True
    )
    timeout = Float(None, allow_none=True, help="stop a gang after this many seconds").tag(
        config=True
    )
    start_timeout = Float(
        JobSpec.start_timeout_s,
        min=0.0,
        help="seconds that a rank may take to reach the cell's first line",
    ).tag(config=True)
    grace = Float(JobSpec.grace_s, min=0.0, help="seconds that a stopped rank may clean up").tag(
        config=True
    )
    quiet = Bool(False, help="show only output and result").tag(config=True)
    max_closure = Union(
        [Integer(), Unicode()],
        default_value=DEFAULT_MAX_CLOSURE_BYTES,
        help="size limit of captured data: bytes, or a text like '2GB'",
    ).tag(config=True)

    ports = Unicode(
        "", help="range of ports to listen on for other machines, like '40000-40100'; empty: any"
    ).tag(config=True)
    warm_up = Bool(
        True, help="prepare for gangs in the background once the notebook has imported torch"
    ).tag(config=True)

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.replaced: dict[tuple[str, str], Any] = {}
        """Replaced magics of the same names, by kind and name: restored when the extension is unloaded."""
        self.cell_began = 0.0
        """Unix time at which the last cell was started."""
        self._detached: dict[tuple[str, str | None], str] = {}
        """Line and body of a cell -> the gang that it has launched last with --detach."""

    def note_cell(self, info: object = None) -> None:
        """Note that a cell starts: called by IPython's event."""
        self.cell_began = time.time()

    def get_ready(self, result: object = None) -> None:
        """Start an agent when torch is imported, so that the first gang starts as fast as later ones.

        Called by IPython's event after a cell: importing torch takes a second, and gangs would wait for it
        too.
        """
        if self.warm_up and "torch" in sys.modules and self.shell is not None:
            self.shell.events.unregister("post_run_cell", self.get_ready)
            local_agents.warm_up(_PRELOADED)

    @no_var_expand
    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> Any:
        """Run this cell, or a script, on every rank of a new gang. ``%distributed --help``."""
        return self._distributed(self._expanded(line, cell), cell)

    @no_var_expand
    @line_cell_magic
    def gang(self, line: str, cell: str | None = None) -> Any:
        """List, show and stop gangs: ``%gang --help``. On a cell the same as ``%%distributed``."""
        line = self._expanded(line, cell)
        if cell is not None:
            return self._distributed(line, cell)
        return _checked(lambda: self._manage(parse_gang(line)))

    def _expanded(self, line: str, cell: str | None) -> str:
        """Expand ``{…}`` and ``$…`` as IPython does, except in values of ``--sweep``: these are Python."""
        pieces = [line] if cell is None else around_sweeps(line)
        depth = _frames_to_caller()
        for place in range(0, len(pieces), 2):  # in this frame: a comprehension may have its own
            pieces[place] = self._ip.var_expand(pieces[place], depth)
        return "".join(pieces)

    def _manage(self, command: GangCommand) -> Any:
        found = gang_command.manage(command)
        if command.out:
            print(outliving.assign(found, command.out, self._ip.user_ns))
            return None
        return found

    @cell_magic
    def infer(self, line: str, cell: str) -> Any:
        """Run this cell on every rank, then its ``predict`` over a DataFrame. ``%%infer --help``."""
        arguments = _checked(lambda: parse_infer(line, defaults=self.defaults()))
        if arguments.help:
            print(infer_usage())
            return None
        return self._infer(self._with_name(arguments), cell, masked_line(f"%%infer {line}".strip()))

    @no_var_expand
    @needs_local_scope
    @line_magic
    def debug(self, line: str = "", local_ns: Any = None) -> Any:
        """Debug the rank of a session that failed last; otherwise as IPython's ``%debug``."""
        failed = post_mortem.last_failure()
        if failed is not None and not line.strip():
            post_mortem.debug(failed)
            return None
        theirs = self.replaced["line", "debug"]
        has_scope = getattr(theirs, "needs_local_scope", False)  # not in every version of IPython
        return theirs(line, **({"local_ns": local_ns} if has_scope else {}))

    def defaults(self) -> JobSpec:
        """Return the options set by ``%config``. Raises ArgumentsError for an invalid size or range."""
        max_closure_bytes = _setting("max_closure", parse_size_bytes, str(self.max_closure))
        ports = _setting("ports", PortRange.parse, self.ports) if self.ports else None
        return JobSpec(
            np=self.np,
            placement=self.on,
            rendezvous=self.rendezvous,
            gpu=self.gpu,
            pack=self.pack,
            retries=self.retries,
            timeout_s=self.timeout,
            start_timeout_s=self.start_timeout,
            grace_s=self.grace,
            quiet=self.quiet,
            pdb=bool(self._ip.call_pdb),
            ports=ports,
            max_closure_bytes=max_closure_bytes,
        )

    def _distributed(self, line: str, cell: str | None) -> Any:
        is_cell = cell is not None
        arguments = _checked(lambda: parse(line, defaults=self.defaults(), is_cell=is_cell))
        if arguments.help:
            print(usage(is_cell=is_cell))
            return None
        arguments = self._with_name(arguments, arguments.script)
        title = masked_line(f"{'%%' if is_cell else '%'}distributed {line}".strip())
        value = self._run(arguments, cell, title)
        is_silent = value is not None and cell is not None and _ends_silently(self._ip, cell)
        return None if is_silent else value

    @property
    def _ip(self) -> Any:
        """The shell; large parts of it are untyped."""
        return self.shell

    def _with_name(self, arguments: A, script: str | None = None) -> A:
        """Return ``arguments`` with a name for the run if the line gives none."""
        name = arguments.spec.name or script or ipython_cells.run_name(self._ip)
        return replace(arguments, spec=replace(arguments.spec, name=name))

    def _run(self, arguments: Arguments, cell: str | None, title: str) -> Any:
        arguments = _checked(lambda: _fitted(arguments))
        spec = arguments.spec
        if arguments.sweep and cell is not None:
            return self._run_sweep(arguments, cell, title)
        planned = _checked(lambda: launcher.plan(spec))
        captured = self._captured(arguments, cell, planned)
        if arguments.dry_run:
            _print_dry_run(captured, planned)
            return None
        with interrupts_held() as interrupts:
            if spec.outlive:
                gang = launch_outliving(captured, spec, title=title, planned=planned)
            else:
                gang = launcher.launch_captured(captured, spec, title=title, planned=planned)
            if spec.detach:
                interrupts.take(gang)
                self._follow(gang, spec)
                self._note_detached(gang, title, cell)
                if spec.outlive and spec.timeout_s is None:
                    print(f"gang {gang.id} {outliving.LIMIT}")
                return gang
            originals = captured.originals
            del captured  # with the notebook's arrays, which need not outlive the launch
            self._watch(gang, spec)
        return self._take_results(gang, spec, originals)

    def _note_detached(self, gang: Gang, title: str, cell: str | None) -> None:
        """Name a running gang of the same cell: its view is replaced with the cell's new output."""
        earlier = known_gangs.gangs().get(self._detached.get((title, cell), ""))
        self._detached[title, cell] = gang.id
        if earlier is not None and not earlier.snapshot().is_terminal:
            before = f"gang {earlier.id}, launched before by the same code, still runs"
            print(f"{before}: %gang stop {earlier.id} stops it")

    def _captured(self, arguments: Arguments, cell: str | None, planned: Plan) -> capture.Captured:
        if cell is None:
            return capture.capture_script(
                arguments.script or "",
                arguments.script_args,
                as_module=arguments.as_module,
                seed=arguments.spec.seed,
            )
        captured = self._captured_cell(arguments.spec, cell, planned)
        if arguments.save is not None:
            self._save(arguments.save, cell, arguments.spec)
            _warn_of_settings(arguments.save, captured)
        return captured

    def _save(self, path: str, cell: str, spec: JobSpec) -> None:
        """Write the cell as a script to ``path``."""
        shell = self._ip
        text = ipython_cells.cell_text(shell, cell)
        history = ipython_cells.earlier_sources(shell)
        command = plugins.rendezvous(spec.rendezvous).launcher.replace("{np}", str(spec.np))
        written = capture.write_script(path, text, shell.user_ns, history, launcher=command)
        if not spec.quiet:
            print(f"saved {' and '.join(map(str, written))}")

    def _run_sweep(self, arguments: Arguments, cell: str, title: str) -> sweep.Sweep | None:
        """Run the cell with each combination of values; return the sweep if all runs succeed."""
        spec = arguments.spec
        planned = _checked(lambda: launcher.plan(spec))
        captured = self._captured_with_each(arguments, cell, planned)
        note = sweep_values.note_on(arguments.sweep, [values for values, _ in captured])
        if note is not None and not spec.quiet:
            print(note, file=sys.stderr)
        runs, states = sweep.prepare(captured, spec, title, arguments.sweep_jobs)
        if arguments.dry_run:
            print("\n".join([*sweep_table(states, runs.n_at_once), ""]))
            _print_dry_run(captured[0][1], planned)
            return None
        del captured  # as in _run()
        from hydrogen_magic.views.sweep import pick_sweep_view

        sweep.attend(runs, pick_sweep_view(runs.runs, states, quiet=spec.quiet))
        runs.raise_for_state()
        return runs

    def _captured_with_each(
        self, arguments: Arguments, cell: str, planned: Plan
    ) -> list[tuple[Mapping[str, Any], capture.Captured]]:
        """Return each combination, and the cell captured with it: before any run starts."""
        captured: list[tuple[Mapping[str, Any], capture.Captured]] = []
        names = [name for name, _ in arguments.sweep]
        for values in _checked(
            lambda: sweep_values.combinations(arguments.sweep, self._ip.user_ns)
        ):
            found = self._captured_cell(arguments.spec, cell, planned, values)
            captured.append((values, found))
            _checked(partial(sweep_values.check_used, names, found))
        return captured

    def _captured_cell(
        self, spec: JobSpec, cell: str, planned: Plan, values: Mapping[str, Any] = _NO_VALUES
    ) -> capture.Captured:
        """Return the cell; ``values`` replace those of the notebook."""
        shell = self._ip
        text = ipython_cells.cell_text(shell, cell)
        try:
            with session.explained(spec):
                return capture.capture_cell(
                    text,
                    {**shell.user_ns, **values} if values else shell.user_ns,
                    ipython_cells.earlier_sources(shell),
                    out=spec.out,
                    max_closure_bytes=spec.max_closure_bytes,
                    ranks_have_gpu=planned.uses_gpu,
                    seed=spec.seed,
                    session=session.capture_for(spec),
                )
        except SyntaxError as error:
            raise _syntax_error(error, text.label) from None

    # ── %%infer ──

    def _infer(self, arguments: InferArguments, cell: str, title: str) -> Any:
        from hydrogen_magic.inference import request

        arguments = _checked(lambda: _fitted(arguments))
        spec = arguments.spec
        frame = request.frame(arguments, self._ip.user_ns)
        planned = request.plan(frame, arguments)
        captured = self._captured_cell(spec, cell, planned)
        if arguments.dry_run:
            _print_dry_run(captured, planned)
            return None
        with interrupts_held() as interrupts:
            run = request.start(frame, captured, arguments, title)
            if spec.detach and run.gang is not None:
                interrupts.take(run.gang)
                self._follow(run.gang, spec)
                return run
            if run.gang is not None:
                self._watch(run.gang, spec)
            result = run.result
        if arguments.out is None:
            return result
        self._ip.push({arguments.out: result})
        return None

    # ── display ──

    def _take_results(self, gang: Gang, spec: JobSpec, originals: Originals) -> Any:
        """Assign the variables of ``--out``; return rank 0's value."""
        _raise_if_failed(gang)
        results = gang.received.of(gang.first_rank)
        with interrupts_held():  # all is assigned, and the session knows it, or nothing
            sharing = session.sharing(spec, self._ip.user_ns)
            stale = result_assignment.assign(
                results, spec.out, self._ip.user_ns, originals, interrupts_raise
            )
            brought = [name for name in spec.out if name in results.arrived()]
            session.brought_back(spec, brought, self._ip.user_ns, sharing)
        for text in stale:
            print(f"warning: {text}", file=sys.stderr)
        if results.errors:
            raise ResultError(_lost_results(gang))
        results.release()
        ipython_cells.show_figures(self._ip, [gang.result, *map(self._ip.user_ns.get, spec.out)])
        return gang.result

    def _watch(self, gang: Gang, spec: JobSpec) -> None:
        """Show the gang until it ends."""
        try:
            attending.attend(gang, quiet=spec.quiet)
        finally:
            _write_timeline(gang, spec)

    def _follow(self, gang: Gang, spec: JobSpec) -> None:
        """Update the view of a detached gang while other cells run."""
        view = pick_view(gang, quiet=spec.quiet, detached=True)
        # At its end the notebook may be in another directory.
        file = spec.timeline and os.path.abspath(spec.timeline)
        attending.follow(gang, view, lambda: _write_timeline(gang, replace(spec, timeline=file)))


def _setting(name: str, parse: Callable[[str], T], text: str) -> T:
    """Return the value of a setting. Raises ArgumentsError if ``parse`` rejects it."""
    try:
        return parse(text)
    except ValueError as error:
        raise ArgumentsError(f"Distributed.{name} {error}") from None


def _fitted(arguments: A) -> A:
    """Return ``arguments`` with the options of their session. Raises ArgumentsError."""
    if arguments.spec.session is None:
        return arguments
    try:
        return replace(arguments, spec=session.fitted(arguments.spec, arguments.given))
    except OptionValueError as error:
        raise ArgumentsError(str(error)) from None


def _checked(parsed: Callable[[], T]) -> T:
    """Convert an error of the line into UsageError, whose traceback IPython hides."""
    try:
        return parsed()
    except (ArgumentsError, OptionValueError) as error:
        raise UsageError(str(error)) from None


def _raise_if_failed(gang: Gang) -> None:
    """Raise the gang's error; for an inline rank its own exception, starting at its cell.

    ``%debug`` then stops in the user's code.
    """
    try:
        gang.raise_for_state()
    except HydrogenError:
        raise
    except Exception as error:
        cells = gang.snapshot().cells
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename not in cells:
            own = own.tb_next
        raise error.with_traceback(own or error.__traceback__)  # noqa: B904  it is the same one


def _lost_results(gang: Gang) -> str:
    """Return why results are missing, and where the other ones are."""
    results = gang.received.of(gang.first_rank)
    assigned = [f"`{name}`" for name in results.arrived()]
    lines = [*results.errors.values(), gang.received.save(has_succeeded=True)]
    if not results.errors.get(CELL_VALUE) and results.value() is not None:
        load = f"{gang.received.load_call}[{results.key_of_value!r}]"
        lines.append(f"the value arrived: {load}")
    if assigned:
        verb = "is" if len(assigned) == 1 else "are"
        lines.append(f"{', '.join(assigned)} arrived and {verb} assigned")
    return "\n".join(filter(None, lines))


def _syntax_error(error: SyntaxError, label: str) -> CellSyntaxError:
    """Return a syntax error that is shown in IPython's format, under the cell's own name."""
    lines = traceback.format_exception_only(error)
    report = "".join([f"  {label}, line {error.lineno}\n", *lines[1:]]).rstrip()
    return CellSyntaxError(f"{error.msg} ({label}, line {error.lineno})", report=report)


def _frames_to_caller() -> int:
    """Return how many frames are between the function that calls this one and the user's code."""
    depth, frame = 0, sys._getframe(1)
    while frame.f_back and frame.f_code.co_name not in ("run_cell_magic", "run_line_magic"):
        depth, frame = depth + 1, frame.f_back
    return depth + 1


def _ends_silently(shell: Any, cell: str) -> bool:
    """Return whether the cell ends in ``;``, which IPython uses to suppress output.

    IPython's own check uses the text as typed, where a ``!`` line may not be Python.
    """
    if ";" not in cell:
        return False
    try:
        code = StringIO(shell.transform_cell(cell))
        tokens = [t.string for t in tokenize.generate_tokens(code.readline) if t.type not in _BLANK]
    except (SyntaxError, tokenize.TokenError):
        return False
    return tokens[-1:] == [";"]


def _write_timeline(gang: Gang, spec: JobSpec) -> None:
    """Write the trace for ``--timeline FILE``, also for a gang that failed."""
    if not spec.timeline or spec.outlive:  # the owner of an outliving gang writes it
        return
    try:
        gang.timeline(spec.timeline)
    except OSError as error:  # must not replace the gang's error
        print(f"the timeline could not be written: {error}", file=sys.stderr)


def _warn_of_settings(path: str, captured: capture.Captured) -> None:
    """Warn if the script at ``path`` lacks settings that the ranks have."""
    settings = [item.name for item in captured.inventory if item.kind == "setting"]
    if settings:
        print(
            f"warning: {path} leaves out settings of the notebook, which the ranks have: "
            f"{', '.join(settings)}",
            file=sys.stderr,
        )


def _print_dry_run(captured: capture.Captured, planned: Plan) -> None:
    lines = inventory_table(captured.inventory, captured.payload.nbytes)
    notes = [f"warning: {text}" for text in (*captured.warnings, *captured.hints)]
    print("\n".join([*lines, *notes, "", *plan_table(planned)]))
