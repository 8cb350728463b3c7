"""A whole notebook: imports, functions, classes, a model and a package are there on four ranks."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jupyter import Kernel


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    package = tmp_path / "helpers"
    package.mkdir()
    (package / "__init__.py").write_text("from .scaling import scale\n")
    (package / "factor.py").write_text("FACTOR = 2\n")
    (package / "scaling.py").write_text(
        "from .factor import FACTOR\ndef scale(value):\n    return FACTOR * value\n"
    )
    kernel = Kernel(tmp_path / "home", tmp_path)
    try:
        kernel.load()
        yield kernel
    finally:
        kernel.shut_down()


CELLS = [
    """
    import xml.etree.ElementTree as xml_tree
    import numpy as np
    import torch, torch.nn as nn, torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset
    import hydrogen_magic as hm
    import helpers
    """,
    """
    def tag_of(text):
        return xml_tree.fromstring(text).tag
    def outer(text):
        return tag_of(text) + "!"
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)
    class Net(Base):
        def forward(self, x):
            return self.layer(x)
    class Squares(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            return np.float32(index ** 2)
    actions = {"double": lambda value: helpers.scale(value)}
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    array = np.arange(200_000)
    """,
    """
    from pathlib import Path
    _ = Path("helpers/factor.py").write_text("FACTOR = 30\\n")
    """,
    """
    %%distributed --np 4 --out reports
    dist.init_process_group("gloo")
    shared = all(p is q for p, q in zip(model.parameters(), optimizer.param_groups[0]["params"]))
    before = model.layer.weight.detach().clone()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    workers = {}
    if hm.rank() == 3:  # one is enough: it imports torch anew
        workers = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = DataLoader(Squares(), batch_size=4, **workers)
    mine = {
        "tag": outer("<root/>"),
        "base": isinstance(model, Base),
        "edited": actions["double"](1),
        "shared": shared and not torch.equal(before, model.layer.weight),
        "array": int(array.sum()),
        "writable": bool(array.flags.writeable),
        "loaded": sum(float(batch.sum()) for batch in loader),
        "rank": hm.rank(),
    }
    reports = [None] * hm.world_size()
    dist.all_gather_object(reports, mine)
    if hm.rank() == 0:
        torch.save(model, "model.pt")
    len(reports)
    """,
]


@pytest.mark.exhaustive  # test_capture has its parts
def test_everything_is_there_and_right_on_every_rank(kernel: Kernel) -> None:
    for text in CELLS:
        done = kernel.run(textwrap.dedent(text).lstrip())
        assert not done.error, done.error
    assert done.value == "4"
    expected = {
        "tag": "root!",
        "base": True,
        "edited": 30,
        "shared": True,
        "array": 19999900000,
        "writable": True,
        "loaded": 140.0,
    }
    for rank in range(4):
        report = ast.literal_eval(kernel.value(f"reports[{rank}]"))
        assert report == {**expected, "rank": rank}
    loaded = "type(torch.load('model.pt', weights_only=False)) is Net"
    assert kernel.value(loaded) == "True"
    assert kernel.value("helpers.scale(1)") == "2", "the kernel keeps what it imported"
