"""A small model hub on the loopback: the routes that `huggingface_hub` asks when a model is loaded by name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Hub:
    """Repositories are folders `root/<org>/<name>/<revision>/<files>`; those named `private` want the token.

    Args:
        root (`Path`):
            Where the repositories are.
        token (`str`):
            What private repositories want.
    """

    def __init__(self, root: Path, token: str):
        self.root = root
        self.token = token
        self.requests: list[tuple[str, str]] = []

    def answer(self, path: str, authorization: str | None) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body of a GET; a HEAD has the same without the body."""
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        repo = self.root / "/".join(parts[:2])
        if not repo.is_dir():
            return 404, {"X-Error-Code": "RepoNotFound"}, b"no such repository"
        if repo.name.startswith("private") and authorization != f"Bearer {self.token}":
            return 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "a token with access is needed"}, b"no access"
        revision = parts[3] if len(parts) > 3 else "main"
        commits = {hashlib.sha1(str(folder).encode()).hexdigest(): folder for folder in repo.iterdir()}
        found = [(commit, folder) for commit, folder in commits.items() if revision in (commit, folder.name)]
        if not found:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"no such revision"
        commit, folder = found[0]
        if api:
            return self._describe(parts, folder, commit)
        file = folder.joinpath(*parts[4:])
        if parts[2] != "resolve" or not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"no such file"
        content = file.read_bytes()
        return 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}, content

    def _describe(self, parts: list[str], folder: Path, commit: str) -> tuple[int, dict[str, str], bytes]:
        files = sorted(path.name for path in folder.iterdir())
        if len(parts) > 2 and parts[2] == "tree":
            entries = [{"type": "file", "path": name, "size": 1, "oid": commit} for name in files]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        if len(parts) > 2 and parts[2] != "revision":
            return 404, {"X-Error-Code": "EntryNotFound"}, b"[]"
        repo_id = "/".join(parts[:2])
        siblings = [{"rfilename": name} for name in files]
        info = {"_id": commit, "id": repo_id, "modelId": repo_id, "sha": commit, "private": False, "tags": []}
        info.update({"downloads": 0, "likes": 0, "siblings": siblings})
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()


@contextlib.contextmanager
def serve(hub: Hub) -> Iterator[str]:
    """Runs a hub in a thread and yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path = self.path.split("?")[0]
            hub.requests.append((self.command, path))
            status, headers, body = hub.answer(path, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
