"""Which names of the notebook a cell of a session sends to ranks that have earlier ones."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from hydrogen_magic.core.events import HeldName

_CODE = (types.FunctionType, type, types.ModuleType)


def is_sent(name: str, namespace: Mapping[str, Any], held: Mapping[str, HeldName]) -> bool:
    """Return whether the notebook's ``name`` is sent to ranks that have it already.

    The one place that decides this. It is asked for every name that the cell uses, directly or by functions
    that it uses, if ``name`` is in ``held``; other names are always sent.

    Args:
        namespace: The notebook's names. A name that only ranks have is not there, and is not sent.
        held: What all ranks of the cell hold, by name; see
            :meth:`hydrogen_magic.driver.session.Session.held_by`. ``Session.ranks[n].assigned`` has those
            of rank n that cells have bound there, rather than the notebook.

    Functions, classes and modules are always sent, so that ranks run the notebook's present code.
    """
    return name in namespace and issubclass(type(namespace[name]), _CODE)
