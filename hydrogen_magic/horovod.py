"""``python -m hydrogen_magic.horovod build``: the same as ``python -m hydrogen_magic horovod build``."""

from __future__ import annotations

import sys

from hydrogen_magic.frameworks.horovod.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
