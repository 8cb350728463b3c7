"""Secrets of the environment do not reach views, records or errors; ranks start no gangs."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.compat import log_to_driver
from hydrogen_magic.core import events as ev
from hydrogen_magic.notebook.magics import Distributed
from hydrogen_magic.views import static_picture
from tests.capture_rig import open_notebook
from tests.gangs import ended, failure_of
from tests.nesting_ranks import REFUSAL, refusals, refusals_to_a_child

pytestmark = pytest.mark.usefixtures("warm_agents")

TOKEN = "hf_Zq81-live-Qx9"
GIVEN = "open-sesame-please"
HOOK = "services/T0/B0/q8Zr2xW9pL"


def spill() -> None:
    """Print the secrets in pieces and whole, to both streams, and fail with one."""
    token, given = os.environ["HM_TEST_TOKEN"], os.environ["NOTE"]
    for text in (f"first {token[:5]}", f"{token[5:]} then {given}\n", f"tail {token[:4]}"):
        os.write(1, text.encode())
        time.sleep(0.2)  # longer than output is collected before it is sent
    print(f"https://user:{token}@host/", file=sys.stderr)
    print(f"posted to {os.environ['WEBHOOK']} in {os.environ['FOLDER']}", file=sys.stderr)
    log_to_driver(f"using {token}")
    hm.log(**{given: 1.0})
    try:
        raise KeyError(token)
    except KeyError as error:
        raise ValueError(f"cannot log in with {token!r}") from error


def test_secrets_are_masked_wherever_ranks_text_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HM_TEST_TOKEN", TOKEN)
    env = {"NOTE": GIVEN, "WEBHOOK": f"https://example.com/{HOOK}", "FOLDER": "/no/such/folder"}
    gang = hm.launch(spill, np=1, env=env)
    error = failure_of(gang)
    shown = "".join(
        e.text for e in gang.events() if isinstance(e, ev.Output) and e.stream == "stdout"
    )
    assert shown == "first *** then ***\ntail hf_Z"
    assert "https://user:***@host/" in gang.logs[0] and "using ***" in gang.logs[0]
    assert "posted to https://example.com/*** in /no/such/folder" in gang.logs[0]
    assert str(error) == "rank 0 failed: ValueError: cannot log in with '***'"
    assert "KeyError: '***'" in error.report
    folder = gang.log_path(0).parent
    kept = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    assert {"events.jsonl", "rank-0.log"} <= kept.keys()
    picture = static_picture(gang.snapshot(), gang.events())
    assert "cannot log in with" in picture and "first" in picture
    for text in (*kept.values(), repr(gang.events()), error.report, repr(gang.metrics), picture):
        assert not [secret for secret in (TOKEN, GIVEN, HOOK) if secret in text]


class Unsendable:
    def __reduce__(self) -> Any:
        raise ValueError(f"cannot send {os.environ['HM_TEST_TOKEN']}")


def test_the_reason_why_a_result_is_missing_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HM_TEST_TOKEN", TOKEN)
    with pytest.raises(hm.errors.ResultError) as caught:
        _ = ended(hm.launch(Unsendable, np=1)).result
    assert "cannot send ***" in str(caught.value) and TOKEN not in str(caught.value)


def test_a_secret_in_the_magics_line_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with open_notebook() as notebook:
        Distributed(notebook.shell)._distributed(f"--np 1 --env HM_KEY={TOKEN}", "1")  # type: ignore[arg-type]
    gang = list(hm.gangs().values())[-1]
    assert gang.snapshot().title == "%%distributed --np 1 --env HM_KEY=***"
    assert TOKEN not in capsys.readouterr().out


# ── a gang in a gang ─────────────────────────────────────────────────────────────────────────────


def test_a_rank_starts_no_gang() -> None:
    assert set(hm.run(refusals_to_a_child, np=1, quiet=True)) == {REFUSAL}
    assert set(hm.launch(refusals, np=1, on="inline").result) == {REFUSAL}
    assert hm.run(os.getpid, np=1, quiet=True) != os.getpid()  # this process is no rank any more
