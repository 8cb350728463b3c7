"""What each picture shows, and when it is taken."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

from playwright.sync_api import expect

from docs.pictures.cells import ANIMATED, FAILING, FRAME, INFER, TRAINING
from docs.pictures.files import write_animation, write_picture
from docs.pictures.studio import (
    DARK,
    Studio,
    hide_sidebar,
    leave_alone,
    shot,
    taken,
    wait_until_drawn,
)

__all__ = ["SCENES"]

_WIDTH = 1000
_ANIMATION = (960, 760)
_FRAME_S = 0.4
_LAST_FRAME_S = 3.0


def animation(studio: Studio) -> None:
    frames = []
    with studio.notebook("animation", ANIMATED, width=_ANIMATION[0], scale=1) as page:
        page.start(ANIMATED)
        leave_alone(page)
        cell = page.cell(ANIMATED)
        cell.locator(".hm").wait_for()
        while page.is_running(ANIMATED):
            due_s = time.monotonic() + _FRAME_S
            frames.append(shot(cell))
            time.sleep(max(0.0, due_s - time.monotonic()))
        wait_until_drawn(page)
        frames.append(shot(cell))
    times_s = [_FRAME_S] * (len(frames) - 1) + [_LAST_FRAME_S]
    write_animation("view.gif", frames, _ANIMATION, times_s)


def running_and_reopened(studio: Studio) -> None:
    with studio.notebook("training", TRAINING, width=_WIDTH) as page:
        page.start(TRAINING)
        widget = page.widget(TRAINING)
        expect(widget.locator(".hm-ranks")).to_contain_text("7/16")
        expect(widget.locator(".hm-names")).to_contain_text("waiting for rank 2")
        write_picture("view_running.png", taken(page, page.cell(TRAINING)))
        page.finish(TRAINING)
        page.save(TRAINING, "text/html", "data:image/svg+xml;base64,")
        copy = page.open_copy(trusted=False)
        hide_sidebar(copy)
        expect(copy.output(TRAINING).locator("img").first).to_be_visible()
        write_picture("view_reopened.png", taken(copy, copy.output(TRAINING)))
        copy.close()


def failed(studio: Studio) -> None:
    with studio.notebook("failed", FAILING, width=_WIDTH, theme=DARK) as page:
        page.run(FAILING)
        expect(page.state(FAILING)).to_have_attribute("data-state", "failed")
        write_picture("view_failed.png", taken(page, page.output(FAILING)))


def stopped(studio: Studio) -> None:
    with studio.notebook("stopped", TRAINING, width=_WIDTH) as page:
        page.start(TRAINING)
        widget = page.widget(TRAINING)
        expect(widget.locator(".hm-ranks")).to_contain_text("7/16")
        widget.locator(".hm-stop").click()
        page.finish(TRAINING)
        expect(page.state(TRAINING)).to_have_attribute("data-state", "stopped")
        write_picture("view_stopped.png", taken(page, widget))


def infer(studio: Studio) -> None:
    with studio.notebook("infer", FRAME, INFER, width=_WIDTH) as page:
        page.run(FRAME)
        page.start(INFER)
        figures = page.widget(INFER).locator(".hm-rows-figures")
        expect(figures).to_contain_text(re.compile(r"[4-6]\d %.* left.*2 rows failed"))
        write_picture("view_infer.png", taken(page, page.cell(INFER)))
        page.finish(INFER)


SCENES: Mapping[str, Callable[[Studio], None]] = {
    "animation": animation,
    "running": running_and_reopened,
    "failed": failed,
    "stopped": stopped,
    "infer": infer,
}
