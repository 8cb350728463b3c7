"""Takes the pictures of README and documentation: gangs that run in JupyterLab, and their live views.

``python -m docs.pictures`` in the root of the repository takes all pictures; ``python -m docs.pictures infer
failed`` takes those of two scenes. It needs a Chromium and the developer tools.
"""

from __future__ import annotations

import argparse

from docs.pictures.files import FOLDER
from docs.pictures.scenes import SCENES
from docs.pictures.studio import Studio


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.pictures", description=__doc__)
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=", ".join(SCENES))
    scenes = parser.parse_args().scenes or list(SCENES)
    if unknown := set(scenes) - set(SCENES):
        parser.error(f"no such scene: {', '.join(sorted(unknown))}")
    with Studio.opened() as studio:
        for scene in scenes:
            print(scene, flush=True)
            SCENES[scene](studio)
    for path in sorted(FOLDER.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
