"""Masking of secrets in all text that ranks produce.

An agent knows its ranks' environment and masks their output and events before it writes or sends
them. The kernel knows its own environment and masks every event again before it stores it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

T = TypeVar("T")

MASK = "***"
_SHORTEST = 8
"""Characters. Shorter values occur in ordinary text and are too weak as secrets."""
_SHORTEST_PASSWORD = 6
"""The same for passwords, unless they consist of letters only, as words do."""
_SECRET_NAME = re.compile("SECRET|TOKEN|PASSWORD|KEY", re.IGNORECASE)
_PASSWORD_NAME = re.compile("SECRET|PASSWORD", re.IGNORECASE)
_COUNT_NAME = re.compile("(TOKEN|KEY)S", re.IGNORECASE)
"""``MAX_TOKENS=16777216`` is a number of tokens."""
_NO_SECRET_NAME = re.compile("TOKENI[SZ]|KEY(WORD|POINT|FRAME|BOARD)|MONKEY", re.IGNORECASE)
"""Words of machine learning in names of the notebook, such as ``tokenizer``."""
_ACCELERATOR_SETTINGS = ("CUBLAS_", "CUDA", "GLOO_", "NCCL_")
_SETTINGS = (*_ACCELERATOR_SETTINGS, "MKL_", "OMP_", "PYTHON", "PYTORCH_", "TF_", "TORCH")
"""Prefixes of variables that configure libraries."""
_URL = re.compile(r"[\w+.-]+:\S*//\S*")
_FILE_SYSTEMS = ("abfs", "adl", "dbfs", "file", "gcs", "gs", "hdfs", "s3", "viewfs", "wasb")
"""Beginnings of the schemes of URLs that locate data, as paths do: ``s3a`` is one of S3. The path of another
URL may be a secret, as that of a webhook is."""
_CONTAINER = re.compile(r"(?:abfs|wasb)s?://[^:@/]+@[^@]*")
"""Azure's URLs have the name of a container in the place of a user."""
_ASSIGNED = re.compile(r"((?P<name>[A-Za-z_][\w-]*)=).+?(?=\s+--?[A-Za-z]|$)")
"""A name and its value, up to the next option, in a line of options."""
_OPTION = re.compile(r"((?<!\S)--(?P<name>[A-Za-z][\w-]*)\s+)(?!-)\S+")
_WORDS = """
    anonymous automatic available changeme checkpoint collectives complete completed configured
    connection continue database debugging development directory disabled distributed enabled
    environment evaluation examples execution experiment filesystem finished finishing function
    gradient hydrogen_magic iteration languages learning localhost location loopback manifest
    multiple notebook notebooks optional optimizer parallel parameter parameters password
    passwords pipeline platform prediction preprocess production profiler protected provided
    recording reference registry required resource resources running sampling secretkey sequence
    services standard starting succeeded template tensorflow terminal testtest training transformer
    transformers undefined username validation variable verbose version workspace
"""
"""Common words of programs and their settings: masking them would damage ordinary text."""
_COMMON = frozenset((*_WORDS.split(), *sys.stdlib_module_names))
_IDENTIFIERS = """
    at_s cells device file gang gpus host level owner path phase placement process_state rendezvous
    signal_name state stream track type unit
"""
"""Fields of events with identifiers, which code compares, instead of free text."""
_EXACT = frozenset(_IDENTIFIERS.split())
_NUMBERS = frozenset({bool, int, float, type(None)})
"""Types of most fields: ranks send thousands of events a second."""


