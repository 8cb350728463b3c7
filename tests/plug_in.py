"""A plug-in that tests declare: its modules lie in a folder that is in ``sys.path`` for as long."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hydrogen_magic.testing.entry_points import declare

CODE = """
import os
from dataclasses import replace
from pathlib import Path

from hydrogen_magic.driver.placements.local import LocalPlacement
from hydrogen_magic.plugins import (
    Placement, Rendezvous, RendezvousInfo, ServiceSpec, VictimErrors, place
)

class MyPlacement(LocalPlacement):
    def plan(self, spec):
        return replace(super().plan(spec), notes=("planned by the plug-in",))

class MyRendezvous(Rendezvous):
    variables = Rendezvous.variables | {"MY_STORE"}
    forwarded = ("MY_",)
    launcher = "myrun -n {np}"
    joining = ("my.join",)
    shipped = ("my_parts.on_ranks",)
    not_preloaded = ("threads_at_import",)
    preloaded = ("colorsys",)
    victims = VictimErrors(types=("MyPeerError",), messages=("my peer .* has gone", "Wait timeout"))

    def prepare(self, plan, address, port, *, spec, gang, attempt):
        store = Path(__file__).with_name(f"store-{gang}-{attempt}")
        meet = {"MY_STORE": str(store), "GLOO_SOCKET_IFNAME": plan.slots[0].interface}
        return RendezvousInfo(tuple({**place(slot), **meet} for slot in plan.slots))

class ServingRendezvous(MyRendezvous):
    def prepare(self, *args, **options):
        service = ServiceSpec(f"{__name__}:serve", {"text": "no server"})
        return replace(super().prepare(*args, **options), service=service)

def serve(listen_fd, text):
    raise ValueError(f"{text}, blocking: {os.get_blocking(listen_fd)}")

class PlanningOnly(Placement):
    def plan(self, spec):
        return LocalPlacement().plan(spec)

class EndingWithKernel(LocalPlacement):
    ends_with_kernel = Placement.ends_with_kernel

class FindingNobody(Rendezvous):
    launcher = "findrun"

def attach(module):
    module.OBSERVED = True

def not_a_placement():
    return 5
"""


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Have the plug-in installed: placement and rendezvous ``mine``, an observer of ``watched_library``."""
    (folder / "my_plug_in.py").write_text(textwrap.dedent(CODE))
    (folder / "watched_library.py").write_text("OBSERVED = False\n")
    (folder / "my_parts" / "on_ranks").mkdir(parents=True)
    for module in ("__init__", "driver", "on_ranks/__init__", "on_ranks/service"):
        (folder / "my_parts" / f"{module}.py").write_text("")
    placements = {
        "mine": "MyPlacement",
        "broken": "Missing",
        "wrong": "not_a_placement",
        "incomplete": "PlanningOnly",
        "ending": "EndingWithKernel",
    }
    rendezvous = {
        "mine": "MyRendezvous",
        "serving": "ServingRendezvous",
        "broken": "Missing",
        "incomplete": "FindingNobody",
    }
    _declare(folder, "placements", placements)
    _declare(folder, "rendezvous", rendezvous)
    _declare(folder, "observers", {"watched_library": "attach"})
    missing = {"watched_library": "no_such_module:attach"}
    declare(folder, "hydrogen_magic.observers", missing, "missing-observer")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def _declare(folder: Path, group: str, points: dict[str, str]) -> None:
    named = {name: f"my_plug_in:{value}" for name, value in points.items()}
    declare(folder, f"hydrogen_magic.{group}", named, f"my-{group}")
