"""Takes the animated screenshot of the README: a cell that trains in JupyterLab, and its live view.

``python -m docs.animation`` from the root of the repository; needs a Chromium and the developer tools.
"""

from __future__ import annotations

import io
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.browser.page import NotebookPage, Seen, launch, write_notebook
from tests.browser.server import Server

FILE = Path(__file__).parent / "images" / "view.gif"
WIDTH = 800
HEIGHT = 800
FRAME_S = 0.3
N_FRAMES = 50
LAST_FRAME_S = 3.0

LOAD = "%load_ext hydrogen_magic"
SETUP = """import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import hydrogen_magic as hm

torch.manual_seed(0)
x = torch.randn(2048, 64)
dataset = TensorDataset(x, (x @ torch.randn(64, 10)).argmax(1))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
"""
TRAIN = """%%distributed --np 4 --out model
dist.init_process_group()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(hm.shard(dataset), batch_size=32, shuffle=True)
for epoch in hm.track(range(8), desc="epoch"):
    for images, labels in loader:
        scores = ddp(images)
        loss = cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hm.log(loss=loss, accuracy=(scores.argmax(1) == labels).float().mean())
        time.sleep(0.03 + 0.03 * (hm.rank() == 2))    # rank 2 is slow"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        server = Server(Path(folder))
        try:
            frames = _frames(server, launch(playwright))
        finally:
            server.end_kernels()
            server.stop()
    _write(frames)
    print(f"{FILE}: {len(frames)} pictures, {FILE.stat().st_size / 1e6:.1f} MB")


def _frames(server: Server, browser: Browser) -> list[Image.Image]:
    context = browser.new_context(viewport={"width": 1180, "height": 1500})
    page = NotebookPage(context, server, Seen())
    page.open(write_notebook(server.notebooks / "training.ipynb", (LOAD, SETUP, TRAIN)))
    page.run(LOAD)
    page.run(SETUP)
    page.start(TRAIN)
    cell = page.cell(TRAIN)
    cell.locator(".hm").wait_for()
    frames = []
    while len(frames) < N_FRAMES and page.is_running(TRAIN):
        due_s = time.monotonic() + FRAME_S
        frames.append(Image.open(io.BytesIO(cell.screenshot())))
        time.sleep(max(0.0, due_s - time.monotonic()))
    page.finish(TRAIN)
    time.sleep(1)
    return [*frames, Image.open(io.BytesIO(cell.screenshot()))]


def _write(frames: list[Image.Image]) -> None:
    """Write the pictures in one palette and of one size, from the top."""
    pages = []
    for frame in frames:
        page = Image.new("RGB", (WIDTH, HEIGHT), "white")
        page.paste(frame.convert("RGB").resize((WIDTH, frame.height * WIDTH // frame.width)))
        pages.append(page)
    # by octree: thin lines keep their colours
    palette = pages[len(pages) // 2].quantize(256, method=Image.Quantize.FASTOCTREE)
    first, *others = [page.quantize(palette=palette, dither=Image.Dither.NONE) for page in pages]
    times_ms = [int(1000 * FRAME_S)] * len(others) + [int(1000 * LAST_FRAME_S)]
    first.save(FILE, save_all=True, append_images=others, duration=times_ms, loop=0, optimize=True)


if __name__ == "__main__":
    main()
