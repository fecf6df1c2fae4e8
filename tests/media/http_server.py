"""A local HTTP server of one folder that counts what it sends, with or without ranges."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Served:
    """What a server does, and what it has done.

    Attributes:
        url (`str`): URL of the folder.
        ranges (`bool`): Whether parts of files are sent.
        delay (`float`): Seconds before each answer.
        sent (`dict`): Bytes sent of each file.
        requests (`list`): Method and file of each request.
    """

    url: str = ""
    ranges: bool = True
    delay: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def serving(folder: Path, *, ranges: bool = True) -> Iterator[Served]:
    """Serve a folder at `127.0.0.1` while a `with` block runs; never the network."""
    served = Served(ranges=ranges)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            name = self.path.lstrip("/").partition("?")[0]
            served.requests.append((self.command, name))
            time.sleep(served.delay)
            path = folder / name
            if not path.is_file():
                self.send_error(404)
                return
            data = path.read_bytes()
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if served.ranges else None
            start, end = (int(part[1]), min(int(part[2]) + 1, len(data))) if part else (0, len(data))
            self.send_response(206 if part else 200)
            self.send_header("Content-Length", str(end - start))
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
            if part:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
            self.end_headers()
            if body:
                served.sent[name] = served.sent.get(name, 0) + end - start
                self.wfile.write(data[start:end])

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Print nothing about clients that have read enough."""

    server = Server(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
