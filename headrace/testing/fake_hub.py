"""A Hugging Face hub on loopback: the endpoints a download needs, over files in memory."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Mapping
from typing import Any, Self

COMMIT = "c" * 40


class FakeHub(http.server.ThreadingHTTPServer):
    """A hub with one repository, org/name, in a thread of its own; use it in a `with` block.

    `status` other than 200 makes it refuse everything; `requests` keeps (method, path, authorization).
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.files = dict(files)
        self.stated_digests: dict[str, str] = {}
        self.status = 200
        self.error_code = ""
        self.requests: list[tuple[str, str, str | None]] = []

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _HubHandler(http.server.BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub = self.server
        hub.requests.append((self.command, self.path, self.headers.get("Authorization")))
        path = self.path.split("?")[0]
        if hub.status != 200:
            self._answer(hub.status, b'{"error": "no"}', {"X-Error-Code": hub.error_code})
        elif path.startswith("/api/models/org/name/tree/"):
            self._answer(200, json.dumps([self._entry(name) for name in hub.files]).encode())
        elif path.startswith("/api/models/org/name"):
            siblings = [
                {"rfilename": name, "size": len(data), "blobId": "0", **self._lfs(name)}
                for name, data in hub.files.items()
            ]
            info = {"id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": siblings}
            self._answer(200, json.dumps(info).encode())
        else:
            name = path.split("/", 5)[-1]
            data = hub.files[name]
            etag = hashlib.sha256(data).hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "none"}
            self._answer(200, data, headers)

    do_HEAD = do_GET

    def _entry(self, name: str) -> dict[str, Any]:
        size = len(self.server.files[name])
        return {"type": "file", "path": name, "size": size, "oid": "0" * 40}

    def _lfs(self, name: str) -> dict[str, Any]:
        digest = self.server.stated_digests.get(name)
        return {"lfs": {"sha256": digest, "size": 1, "pointerSize": 1}} if digest else {}

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
