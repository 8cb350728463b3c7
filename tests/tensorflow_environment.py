"""TensorFlow beside the environment of the tests: Keras, transformers and TensorBoard would use it there.

It has a virtual environment of its own, with the tests' environment below it. ``python -m
tests.tensorflow_environment`` makes it; ``make test-all`` runs the tests marked ``tensorflow`` there.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from tests import environments

REQUIREMENTS = ("tensorflow-cpu>=2.16", "tf_keras>=2.16")
FOLDER = Path(sys.prefix) / "tensorflow"


def install() -> None:
    """Make the environment. Raises CalledProcessError, such as where there is no wheel for this Python."""
    with environments.made(FOLDER) as pip_install:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        below = FOLDER / "lib" / version / "site-packages" / "below.pth"
        # As a site, so that its own path files count too: this package is installed by one.
        below.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        subprocess.run([*pip_install, *REQUIREMENTS], check=True)


def main() -> None:
    if not FOLDER.exists():
        print("· installing TensorFlow beside the tests' environment", flush=True)
        install()


if __name__ == "__main__":
    main()
