"""A rank's timeline file on a disk that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.messages import TimelineFile


def test_a_dead_disk_costs_the_timeline_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydrogen_magic.frameworks.horovod.node.observe import timeline
    from hydrogen_magic.node.worker import reporter as reporters

    sent: list[TimelineFile] = []
    started: list[str] = []
    monkeypatch.setattr(timeline._process, "timeline", None)
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    reporter = reporters.Reporter(0, 0.0, lambda batch: None)
    monkeypatch.setattr(reporters._process, "reporter", reporter)
    gone = tmp_path / "gone"
    one = timeline._Timeline(str(gone / "horovod-timeline-"), sent.append)
    one.begin(lambda: True, started.append, lambda: None)
    for _ in range(2):  # not tried over and over
        one.follow(True)
        one._wait()
    assert started == [] and sent == []
    (notice,) = reporter._others
    assert isinstance(notice, ev.Notice) and "cannot be written" in notice.text
    gone.mkdir()
    one.follow(False)
    one.follow(True)  # asked anew
    one._wait()
    assert [Path(path).parent for path in started] == [gone]
    assert [file.is_kept for file in sent] == [True]
