"""Program that compiles and loads operators of DeepSpeed; its arguments are their names."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hydrogen_magic.frameworks import subprocess_log
from hydrogen_magic.node.worker.observe import compilation

MARK = "· "
"""Begins lines for the user."""


def main(names: Sequence[str]) -> None:
    subprocess_log.exit_on_signals()  # torch then removes its lock file, for which ranks would wait
    from deepspeed.ops.op_builder.all_ops import ALL_OPS, accelerator_name
    from torch.utils import cpp_extension

    compilation.explain_waits(cpp_extension, lambda text: print(f"{MARK}{text}"))
    unknown = [name for name in names if name not in ALL_OPS]
    if unknown:
        there = ", ".join(ALL_OPS)
        raise ValueError(
            f"not an operator for {accelerator_name}: {unknown[0]}; choose from {there}"
        )
    for name in names:
        ALL_OPS[name].load(verbose=True)


if __name__ == "__main__":
    main(sys.argv[1:])
