"""A rank's timelines: which are the user's, and what a disk that fails costs."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.messages import TimelineFile


def test_a_call_of_the_user_that_fails_leaves_the_gangs_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydrogen_magic.frameworks.horovod.node.observe import timeline

    def refused() -> NoReturn:
        raise AttributeError("Horovod takes texts alone")

    sent: list[TimelineFile] = []
    stopped: list[bool] = []
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    one = timeline._Timeline(str(tmp_path / "horovod-timeline-"), sent.append)
    one.begin(lambda: True, lambda path: None, lambda: stopped.append(True))
    one.follow(True)
    one._wait()
    for path in (str(tmp_path / "mine.json"), ""):
        with pytest.raises(AttributeError):
            one.call_as_user(path, refused)
    assert [file.is_kept for file in sent] == [True] and not stopped
    one.follow(False)
    one._wait()
    assert [file.path for file in sent[1:]] == [""] and stopped == [True]
    one.end()


def test_a_timeline_of_the_user_continues_in_the_next_cell_of_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydrogen_magic.frameworks.horovod.node.observe import timeline

    sent: list[TimelineFile] = []
    started: list[str] = []
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    one, two = (timeline._Timeline(str(tmp_path / cell), sent.append) for cell in ("one-", "two-"))
    one.begin(lambda: True, started.append, lambda: None)
    one.call_as_user(mine := str(tmp_path / "mine.json"), lambda: None)
    one.hand_over(two)
    two.follow(True)
    two._wait()
    assert started == [] and sent[-1].path == mine and not sent[-1].is_kept
    two.call_as_user("", lambda: None)
    two.follow(True)
    two._wait()
    assert started == [str(tmp_path / "two-1.json")]
    two.end()


def test_a_dead_disk_costs_the_timeline_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydrogen_magic.frameworks.horovod.node.observe import timeline
    from hydrogen_magic.node.worker.reporting import reporter as reporters

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