def secret_values(
    env: Mapping[str, str],
    given: Mapping[str, str] | None = None,
    settings: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Return the values of ``env`` whose names mark them as secret, and those of ``given``.

    ``given``: variables that the user set with ``--env``. Left out are values of fewer than 8
    characters (6 for passwords that are not words), common words, and paths that exist; of ``given`` also
    numbers, locations, and settings of libraries, of which ``settings`` has more prefixes. Locations are
    paths and URLs without a user; but what follows the host is a secret by itself, in all URLs except those
    of file systems.
    """
    given = given or {}
    found = [value for name, value in env.items() if _is_secret(name, value)]
    found += [value for name, value in given.items() if _is_private(name, value, settings)]
    found += [part for value in (*found, *given.values()) for part in _parts_of_url(value)]
    return tuple(dict.fromkeys(value.strip() for value in found))


def is_secret_name(name: str) -> bool:
    """Return whether the text of a variable or an option of this name is a secret."""
    return _SECRET_NAME.search(_NO_SECRET_NAME.sub("", name)) is not None


def is_secret(name: str, value: Any) -> bool:
    """Return whether a variable holds a secret: ``key_size=64`` does not, nor ``use_token=True``."""
    is_figure = isinstance(value, bool) or (
        isinstance(value, (int, float)) and not name.lower().endswith(("token", "key"))
    )
    return is_secret_name(name) and (not is_figure or _PASSWORD_NAME.search(name) is not None)


def masked_line(line: str) -> str:
    """Return a line of options without the values of those with a secret's name.

    ``--sweep api_key='a','b'`` has them after an equals sign, ``--api-key a`` after a space.
    """
    for named_value in (_ASSIGNED, _OPTION):
        line = named_value.sub(
            lambda found: f"{found[1]}{MASK}" if is_secret_name(found["name"]) else found[0], line
        )
    return line


def holds(data: bytes | bytearray | memoryview, secret: str) -> bool:
    """Whether ``data``, a pickle, holds the text ``secret``."""
    return re.search(re.escape(_encoded(secret)), data) is not None


def _is_secret(name: str, value: str) -> bool:
    if _SECRET_NAME.search(name) is None:
        return False
    is_count = _COUNT_NAME.search(name) is not None and value.strip().isdigit()
    is_password = _PASSWORD_NAME.search(name) is not None and not value.strip().isalpha()
    return not is_count and not _is_ordinary(
        value, _SHORTEST_PASSWORD if is_password else _SHORTEST
    )


def _is_private(name: str, value: str, settings: tuple[str, ...]) -> bool:
    if _SECRET_NAME.search(name):
        return _is_secret(name, value)
    is_path = value.startswith(("/", "./", "../", "~", "dbfs:/"))
    url = value.strip()
    has_user = "@" in url and _CONTAINER.fullmatch(url) is None
    is_location = is_path or (_URL.fullmatch(url) is not None and not has_user)
    is_setting = name.startswith((*_SETTINGS, *settings)) or is_location or _is_number(value)
    return not is_setting and not _is_ordinary(value)


def _parts_of_url(value: str) -> list[str]:
    """Return the secrets in a URL, which libraries print without the rest, too; none of other values."""
    if not _URL.fullmatch(value.strip()):
        return []
    try:
        url = urlsplit(value.strip())
    except ValueError:  # a bad host
        return [value]
    path = "" if url.scheme.startswith(_FILE_SYSTEMS) else url.path.strip("/")
    parts = (url.password or "", path, url.query, url.fragment)
    return [part for part in parts if not _is_ordinary(part)]


def _is_ordinary(value: str, shortest: int = _SHORTEST) -> bool:
    text = value.strip()
    return len(text) < shortest or text.lower() in _COMMON or os.path.exists(text)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _spellings(secret: str) -> set[str]:
    """Return the forms in which a secret is printed: as it is, by ``repr``, in a URL, and in JSON."""
    quoted = [quote(secret, safe, errors="replace") for safe in ("", "/")]
    dumped = [json.dumps(secret, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)]
    return {secret, repr(secret)[1:-1], *quoted, *dumped}


class Mask:
    """Replaces secrets by ``***``."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        spelled = {form for secret in secrets for form in _spellings(secret)}
        longest_first = sorted(spelled, key=lambda form: (-len(form), form))
        self._texts = tuple(longest_first)
        self._bytes = tuple(map(_encoded, longest_first))
        self._in_text = re.compile("|".join(map(re.escape, self._texts)))
        self._in_bytes = re.compile(b"|".join(map(re.escape, self._bytes)))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to mask."""
        return not self._texts

    def text(self, text: str) -> str:
        """Return ``text`` without secrets."""
        # `in` searches many times faster than an alternation, and secrets are rare.
        if not any(form in text for form in self._texts):
            return text
        return self._in_text.sub(MASK, text)

    def data(self, data: bytes) -> bytes:
        """Return ``data`` without secrets."""
        if not any(form in data for form in self._bytes):
            return data
        return self._in_bytes.sub(MASK.encode(), data)

    def event(self, event: T) -> T:
        """Return an event with masked texts."""
        return event if self.is_empty else self._masked(event)

    def open_end(self, data: bytes) -> int:
        """Return the offset of a trailing part of ``data`` that may begin a secret."""
        start = min((_begun(data, form) for form in self._bytes), default=len(data))
        for found in self._in_bytes.finditer(data) if start < len(data) else ():
            if found.start() < start < found.end():
                return found.start()
        return start

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, tuple):
            # Columns have one type: thousands of numbers need no search.
            is_text = bool(value) and (isinstance(value[0], str) or is_dataclass(value[0]))
            return tuple(map(self._masked, value)) if is_text else value
        if isinstance(value, Mapping):
            return {self._masked(name): self._masked(item) for name, item in value.items()}
        return self._masked_fields(value) if is_dataclass(value) else value

    def _masked_fields(self, value: Any) -> Any:
        # Not by vars(): that makes a dict, which the event would keep.
        every = {name: getattr(value, name) for name in value.__dataclass_fields__}
        old = {
            name: item
            for name, item in every.items()
            if type(item) not in _NUMBERS and name not in _EXACT
        }
        new = {name: self._masked(item) for name, item in old.items()}
        changed = {name: item for name, item in new.items() if item != old[name]}
        return replace(value, **changed) if changed else value


class MaskedStream:
    """Masks one stream; a secret may be split between chunks."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the text that is safe to show; the beginning of a possible secret is held back."""
        if self._mask.is_empty:
            return data
        data = self._held + data
        end = self._mask.open_end(data)
        self._held = data[end:]
        return self._mask.data(data[:end])

    def rest(self) -> bytes:
        """Return the text that was held back, at the end of the stream."""
        held, self._held = self._held, b""
        return self._mask.data(held)


def masked_file(fd: int, mask: Mask) -> int:
    """Return the descriptor of a file with the contents of ``fd``, masked; ``fd`` is closed if it differs."""
    if mask.is_empty:
        return fd
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        data = file.read()
    masked = mask.data(data)
    if masked is data:
        return fd
    os.close(fd)
    with tempfile.TemporaryFile() as target:
        target.write(masked)
        target.flush()
        return os.dup(target.fileno())


def _begun(data: bytes, secret: bytes) -> int:
    """Return the offset where a prefix of ``secret`` ends ``data``; the length of ``data`` without one."""
    start = max(0, len(data) - len(secret) + 1)
    while (start := data.find(secret[:1], start)) >= 0:
        if secret.startswith(data[start:]):
            return start
        start += 1
    return len(data)
