"""Observer of ``torch.fx.traceback``: stacks that torch's anomaly mode prints are without frames of ours."""

from __future__ import annotations

import traceback
from types import ModuleType

from hydrogen_magic.node.worker.main_thread import users_stack
from hydrogen_magic.node.wrapping import wraps


def attach(module: ModuleType) -> None:
    """Replace the function by which torch notes the stack of a forward call."""
    original = module.format_stack

    @wraps(original)
    def format_stack() -> list[str]:
        is_compiled = getattr(module, "should_preserve_node_meta", False)
        found: list[str] = original() if is_compiled else traceback.format_list(users_stack())
        return found

    module.format_stack = format_stack  # type: ignore[attr-defined]
