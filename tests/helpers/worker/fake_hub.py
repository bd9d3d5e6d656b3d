"""A local stand-in for the Hugging Face hub: repositories of files, each with one commit."""

import base64
import hashlib
import json
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from helpers.network.local_server import LocalServer, QuietHandler
from huggingface_hub import constants

WRITE_TOKEN = "hf_" + "w" * 30  # may create repositories
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def open_writable_hub(monkeypatch, folder: Path) -> "FakeHub":
    """Return a hub to which this process may push; its caches and tokens lie in `folder`."""
    hub = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    return hub


class FakeHub:
    """Serve repositories over HTTP, as far as `huggingface_hub` and `datasets` ask.

    Attributes:
        uploads: Contents of large files by SHA-256, before a commit names them.
        repositories: Maps "datasets/owner/name" and "models/owner/name" to files by path.
        requests: Method, path and headers of each request, in order.
        failures: Statuses with which the next downloads fail, in order; 0 cuts the connection.
    """

    def __init__(self):
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.uploads: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict]] = []
        self.failures: list[int] = []
        hub = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_POST = do_PUT = do_GET

        self._server = LocalServer(Handler)
        self.url = self._server.url

    def close(self) -> None:
        self._server.close()

    def answer(self, request: QuietHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append((request.command, request.path, dict(request.headers)))
        parts = [unquote(part) for part in urlsplit(request.path).path.strip("/").split("/")]
        if parts == ["api", "validate-yaml"]:
            self._send_json(request, {"errors": [], "warnings": []})
            return
        if parts[:3] == ["api", "repos", "create"]:
            self._create_repository(request, json.loads(body))
            return
        if request.command == "PUT" and parts[0] == "uploads":
            self.uploads[parts[1]] = body
            self._send(request, 200, b"", {})
            return
        if parts[-3:] == ["lfs", "objects", "batch"]:
            self._answer_batch(request, json.loads(body))
            return
        if parts[0] == "api":
            self._answer_api(request, parts[1], "/".join(parts[2:4]), parts[4:], body)
            return
        kind = "datasets" if parts[0] == "datasets" else "models"
        if kind == "datasets":
            parts = parts[1:]
        files = self.repositories.get(f"{kind}/{'/'.join(parts[:2])}")
        name = "/".join(parts[4:])
        if files is None:
            self._refuse(request, "RepoNotFound")
        elif len(parts) < 5 or parts[2] != "resolve" or name not in files:
            self._refuse(request, "EntryNotFound")
        elif self.failures and request.command == "GET":
            self._send(request, self.failures.pop(0), b"", {})
        else:
            self._send_file(request, files[name])

    def _answer_api(self, request, kind: str, repository: str, rest: list[str], body: bytes):
        files = self.repositories.get(f"{kind}/{repository}")
        if files is None:
            self._refuse(request, "RepoNotFound")
        elif not rest or rest[0] == "revision":
            self._send_json(request, self._describe(repository, files))
        elif rest[0] == "preupload":
            self._choose_uploads(request, json.loads(body))
        elif rest[0] == "commit":
            self._commit(request, repository, files, body.decode())
        elif rest[0] == "tree":
            folder = "/".join(rest[2:])
            query = parse_qs(urlsplit(request.path).query)
            deep = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            self._send_json(request, self._list_tree(files, folder, deep))
        elif rest[0] == "paths-info":
            sent = parse_qs(body.decode()) if b"=" in body else json.loads(body or b"{}")
            wanted = sent.get("paths", [])
            wanted = [wanted] if isinstance(wanted, str) else wanted
            tree = {entry["path"]: entry for entry in self._list_tree(files, "", True)}
            self._send_json(request, [tree[path] for path in wanted if path in tree])
        else:
            self._refuse(request, "EntryNotFound")

    def _create_repository(self, request, sent: dict) -> None:
        if request.headers.get("Authorization") != f"Bearer {WRITE_TOKEN}":
            self._send(request, 401, b'{"error": "Invalid username or password."}', {})
            return
        name = f"models/{sent.get('organization') or 'owner'}/{sent['name']}"
        is_new = name not in self.repositories
        self.repositories.setdefault(name, {})
        url = {"url": f"{self.url}/{name.removeprefix('models/')}"}
        data = json.dumps(url).encode()
        self._send(request, 200 if is_new else 409, data, {"Content-Type": "application/json"})

    def _choose_uploads(self, request, sent: dict) -> None:
        """Let files of weights be uploaded as large ones, the others within the commit."""
        chosen = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in sent["files"]
        ]
        self._send_json(request, {"files": chosen})

    def _answer_batch(self, request, sent: dict) -> None:
        objects = [
            {**item, "actions": {"upload": {"href": f"{self.url}/uploads/{item['oid']}"}}}
            for item in sent["objects"]
        ]
        data = json.dumps({"transfer": "basic", "objects": objects}).encode()
        self._send(request, 200, data, {"Content-Type": "application/vnd.git-lfs+json"})

    def _commit(self, request, repository: str, files: dict[str, bytes], body: str) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.uploads[value["oid"]]
        address = f"{self.url}/{repository}/commit/{COMMIT}"
        self._send_json(request, {"success": True, "commitOid": COMMIT, "commitUrl": address})

    def _describe(self, repository: str, files: dict[str, bytes]) -> dict:
        return {
            "id": repository,
            "sha": COMMIT,
            "private": False,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "lastModified": "2026-01-01T00:00:00.000Z",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": name} for name in files],
        }

    def _list_tree(self, files: dict[str, bytes], folder: str, deep: bool) -> list[dict]:
        entries: dict[str, dict] = {}
        prefix = f"{folder}/" if folder else ""
        for name, content in files.items():
            if not name.startswith(prefix):
                continue
            below = name.removeprefix(prefix).split("/")
            for depth in range(1, len(below) if deep else min(2, len(below))):
                path = prefix + "/".join(below[:depth])
                entries[path] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}
            if deep or len(below) == 1:
                oid = hashlib.sha1(content).hexdigest()
                entries[name] = {"type": "file", "oid": oid, "size": len(content), "path": name}
        return list(entries.values())

    def _send_file(self, request, content: bytes) -> None:
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        wanted = request.headers.get("Range", "")
        if wanted.startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            self._send(request, 206, content[begin:end], headers)
        else:
            self._send(request, 200, content, headers)

    def _send_json(self, request, value) -> None:
        self._send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, request, code: str) -> None:
        self._send(request, 404, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, request, status: int, body: bytes, headers: dict) -> None:
        if not status:
            request.close_connection = True
            return
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
