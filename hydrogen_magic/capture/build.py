"""Builds a closure: pickles of the needed values, and their local modules."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydrogen_magic.capture import params
from hydrogen_magic.capture.callers import Code
from hydrogen_magic.capture.fingerprint import digest_of
from hydrogen_magic.capture.imports import Statement, slow_on_first_use, sources_of, used_submodules
from hydrogen_magic.capture.module_objects import ModuleObject, module_objects
from hydrogen_magic.capture.modules import ModuleFile, importable_parts, is_installed
from hydrogen_magic.capture.notes import (
    definition_note,
    graph_note,
    jax_note,
    outdated_note,
    process_note,
    seed_note,
)
from hydrogen_magic.capture.ownership import Action
from hydrogen_magic.capture.reachable import objects_in
from hydrogen_magic.capture.required_names import MAX_POSSIBLE_BYTES, RequiredNames
from hydrogen_magic.capture.scopes import ScopeAnalysis
from hydrogen_magic.capture.session_cell import SessionCapture
from hydrogen_magic.capture.settings import (
    ModuleChanges,
    SortedSettings,
    sort,
)
from hydrogen_magic.capture.stream import NamedPickles
from hydrogen_magic.capture.values import Captured, CapturedItem
from hydrogen_magic.core.lazy_annotations import signature_of
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.node.worker import settings
from hydrogen_magic.serialization.closure import ClosureManifest, ImportLine, SessionSends, bundle
from hydrogen_magic.serialization.memory_layout import MemoryLayout
from hydrogen_magic.serialization.object_paths import describe

_NO_LIMIT = 1 << 62
"""A value that is too large, and that the cell may need, is an error with the remedy."""


@dataclasses.dataclass(frozen=True)
class _UsedModules:
    """The modules that a closure uses."""

    lines: tuple[ImportLine, ...]
    submodules: tuple[str, ...]
    """Those that are attributes of imported ones."""
    required: set[str]
    """Without these the ranks cannot run the closure."""
    imported: set[str]
    """These, and those that are imported for their effects."""
    on_access: set[str]
    """Modules that are imported on first use."""


class Builder:
    """Pickles the needed values and finds their local modules."""

    def __init__(
        self,
        needs: RequiredNames,
        max_bytes: int,
        ranks_have_gpu: bool,
        scope: ScopeAnalysis | None = None,
        out: Sequence[str] = (),
        session: SessionCapture | None = None,
        callers: Sequence[Code] = (),
    ) -> None:
        """``session``: the session whose ranks run the cell. ``callers``: code that may change modules."""
        self.needs = needs
        self.cell_modules = scope.modules if scope else ()
        self.cell_attributes = scope.attributes if scope else frozenset[str]()
        self.local = needs.local
        self.use = session.choose(needs, out) if session else None
        code, find = frozenset[str](), None
        if session and self.use:
            code = session.code_on_ranks(self.use, needs.namespace)
            find = session.values_on_ranks(self.use, needs)
        self._new_stream = functools.partial(
            NamedPickles,
            ranks_have_gpu=ranks_have_gpu,
            originals=session.originals if session else None,
            code_on_ranks=code,
            value_on_ranks=find,
        )
        self.stream = self._new_stream(needs, max_bytes=max_bytes, out=out)
        self._max_bytes = max_bytes
        self._out = out
        self._settings = SortedSettings()
        self._changes = ModuleChanges(needs.namespace, needs.imports, callers)
        needs.replaced = functools.cache(self._changes.assigned)
        self._before = needs.copy()
        self._objects: list[ModuleObject] = []
        """Objects of local modules that the values refer to."""
        self.names: list[str] = []
        self._perhaps: set[str] = set()
        """Of them, those that the code may not need."""
        self._unsent: dict[str, str] = {}
        """Names that the code may not need, and whose values cannot be sent or are large -> their types."""
        self.call: dict[str, Any] = {}
        """The call under an empty name, if it is one."""

    def add_names(self) -> None:
        """Pickle the values of the names found so far."""
        self._drop_unsure()
        self.names = self.needs.ordered_values(self._out)
        modules = {statement.module for statement, _ in self.needs.statements.values()}
        self.local.add(sorted(modules.union(self.cell_modules)))
        self.local.add(self._edited)
        self._objects = self._objects or self._shared_objects(self._near_objects)
        self.stream.refer_to([each for each in self._objects if not each.is_new])
        self.stream.add((name, self.needs.namespace[name]) for name in self.names)
        self.needs.check()

    @functools.cached_property
    def _edited(self) -> Mapping[str, ModuleFile]:
        """Local modules that the ranks of the session have, and that were edited since.

        The cell may use them through objects of the ranks.
        """
        return self.use.names.modules.edited(self.local.sources) if self.use else {}

    def _shared_objects(self, parts: Callable[[], Iterable[Any]]) -> list[ModuleObject]:
        """Return the objects of the local modules that are sent which are among ``parts()``."""
        return module_objects(self.local.sources, self.needs.replaced, parts)

    def _near_objects(self) -> Iterator[Any]:
        """Yield objects in the values: a second pass over them finds the others."""
        return objects_in((self.needs.namespace[name] for name in self.names), self.needs.namespace)

    def _drop_unsure(self) -> None:
        """Leave out values that cannot be pickled: the cell probably replaces them before it reads them."""
        needs = self.needs
        for name in needs.unsure.intersection(needs.values):
            if self._is_picklable(needs.namespace[name], _NO_LIMIT):
                self._perhaps.add(name)
            else:
                del needs.values[name]
                self._unsent[name] = describe(needs.namespace[name])

    def add_call(self, call: Any) -> None:
        """Pickle the call, after the names that it uses."""
        self.names.append("")
        self.call = {"": call}
        self.stream.add(self.call.items())
        self.needs.check()

    def _share(self) -> None:
        """Pickle everything again if the notebook shares more than the stream does.

        That is memory of arrays and tensors, and objects with the local modules that are sent.
        """
        earlier, layout = self.stream, self.stream.pickler.layout
        objects = self._shared_objects(earlier.pickler.written)
        known = {id(each.value) for each in self._objects}
        if not layout.has_conflicts and known.issuperset(id(each.value) for each in objects):
            return
        self._objects = objects
        vars(self.needs).update(vars(self._before.copy()))
        self.stream = self._new_stream(
            self.needs,
            max_bytes=self._max_bytes,
            out=self._out,
            layout=MemoryLayout(layout) if layout.has_conflicts else None,
        )
        earlier.release()
        self.add_names()
        if self.call:
            self.add_call(self.call[""])
        self._add_possible()
        self._find_settings()
        self._add_settings()

    def _add_possible(self) -> None:
        """Pickle the values that the cell may not need, where that is possible."""
        needs = self.needs
        while needs.possible:
            name = next(iter(needs.possible))
            why, value = needs.possible.pop(name), needs.namespace[name]
            most = MAX_POSSIBLE_BYTES if name in needs.assigned else _NO_LIMIT
            limit = min(most, self._max_bytes)
            if name in needs.values:
                continue
            if not self._is_picklable(value, limit):
                self._unsent[name] = describe(value)
                continue
            needs.values[name] = why
            self.names.append(name)
            self._perhaps.add(name)
            self.stream.add([(name, value)])

    def _is_picklable(self, value: Any, limit: int) -> bool:
        trial = self._new_stream(self.needs.copy(), max_bytes=limit)
        try:
            trial.add([("", value)])
            return trial.nbytes <= limit
        except CaptureError:
            return False
        finally:
            trial.release()

    def _find_settings(self) -> None:
        """Find the notebook's settings, including changes in the modules that are used so far."""
        needs = self.needs
        effects = needs.imports.for_side_effects(needs.read, self.cell_modules)
        statements = [statement for statement, _ in needs.statements.values()]
        used = {*(s.module for s in (*statements, *effects)), *self.cell_modules, *self._edited}
        used |= self.stream.pickler.modules
        self.local.add(sorted(used))
        roots = {name.partition(".")[0] for name in used}
        contents = [setting for each in self._objects for setting in each.contents()]
        changed = self._changes.find(self.local.sources, roots.__contains__, contents)
        found = [*settings.read(), *changed]
        late = {(one.module, one.key) for one in contents}
        self._settings = sort(found, lambda s: self._is_picklable(s.value, self._max_bytes), late)

    def _add_settings(self) -> None:
        """Pickle the settings that are objects, and the values that their functions may need."""
        self.names += (setting.label for setting in self._settings.pickled)
        self.stream.add((setting.label, setting) for setting in self._settings.pickled)
        self._add_possible()

    def _warnings(self) -> tuple[str, ...]:
        unchanged = definition_note(self.needs.namespace, set(self._out) - self.needs.assigned)
        noted = self.stream.check_size(), unchanged, process_note(self.stream.with_process_state)
        return (*filter(None, noted), *self.local.warnings)

    def _hints(self, seed: int | None) -> tuple[str, ...]:
        needs = self.needs
        pickler = self.stream.pickler
        names = needs.read.union(self.cell_attributes, pickler.attributes)
        sources = sources_of(needs.namespace, needs.imports)
        seeds = seed_note(sources, names) if seed is None else ""
        certain = {
            name: needs.namespace[name] for name in needs.values if name not in self._perhaps
        }
        notes = (
            seeds,
            graph_note(certain, names),
            jax_note(pickler.n_jax_arrays, names),
            self._settings.note,
            outdated_note(needs.outdated),
        )
        return tuple(filter(None, notes))

    def finish(self, header: ClosureManifest, cells: Mapping[str, str]) -> Captured:
        """Return the closure."""
        self._add_possible()
        self._find_settings()
        self._add_settings()
        self._share()
        if self.use is not None:  # values that cannot be sent, of names that are perhaps read
            unsent = {*self.use.of(Action.SEND, Action.FILL)} - {*self.names}
            self.use = self.use.without(unsent)
        used = self._used_modules()
        self.local.add(sorted(used.imported))
        manifest = self._manifest(header, cells, used)
        warnings = self._warnings()
        pickler = self.stream.pickler
        return Captured(
            payload=bundle(manifest, self.stream.finish()),
            inventory=(*self._inventory(), *self._settings.inventory(self.stream.sizes)),
            preload=self._preload(self.local.reached(used.imported | used.on_access)),
            cells=manifest.labels,
            warnings=warnings,
            hints=self._hints(header.seed),
            required_modules=self._preload(used.required),
            originals=self.stream.originals,
            params=self._params(),
            digests=self._digests,
            digest_of=lambda value: digest_of(value, self.needs),
            setting_digests=lambda: self._digests_of(self._settings.of_objects()),
            datasets=dict(pickler.datasets),
            data_places=tuple(sorted(pickler.data_places)),
            session=self.use and dataclasses.replace(self.use, files=self.local.files),
        )

    def _used_modules(self) -> _UsedModules:
        pickler = self.stream.pickler
        attributes = pickler.attributes.union(self.cell_attributes)
        used = [statement for statement, _ in self.needs.statements.values()]
        effects = self.needs.imports.for_side_effects(self.needs.read, self.cell_modules)
        submodules = used_submodules([_bound_module(s) for s in used], attributes)
        names = [s.module for s in used] + [f"{s.module}.{s.attribute}" for s in used]
        required = {*names, *submodules, *pickler.modules, *self.cell_modules}
        roots = sorted({*pickler.modules, *self.cell_modules})
        return _UsedModules(
            lines=self._import_lines(used, effects),
            submodules=submodules,
            required=required,
            imported=required | {s.module for s in effects},
            on_access={
                *used_submodules(roots, attributes),
                *slow_on_first_use(roots, attributes),
            },
        )

    def _manifest(
        self, header: ClosureManifest, cells: Mapping[str, str], used: _UsedModules
    ) -> ClosureManifest:
        return dataclasses.replace(
            header,
            modules=self.local.sources,
            imports=used.lines,
            submodules=used.submodules,
            settings=self._settings.plain,
            names=tuple(self.names),
            has_module_objects=not all(each.is_new for each in self._objects),
            unsent=self._unsent,
            session=self._session_names(),
            sources={**_sources(self.stream.pickler.filenames), **header.sources},
            labels={**self._labels(), **cells},
            provided=tuple(sorted(self.needs.provided_by_ranks)),
        )

    def _session_names(self) -> SessionSends | None:
        if self.use is None:
            return None
        ranks = {name: decision.ranks for name, decision in self.use.decisions.items()}
        sent = self.use.of(Action.SEND, Action.FILL)
        digests = self._digests_of(self._settings.of_session())
        matched = self.use.names.matched(self.use.cell.ranks)
        return SessionSends({name: ranks[name] for name in sent}, digests, matched)

    def _params(self) -> dict[str, params.Param]:
        """Return the plain values among those of the cell, and among the arguments of a call."""
        names = [*self.needs.values, *(self.use.unchanged if self.use else ())]
        found = {name: self.needs.namespace[name] for name in names}
        if self.call:
            function, args, kwargs = self.call[""]
            with suppress(
                TypeError, ValueError
            ):  # no signature, or none that fits: the rank says so
                found |= signature_of(function).bind_partial(*args, **kwargs).arguments
        return params.among(found)

    def _digests(self) -> dict[str, str]:
        values = {name: self.needs.namespace[name] for name in self.needs.values}
        return self._digests_of({**values, **self.call, **self._settings.of_results()})

    def _digests_of(self, found: Mapping[str, Any]) -> dict[str, str]:
        return {name: digest_of(value, self.needs) for name, value in found.items()}

    def _labels(self) -> dict[str, str]:
        labels = self.needs.labels
        return {file: labels[file] for file in self.stream.pickler.filenames if file in labels}

    def _import_lines(
        self, used: Sequence[Statement], effects: Sequence[Statement]
    ) -> tuple[ImportLine, ...]:
        required = {statement.text for statement in used}
        loaded = {statement.module for statement in used}
        lines = []
        for statement in self.needs.imports.order({*used, *effects}):
            if statement.text in required:
                lines.append(ImportLine(statement.text))
            elif statement.module not in loaded:
                root = statement.module.partition(".")[0]
                binds = self.needs.namespace.get(root, self) is sys.modules.get(root)
                lines.append(ImportLine(f"import {statement.module}", required=False, binds=binds))
                loaded.add(statement.module)
        return tuple(lines)

    def _preload(self, modules: set[str]) -> tuple[str, ...]:
        return tuple(sorted(importable_parts(filter(is_installed, modules))))

    def _inventory(self) -> tuple[CapturedItem, ...]:
        needs, sizes = self.needs, self.stream.sizes
        decisions = self.use.decisions if self.use else {}
        items = [
            CapturedItem(
                name,
                _kind(needs.namespace.get(name)),
                sizes.get(name, 0),
                "; ".join(map(str, filter(None, [decisions.get(name), needs.values.get(name)]))),
            )
            for name in {**decisions, **needs.values}
        ]
        items.sort(key=lambda item: -item.nbytes)
        items += [
            CapturedItem(name, "value", 0, f"kept: only the ranks have it; {why}")
            for name, why in needs.only_on_ranks.items()
        ]
        items += [
            CapturedItem(s.name, "import", 0, f"{s.text}; {why}")
            for s, why in needs.statements.values()
        ]
        items += [
            CapturedItem(name, "module", _nbytes(module.source), f"local, from {module.path}")
            for name, module in self.local.sources.items()
        ]
        return tuple(items)


def _bound_module(statement: Statement) -> str:
    return statement.module.partition(".")[0] if statement.is_root else statement.module


def _kind(value: Any) -> str:
    kind = type(value)
    if issubclass(kind, type):
        return "class"
    return "function" if issubclass(kind, types.FunctionType) else "value"


def _nbytes(source: str) -> int:
    return len(source) if source.isascii() else len(source.encode())


def _sources(filenames: set[str]) -> dict[str, str]:
    """Return the sources of the notebook's cells by file name; real files are on disk."""
    found = {name: "".join(linecache.getlines(name)) for name in sorted(filenames)}
    return {name: text for name, text in found.items() if text and not os.path.exists(name)}
