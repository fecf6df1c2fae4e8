"""A local server that answers the requests by which huggingface_hub creates repositories and uploads files."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_token_that_nothing_may_show"


@dataclass
class Hub:
    """What the server holds, and how it answers.

    Attributes:
        user: Owner of repositories that are created without one.
        accepted: Token that may write, if there is one.
        commits: Status of the answer to commits.
        created: Repositories, with the body of the request that created each.
        files: Files by repository and path.
        requests: Paths of all requests.
    """

    user: str = "someone"
    accepted: str | None = TOKEN
    commits: int = 200
    created: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    endpoint: str = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON body of the answer to a request with a token that may write."""
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or self.user}/{wanted['name']}"
            self.created.setdefault(name, wanted)
            return 200, {"url": f"{self.endpoint}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {}
        if method == "PUT" and path.startswith("/lfs/"):
            self.objects[path.removeprefix("/lfs/")] = body
            return 200, {}
        if path.endswith("/objects/batch"):
            upload = [
                {**wanted, "actions": {"upload": {"href": f"{self.endpoint}/lfs/{wanted['oid']}"}}}
                for wanted in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": upload}
        if path.endswith("/preupload/main"):
            modes = [
                {"path": file["path"], "shouldIgnore": False, "uploadMode": self._mode(file["path"])}
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": modes}
        if path.endswith("/commit/main"):
            if self.commits != 200:
                return self.commits, {"error": "The hub is on fire"}
            repository = path.removeprefix("/api/models/").removesuffix("/commit/main")
            self._commit(repository, [json.loads(line) for line in body.splitlines()])
            return 200, {"commitUrl": f"{self.endpoint}/{repository}/commit/1", "commitOid": "1"}
        return 404, {"error": f"{method} {path} is not known"}

    def _mode(self, path: str) -> str:
        return "lfs" if path.endswith((".safetensors", ".mp4", ".png")) else "regular"

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        files = self.files.setdefault(repository, {})
        for line in lines:
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.objects[line["value"]["oid"]]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Answer requests on a free port of this machine inside a `with` block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(path)
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b"".join(iter(self._chunk, b""))
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            allowed = path.startswith("/lfs/") or self.headers.get("Authorization") == f"Bearer {hub.accepted}"
            status, answer = hub.answer(self.command, path, body) if allowed else (401, {"error": "Invalid token"})
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _chunk(self) -> bytes:
            size = int(self.rfile.readline(), 16)
            content = self.rfile.read(size)
            self.rfile.readline()
            return content

        do_GET = do_POST = do_PUT = do_HEAD = _respond  # noqa: N815 (http.server's names)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
