"""What a cell of a session has left in the namespace of its rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hydrogen_magic.core.events import HeldName, NamesChanged
from hydrogen_magic.driver.session import RankHoldings
from hydrogen_magic.node.worker.name_changes import NameChanges


def report(changes: NameChanges) -> NamesChanged:
    return NamesChanged(
        0.0, 0, changes.received(), changes.assigned(), changes.deleted(), 100, None, 0
    )


def test_names_are_the_closures_or_the_cells() -> None:
    namespace: dict[str, Any] = {"old": [1], "gone": 1, "__name__": "__main__"}
    changes = NameChanges(namespace)
    namespace.update(sent=np.zeros(3), replaced=[1], math=math)
    changes.mark_received()
    del namespace["gone"]
    namespace["old"].append(2)  # the same object
    namespace.update(replaced=[2], made=len, Made=type("Made", (), {}), f=lambda: None)
    assert changes.received() == {
        "sent": HeldName("value", "ndarray", 24),
        "math": HeldName("module", "module"),
    }
    assert changes.assigned() == {
        "replaced": HeldName("value", "list"),
        "made": HeldName("value", "builtin_function_or_method"),
        "Made": HeldName("class", "type"),
        "f": HeldName("function", "function"),
    }
    assert changes.deleted() == ("gone",)


def test_holdings_follow_the_cells() -> None:
    namespace: dict[str, Any] = {}
    first = NameChanges(namespace)
    namespace["x"] = [1]
    first.mark_received()
    namespace["y"] = [2]
    after_first = RankHoldings().after(report(first))
    assert (set(after_first.names), after_first.assigned) == ({"x", "y"}, {"y"})
    second = NameChanges(namespace)
    namespace["y"] = [3]  # sent again
    second.mark_received()
    namespace["x"] = [4]
    after_second = after_first.after(report(second))
    assert (set(after_second.names), after_second.assigned) == ({"x", "y"}, {"x"})
    third = NameChanges(namespace)
    third.mark_received()
    del namespace["x"]
    assert set(after_second.after(report(third)).names) == {"y"}
