"""The files of the pictures, small enough for a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

__all__ = ["FOLDER", "write_animation", "write_picture"]

FOLDER = Path(__file__).parents[1] / "images"
_N_COLOURS = 256


def write_picture(name: str, picture: Image.Image) -> None:
    """Write a PNG of few colours: a third of the size, and no difference that is seen."""
    _few_colours(picture).save(FOLDER / name, optimize=True)


def write_animation(
    name: str, frames: Sequence[Image.Image], size: tuple[int, int], times_s: Sequence[float]
) -> None:
    """Write a GIF in one palette; frames that are lower than ``size`` get white space below."""
    pages = [Image.new("RGB", size, "white") for _ in frames]
    for page, frame in zip(pages, frames, strict=True):
        page.paste(frame)
    palette = _few_colours(pages[-1])
    first, *others = [page.quantize(palette=palette, dither=Image.Dither.NONE) for page in pages]
    first.save(
        FOLDER / name,
        save_all=True,
        append_images=others,
        duration=[round(1000 * time_s) for time_s in times_s],
        loop=0,
        optimize=True,
    )


def _few_colours(picture: Image.Image) -> Image.Image:
    """Reduce colours; means of what is near keep light greys apart from white."""
    return picture.quantize(
        _N_COLOURS, Image.Quantize.MEDIANCUT, kmeans=2, dither=Image.Dither.NONE
    )
