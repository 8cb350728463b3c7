"""Which run a name or an id means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from hydrogen_magic.core import run_log
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.errors import HydrogenError


def names(live: Mapping[str, Gang], recorded: Iterable[run_log.Summary]) -> dict[str, str]:
    """Return the names of runs by their ids, newest last."""
    found = {one.gang: (one.launched.wall_time, one.launched.name) for one in recorded}
    for gang_id, gang in live.items():
        state = gang.snapshot()
        found[gang_id] = (state.wall_time, state.name)
    return {
        gang_id: found[gang_id][1] for gang_id in sorted(found, key=lambda each: found[each][0])
    }


def complete(
    name: str | None, known: Mapping[str, str], whose: str = "", *, to_stop: bool = False
) -> str:
    """Return the id ``name``, else that of the newest run of this name, else the one that it begins.

    ``known``: names of runs by their ids, newest last. ``to_stop``: refuse a name that begins the id of
    another run: that one may be meant, and a stop cannot be undone. Raises HydrogenError if there is none,
    or several.
    """
    if name is None:
        return list(known)[-1]
    if name in known:
        return name
    begun = [each for each in known if each.startswith(name)]
    named = [each for each, of in known.items() if of == name]
    others = [each for each in begun if each not in named]
    if named and others and to_stop:
        raise HydrogenError(
            f"{name!r} is the name of gang {named[-1]}, and the beginning of {', '.join(others[-8:])}: "
            "give the whole ID"
        )
    if named:
        return named[-1]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise HydrogenError(f"several gangs begin with {name!r}: {', '.join(begun[-8:])}")
    problem = f"no gang {whose}".strip()
    longer = [of for of in known.values() if of.startswith(name)]
    near = longer[-1:] or difflib.get_close_matches(name, known.values(), n=1)
    shown = ", ".join(f"{each} ({known[each]})" for each in list(known)[-8:])
    hint = f"; did you mean {near[0]!r}?" if near else f": {shown}" if shown else ""
    raise HydrogenError(f"{problem} has the ID or name {name!r}{hint}")
