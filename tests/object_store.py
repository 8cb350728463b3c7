"""A store of objects with S3's interface, as much of it as readers use, in a thread of this process."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "lake"


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the files of a folder as the objects of :data:`BUCKET`; give the endpoint's URL."""
    objects = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }

    class Handler(_Handler):
        served = objects

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: dict[str, bytes]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if "AWS4-HMAC-SHA256 Credential=of-the-user/" not in self.headers.get("Authorization", ""):
            self._answer(403, b"")
        elif bucket != BUCKET:
            self._answer(404, b"")
        elif not key and url.query:
            self._list({name: values[0] for name, values in parse_qs(url.query).items()})
        elif not key:
            self._answer(200, b"")
        elif key in self.served:
            self._send(self.served[key])
        else:
            self._answer(404, b"")

    do_HEAD = do_GET  # noqa: N815 - a name of the base class

    def _list(self, wanted: dict[str, str]) -> None:
        prefix, delimiter = wanted.get("prefix", ""), wanted.get("delimiter", "")
        below = sorted(key for key in self.served if key.startswith(prefix))
        ends = {key: key.find(delimiter, len(prefix)) if delimiter else -1 for key in below}
        files = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.served[key])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in below
            if ends[key] < 0
        ]
        folders = sorted({key[: end + 1] for key, end in ends.items() if end >= 0})
        common = [f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders]
        count = f"<KeyCount>{len(files) + len(common)}</KeyCount><IsTruncated>false</IsTruncated>"
        body = f"<ListBucketResult>{count}{''.join(files + common)}</ListBucketResult>"
        self._answer(200, body.encode())

    def _send(self, data: bytes) -> None:
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            self._answer(200, data)
            return
        first = int(part[1])
        last = min(int(part[2] or len(data) - 1), len(data) - 1)
        self._answer(206, data[first : last + 1], f"bytes {first}-{last}/{len(data)}")

    def _answer(self, status: int, body: bytes, part: str = "") -> None:
        self.send_response(status)
        if part:
            self.send_header("Content-Range", part)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""
