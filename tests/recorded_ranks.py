"""What tests of recording run on a rank. A plain local module: it travels with what it uses."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any


def record() -> None:
    """Record spans that nest, a compiled collective, and compiled modules; a notice divides them."""
    from hydrogen_magic.core import events as ev
    from hydrogen_magic.node.worker.reporting import reporter

    rank = reporter.current()
    assert rank is not None
    for part in (_nest, _compile_collective, _compile):
        part(rank)
        rank.is_recording = False
        rank.post(ev.Notice(0.0, "info", f"the end of {part.__name__}"))


def _nest(rank: Any) -> None:
    import torch
    from torch import optim

    import hydrogen_magic as hm
    from hydrogen_magic.node.worker.observe import forward

    module: Any = torch.nn.Module
    plain = module.__call__
    torch.load  # noqa: B018 (recording covers functions that exist when it begins)
    rank.is_recording = True
    forward.follow(True)
    assert module.__call__ is not plain
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    optimizer = optim.LBFGS(model.parameters(), max_iter=1, max_eval=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with hm.span("mine"):
            loss = torch.nn.MSELoss()(model(torch.ones(1, 2)), torch.zeros(1, 1))
        loss.backward()
        return loss

    optimizer.step(closure)

    class Fails(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("this step")

    failing = Fails(model.parameters(), lr=0.1)
    for _ in range(3):
        try:
            failing.step()
        except ValueError:
            pass
    try:
        model("no tensor")
    except TypeError:
        pass
    other = threading.Thread(target=model, args=(torch.ones(1, 2),))
    other.start()
    other.join()
    rank.is_recording = False
    forward.follow(False)
    assert module.__call__ is plain
    model(torch.ones(1, 2))
    rank.is_recording = True
    module.__call__ = lambda self, *args: plain(self, *args)  # another patch, as torch.fx does it
    theirs = module.__call__
    forward.follow(True)
    assert module.__call__ is theirs
    module.__call__ = plain


def _compile_collective(rank: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")

    def reduced(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    compiled = torch.compile(reduced, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    dist.destroy_process_group()


def _compile(rank: Any) -> None:
    import torch
    from torch._dynamo.testing import CompileCounter

    from hydrogen_magic.node.worker.observe import forward

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]

    warnings.simplefilter("error")
    net = Net()
    for is_recording in (False, True):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(net, backend=counter, fullgraph=True)
        inner = Net()
        inner.compile(backend=counter, fullgraph=True)
        for number in range(6):
            rank.is_recording = is_recording == (number % 2 == 0)
            forward.follow(rank.is_recording)
            compiled(torch.ones(2, 4)).sum().backward()
            inner(torch.ones(2, 4))
            if number == 0:
                compiled_at_first = counter.frame_count
        assert counter.frame_count == compiled_at_first, counter.frame_count


def profile_oneself(over: str) -> bool:
    """Train under a profiler of the user's own until there is a file ``over``; return what it has seen."""
    import torch
    from torch import optim

    weight = torch.ones(3, requires_grad=True)
    optimizer = optim.SGD([weight], lr=0.01)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        while not Path(over).exists():
            weight.sum().backward()
            optimizer.step()
            time.sleep(0.01)
    return "aten::sum" in {event.name for event in own.events()}
