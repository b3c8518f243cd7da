"""Checkpoint storage for tests: a block that writes one checkpoint, and object storage in memory
that the original libraries talk to."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from zero_trial.trial.runtime.protocols import CheckpointStore, OpenCheckpoint

BUCKET = "bucket"


@contextmanager
def storing(store: CheckpointStore, metadata: Mapping[str, Any]) -> Iterator[OpenCheckpoint]:
    """Collective. A checkpoint of what the block writes; none where it raises."""
    opened = store.begin(metadata)
    try:
        yield opened
    except BaseException:
        opened.abandon()
        raise
    opened.begin_commit()
    assert opened.committed(wait=True)


class ObjectStorage:
    """As much of S3 as boto3 needs for the harness, at ``section["endpoint_url"]``.

    ``objects``: what was stored, by key. ``asked``: something is to be stored. Nothing is before
    ``open``; where ``refuses``, nothing ever.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked, self.open = threading.Event(), threading.Event()
        self.refuses = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def section(self) -> dict[str, Any]:
        """The ``checkpoint_storage`` of an experiment."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {"type": "s3", "bucket": BUCKET, "access_key": "a", "secret_key": "b", "endpoint_url": url}

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        storage = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                if not self._key().endswith("/VALIDATE.txt"):  # the harness's at its start
                    storage.asked.set()
                    storage.open.wait()
                if storage.refuses:
                    return self._answer(403, b"<Error><Code>AccessDenied</Code><Message>not yours</Message></Error>")
                chunked = "aws-chunked" in (self.headers["Content-Encoding"] or "")
                storage.objects[self._key()] = unchunked(body) if chunked else body
                return self._answer(200)

            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                if not self._key():
                    found = sorted(key for key in storage.objects if key.startswith(query.get("prefix", [""])[0]))
                    rows = [
                        f"<Contents><Key>{key}</Key><Size>{len(storage.objects[key])}</Size></Contents>"
                        for key in found
                    ]
                    truncated = "<IsTruncated>false</IsTruncated>"
                    return self._answer(
                        200, f"<ListBucketResult>{truncated}{''.join(rows)}</ListBucketResult>".encode()
                    )
                content = storage.objects.get(self._key())
                return self._answer(200 if content is not None else 404, content or b"")

            do_HEAD = do_GET

            def do_POST(self) -> None:  # ?delete
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                for key in re.findall(rb"<Key>([^<]+)</Key>", body):
                    storage.objects.pop(key.decode(), None)
                self._answer(200, b"<DeleteResult/>")

            def _key(self) -> str:
                return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").removeprefix("/")

            def _answer(self, code: int, content: bytes = b"") -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", '"0"')
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def unchunked(body: bytes) -> bytes:
    """Return the content of a body in chunks with their lengths, as boto3 sends it."""
    content, place = b"", 0
    while found := re.compile(rb"([0-9a-fA-F]+)[^\r]*\r\n").match(body, place):
        size = int(found[1], 16)
        if not size:
            break
        content += body[found.end() : found.end() + size]
        place = found.end() + size + 2
    return content
