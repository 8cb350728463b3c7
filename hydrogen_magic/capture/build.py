"""Builds a closure: pickles of the needed values, and their local modules."""

from __future__ import annotations

import dataclasses
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydrogen_magic.capture.analysis import CellNames
from hydrogen_magic.capture.imports import Statement, used_submodules
from hydrogen_magic.capture.modules import LocalModules, is_installed
from hydrogen_magic.capture.needs import Needs
from hydrogen_magic.capture.stream import NamedPickles
from hydrogen_magic.capture.values import Captured, CapturedItem
from hydrogen_magic.serialization.closure import Header, ImportLine, bundle

__all__ = ["Builder"]


class Builder:
    """Pickles the needed values and finds their local modules."""

    def __init__(
        self,
        needs: Needs,
        max_bytes: int,
        ranks_have_gpu: bool,
        names: CellNames | None = None,
        out: Sequence[str] = (),
    ) -> None:
        self.needs = needs
        self.cell_modules = names.modules if names else ()
        self.cell_attributes = names.attributes if names else frozenset()
        self.local = LocalModules()
        self.stream = NamedPickles(
            needs,
            max_bytes=max_bytes,
            ranks_have_gpu=ranks_have_gpu,
            is_local=self._is_local,
            out=out,
        )
        self._out = out
        self.names: list[str] = []

    def _is_local(self, module: str) -> bool:
        self.local.add([module])
        return self.local.is_local(module)

    def add_names(self) -> None:
        """Pickle the values of the names found so far."""
        self.names = self.needs.ordered_values(self._out)
        self.stream.add((name, self.needs.namespace[name]) for name in self.names)
        self.needs.check()

    def add_call(self, call: Any) -> None:
        """Pickle the call, after the names that it uses."""
        self.names.append("")
        self.stream.add([("", call)])
        self.needs.check()

    def finish(self, header: Header, cells: Mapping[str, str]) -> Captured:
        """Return the closure."""
        pickler = self.stream.pickler
        attributes = pickler.attributes | self.cell_attributes
        used = [statement for statement, _ in self.needs.statements.values()]
        effects = self.needs.imports.for_side_effects(self.needs.read, self.cell_modules)
        lines = self._import_lines(used, effects)
        submodules = used_submodules([_bound_module(s) for s in used], attributes)
        imported = [s.module for s in used] + [f"{s.module}.{s.attribute}" for s in used]
        modules = {*imported, *submodules, *pickler.modules, *self.cell_modules}
        self.local.add(sorted(modules | {s.module for s in effects}))
        complete = dataclasses.replace(
            header,
            modules=self.local.sources,
            imports=lines,
            submodules=submodules,
            names=tuple(self.names),
            sources={**_sources(pickler.filenames), **header.sources},
            provided=tuple(sorted(self.needs.provided)),
        )
        warning = self.stream.check_size()
        return Captured(
            bundle(complete, self.stream.finish()),
            self._inventory(),
            self._preload(self.local.reached(modules | {s.module for s in effects})),
            {**self._labels(), **cells},
            (*([warning] if warning else ()), *self.local.warnings),
            self._preload(modules),
            self.stream.originals,
        )

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
                lines.append(ImportLine(f"import {statement.module}", required=False))
                loaded.add(statement.module)
        return tuple(lines)

    def _preload(self, modules: set[str]) -> tuple[str, ...]:
        known = {m if m in sys.modules else m.partition(".")[0] for m in modules}
        return tuple(sorted(m for m in known if is_installed(m)))

    def _inventory(self) -> tuple[CapturedItem, ...]:
        needs, sizes = self.needs, self.stream.sizes
        items = [
            CapturedItem(name, _kind(needs.namespace[name]), sizes.get(name, 0), why)
            for name, why in needs.values.items()
        ]
        items.sort(key=lambda item: -item.nbytes)
        items += [
            CapturedItem(s.name, "import", 0, f"{s.text}; {why}")
            for s, why in needs.statements.values()
        ]
        items += [
            CapturedItem(name, "module", len(module.source.encode()), f"local, from {module.path}")
            for name, module in self.local.sources.items()
        ]
        return tuple(items)


def _bound_module(statement: Statement) -> str:
    return statement.module.partition(".")[0] if statement.is_root else statement.module


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return "class"
    return "function" if hasattr(value, "__code__") else "value"


def _sources(filenames: set[str]) -> dict[str, str]:
    """Return the sources of the notebook's cells by file name; real files are on disk."""
    found = {name: "".join(linecache.getlines(name)) for name in sorted(filenames)}
    return {name: text for name, text in found.items() if text and not os.path.exists(name)}
