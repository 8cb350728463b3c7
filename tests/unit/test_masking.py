"""Secrets of the environment are masked; ordinary text is not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.masking import Mask, MaskedStream, masked_line, secret_values

SECRET = "hf_q8Zr/2xW+9pL"


@pytest.mark.parametrize("name", ["AWS_SECRET", "hf_token", "DB_PASSWORD", "OPENAI_APIKEY"])
def test_names_that_say_secret(name: str) -> None:
    assert secret_values({name: SECRET, "HOME": "home-of-user-1"}) == (SECRET,)


def test_values_of_env_options() -> None:
    given = {
        "NOTE": "open-sesame-please",
        "NCCL_SOCKET_IFNAME": "enp175s0f0",
        "STEPS": "100000000",
        "DATA": "s3://bucket/data-1",
        "FOLDER": "/no/such/folder",
        "HOROVOD_KEY": SECRET,
    }
    assert secret_values({"PLAIN": "not-a-secret"}, given) == ("open-sesame-please", SECRET)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hooks.example.com/services/T0/B0/secret", "https://hooks.example.com/***"),
        ("https://example.com/api/?signature=q8Zr2xW9pL", "https://example.com/api/?***"),
        ("https://example.com:8443/", "https://example.com:8443/"),
        ("slack://example/q8Zr2xW9pL/9pL", "slack://example/***"),
        ("jdbc:postgresql://db/x?password=q8Zr2xW9pL", "jdbc:***?***"),
        ("https://me:q8Zr2xW9pL@example.com/login-1", "***"),
        ("https://[example.com/services/secret", "***"),
        ("s3://bucket/data-of-2026/part-1", "s3://bucket/data-of-2026/part-1"),
        ("dbfs:/data-of-2026/part-1", "dbfs:/data-of-2026/part-1"),
        ("abfss://lake@account.host/part-1", "abfss://lake@account.host/part-1"),
        ("wasb://lake@account.host/a?sig=q8Zr2xW9pL", "wasb://lake@account.host/a?***"),
        ("abfss://me:q8Zr2xW9pL@account.host/part-1", "***"),
        ("tcp://127.0.0.1:29500", "tcp://127.0.0.1:29500"),
        ('{"url": "https://example.com"}', "***"),
    ],
)
def test_of_urls_what_follows_the_host_is_masked(url: str, shown: str) -> None:
    mask = Mask(secret_values({}, {"LOCATION": url}))
    assert mask.text(f"LOCATION={url}.") == f"LOCATION={shown}."


def test_parts_of_a_url_are_masked_where_they_are_printed_alone() -> None:
    """As urllib3 prints a path, and drivers of databases a password."""
    hook = "https://hooks.example.com/services/T0/B0/secret?wait=until-done"
    mask = Mask(secret_values({"DB_SECRET": "postgres://me:q8Zr2xW9pL@db"}, {"WEBHOOK": hook}))
    printed = "(host='hooks.example.com', port=443): url: /services/T0/B0/secret?wait=until-done"
    assert mask.text(printed) == "(host='hooks.example.com', port=443): url: /***?***"
    assert mask.text("password q8Zr2xW9pL") == "password ***"


@pytest.mark.parametrize(
    "value", ["short12", "production", "Disabled", "importlib", str(Path(__file__)), "   x     "]
)
def test_short_values_common_words_and_paths_are_shown(value: str) -> None:
    assert secret_values({"MY_TOKEN": value}, {"OTHER": value}) == ()
    assert secret_values({"MAX_TOKENS": "16777216"}) == ()


def test_passwords_may_be_shorter() -> None:
    env = {
        "DB_PASSWORD": "hunter2",
        "ADMIN_SECRET": "a/b.c1",
        "PASSWORD": "secret",
        "API_KEY": "short1",
    }
    assert secret_values(env) == ("hunter2", "a/b.c1")


def test_all_spellings_of_a_secret() -> None:
    lines = "first line\nand second"
    assert Mask([lines]).text(f"<{lines}>, {lines!r}") == "<***>, '***'"
    assert Mask([SECRET]).text("https://me:hf_q8Zr%2F2xW%2B9pL@host/") == "https://me:***@host/"
    assert Mask(['say "please"']).text(json.dumps(['say "please"'])) == '["***"]'
    assert Mask(["abcdefgh", "abcdefghij"]).data(b"abcdefghijk abcdefgh") == b"***k ***"


def test_events_lose_secrets_and_keep_identifiers() -> None:
    mask = Mask([SECRET, "finishing-1"])
    cause = ev.ErrorReport("KeyError", f"no {SECRET}", notes=(f"see {SECRET}",))
    frames = (ev.Frame(f"<{SECRET}>", 1, "f", f"login('{SECRET}')"),)
    error = ev.ErrorReport("ValueError", f"bad {SECRET}", frames, cause)
    masked = mask.event(ev.RankFailed(1.0, 0, error, "running"))
    assert masked.error.message == "bad ***" and masked.error.frames[0].text == "login('***')"
    assert masked.error.frames[0].file == f"<{SECRET}>"
    assert masked.error.cause == ev.ErrorReport("KeyError", "no ***", notes=("see ***",))
    assert mask.event(ev.RankPhase(1.0, 0, "finishing-1", SECRET)).phase == "finishing-1"
    metrics = ev.Metrics(1.0, 0, (1,), (1.0,), {SECRET: (None,), "loss": (0.5,)})
    assert mask.event(metrics).values == {"***": (None,), "loss": (0.5,)}
    plain = ev.Notice(1.0, "info", "nothing")
    assert mask.event(plain) is plain


def test_chunks_may_split_a_secret_anywhere() -> None:
    secrets = ["abababab", "abababcc-12", "xxabababab", "ünïcode-sécret", SECRET]
    mask, chance = Mask(secrets), random.Random(0)
    for _ in range(300):
        parts = chance.choices([*secrets, "ab", "abababc", "x", "\n", "plain text "], k=8)
        data = "".join(parts).encode()
        cuts = sorted(chance.choices(range(len(data) + 1), k=6))
        stream = MaskedStream(mask)
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        shown = b"".join([*(stream.feed(piece) for piece in pieces), stream.rest()])
        assert shown == mask.data(data)


def test_a_line_that_ends_like_no_secret_is_shown_at_once() -> None:
    stream = MaskedStream(Mask([SECRET]))
    assert stream.feed(b"loss 0.5\r") == b"loss 0.5\r"
    assert stream.feed(b"token: hf_q8") == b"token: "
    assert stream.feed(b"\n") == b"hf_q8\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("--sweep api_key='sk-a','sk b' --track mlflow", "--sweep api_key=*** --track mlflow"),
        ("scr.py --api-key sk-1234 --lr 0.1", "scr.py --api-key *** --lr 0.1"),
        ("--env API_KEY=sk-1234 --apiKey=sk", "--env API_KEY=*** --apiKey=***"),
        ("--sweep tokenizer=bpe,word --keypoints a", "--sweep tokenizer=bpe,word --keypoints a"),
        ("--sweep lr=0.1, -0.2 --push API_KEY", "--sweep lr=0.1, -0.2 --push API_KEY"),
    ],
)
def test_values_with_the_name_of_a_secret_are_left_out_of_a_line(line: str, shown: str) -> None:
    assert masked_line(line) == shown
