# SPDX-License-Identifier: Apache-2.0
"""A loopback server that answers the real W&B client, and remembers what it was told.

    with WandbStub() as stub:
        subprocess.run(..., env={**os.environ, **stub.env})
        assert [row["train/step"] for row in stub.history("a-run")] == [1, 2, 3]

It knows the calls that client 0.31 makes for what we use: a run that begins, resumes and ends, its
history, files, artifacts and alerts, and a report that is saved. It answers them as the author of
this file believes the real server does; a call that it does not know is refused and listed in
`unknown`.

`mood` is how it treats every request from now on: "answer"; "refuse", HTTP 500; "hang", it takes
the request and never answers. `dies_after` rows of history it stops listening for good.
"""

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "stub-team"
STAMP = "2026-11-30T10:00:00"


class WandbStub:
    """Context manager; serves on a port of its own until the end of the `with`.

    Attributes:
        runs: facts of `UpsertBucket` by run id: `config`, `project`, `upserts`.
        alerts: title, text and severity of every alert, in order.
        artifacts: by id: `name`, `type`, `metadata`, `committed`.
        uploads: bytes of every uploaded file by path.
        projects: names of those that were made without a run.
        reports: variables of every report that was saved, its `spec` read.
        calls: name of every GraphQL operation and path of everything else, in order.
        unknown: calls it had no answer for.
    """

    def __init__(self) -> None:
        self.mood = "answer"
        self.dies_after: int | None = None
        self.runs: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, list[str]]] = {}
        self.ended: dict[str, int] = {}
        self.alerts: list[dict[str, str]] = []
        self.artifacts: dict[str, dict[str, Any]] = {}
        self.uploads: dict[str, bytes] = {}
        self.projects: list[str] = []
        self.reports: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.unknown: list[str] = []
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def env(self) -> dict[str, str]:
        """The variables with which a client logs in here, and nowhere else."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": "0123456789" * 4,
            "WANDB_MODE": "online",
            "WANDB_ERROR_REPORTING": "false",
        }

    def __enter__(self) -> "WandbStub":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.die()

    def die(self) -> None:
        """Stops listening and drops everybody who waits for an answer."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def history(self, run: str) -> list[dict[str, Any]]:
        """Gives a run's history in the order in which the server holds it."""
        lines = self.files.get(run, {}).get("wandb-history.jsonl", [])
        return [json.loads(line) for line in lines]

    def config(self, run: str) -> dict[str, Any]:
        """Gives a run's config without the client's own entry."""
        config = self.runs[run]["config"]
        return {name: entry["value"] for name, entry in config.items() if name != "_wandb"}

    def manifest(self, artifact: str) -> dict[str, Any]:
        """Gives the contents of an artifact by path: `ref`, `digest`, `size`."""
        return json.loads(self.uploads[f"manifests/{artifact}"])["contents"]

    # GraphQL operations: each gives the value of `data`

    def op_Viewer(self, _: dict[str, Any]) -> Any:
        viewer = {
            "id": "user-1",
            "entity": ENTITY,
            "username": "someone",
            "email": "",
            "flags": "{}",
        }
        return {"viewer": {**viewer, "teams": {"edges": []}}}

    def op_ServerFeaturesQuery(self, _: dict[str, Any]) -> Any:
        return {"serverInfo": {"features": []}}

    def op_OrganizationCoreWeaveOrganizationID(self, _: dict[str, Any]) -> Any:
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    def op_RunResumeStatus(self, asked: dict[str, Any]) -> Any:
        name = asked["name"]
        run, files = self.runs.get(name), self.files.get(name, {})
        bucket = run and {
            "id": f"bucket-{name}",
            "name": name,
            "displayName": name,
            "config": json.dumps(run["config"]),
            "summaryMetrics": (files.get("wandb-summary.json") or ["{}"])[-1],
            "historyLineCount": len(files.get("wandb-history.jsonl", [])),
            "historyTail": json.dumps(files.get("wandb-history.jsonl", [])[-1:]),
            "eventsLineCount": len(files.get("wandb-events.jsonl", [])),
            "eventsTail": json.dumps(files.get("wandb-events.jsonl", [])[-1:]),
            "logLineCount": len(files.get("output.log", [])),
            "tags": [],
            "wandbConfig": json.dumps({"t": 1}),
        }
        entity = {"id": "entity-1", "name": ENTITY}
        return {"model": {"id": "p", "name": asked["project"], "entity": entity, "bucket": bucket}}

    def op_UpsertBucket(self, asked: dict[str, Any]) -> Any:
        name = asked["name"]
        is_new = name not in self.runs
        run = self.runs.setdefault(name, {"config": {}, "upserts": 0, "project": asked["project"]})
        run["upserts"] += 1
        if asked.get("config"):
            run["config"] = json.loads(asked["config"])
        project = {"id": "p", "name": run["project"], "entity": {"id": "entity-1", "name": ENTITY}}
        bucket = {
            "id": f"bucket-{name}",
            "name": name,
            "displayName": asked.get("displayName") or name,
            "description": "",
            "config": json.dumps(run["config"]),
            "sweepName": None,
            "historyLineCount": len(self.history(name)),
            "project": project,
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}

    def op_CreateRunFiles(self, asked: dict[str, Any]) -> Any:
        run = asked["run"]
        files = [{"name": n, "uploadUrl": self._upload(f"runs/{run}/{n}")} for n in asked["files"]]
        made = {"runID": f"bucket-{run}", "uploadHeaders": [], "files": files}
        return {"createRunFiles": made}

    def op_NotifyScriptableRunAlert(self, asked: dict[str, Any]) -> Any:
        self.alerts.append({name: asked[name] for name in ("title", "text", "severity")})
        return {"notifyScriptableRunAlert": {"success": True}}

    def op_ArtifactType(self, asked: dict[str, Any]) -> Any:
        name = str(asked.get("name")).partition(":")[0]
        kinds = [known["type"] for known in self.artifacts.values() if known["name"] == name]
        return {"project": {"artifact": {"artifactType": {"name": kinds[0]}} if kinds else None}}

    def op_CreateArtifact(self, asked: dict[str, Any]) -> Any:
        asked = asked.get("input", asked)
        number = f"artifact-{len(self.artifacts)}"
        collections = asked.get("artifactCollectionNames") or [asked.get("artifactCollectionName")]
        self.artifacts[number] = {
            "name": collections[0],
            "type": asked["artifactTypeName"],
            "metadata": json.loads(asked.get("metadata") or "{}"),
            "committed": False,
        }
        sequence = {"id": "sequence-1", "latestArtifact": None}
        artifact = {"id": number, "state": "PENDING", "artifactSequence": sequence}
        return {"createArtifact": {"artifact": artifact}}

    def op_CreateArtifactManifest(self, asked: dict[str, Any]) -> Any:
        file = {"id": "file-1", "name": asked["name"], "displayName": asked["name"]}
        file["uploadUrl"] = self._upload(f"manifests/{asked['artifactID']}")
        manifest = {"id": f"manifest-{asked['artifactID']}", "file": {**file, "uploadHeaders": []}}
        return {"createArtifactManifest": {"artifactManifest": manifest}}

    def op_UpdateArtifactManifest(self, asked: dict[str, Any]) -> Any:
        number = str(asked["artifactManifestID"])
        file = {"id": "file-1", "name": "wandb_manifest.json", "displayName": "wandb_manifest.json"}
        file["uploadUrl"] = self._upload(f"manifests/{number.removeprefix('manifest-')}")
        manifest = {"id": number, "file": {**file, "uploadHeaders": []}}
        return {"updateArtifactManifest": {"artifactManifest": manifest}}

    def op_CreateArtifactFiles(self, asked: dict[str, Any]) -> Any:
        edges = []
        for file in asked.get("artifactFiles") or asked["input"]["artifactFiles"]:
            node = {"id": "file-2", "name": file["name"], "displayName": file["name"]}
            node["uploadUrl"] = self._upload(f"artifacts/{file['artifactID']}/{file['name']}")
            node |= {"uploadHeaders": [], "storagePath": None, "uploadMultipartUrls": None}
            edges.append({"node": {**node, "artifact": {"id": file["artifactID"]}}})
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def op_CommitArtifact(self, asked: dict[str, Any]) -> Any:
        self.artifacts[asked["artifactID"]]["committed"] = True
        return {"commitArtifact": {"artifact": {"id": asked["artifactID"], "digest": "digest"}}}

    # What `wandb.Api` and wandb-workspaces ask in order to save a report

    def op_GetDefaultEntity(self, _: dict[str, Any]) -> Any:
        return {"viewer": {"id": "user-1", "entity": ENTITY}}

    def op_GetProjects(self, asked: dict[str, Any]) -> Any:
        names = dict.fromkeys([*(run["project"] for run in self.runs.values()), *self.projects])
        edges = [{"node": self._project(name, asked.get("entity"))} for name in names]
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        return {"models": {"pageInfo": page, "edges": edges}}

    def op_CreateProject(self, asked: dict[str, Any]) -> Any:
        asked = asked["input"]
        self.projects.append(asked["name"])
        project = self._project(asked["name"], asked.get("entityName"))
        return {"result": {"project": project, "model": project, "inserted": True}}

    def op_upsertView(self, asked: dict[str, Any]) -> Any:
        self.reports.append({**asked, "spec": json.loads(asked["spec"])})
        project = {"id": "p", "name": asked["projectName"], "entityName": asked["entityName"]}
        names = ("type", "name", "displayName", "description", "spec")
        view = {name: asked[name] for name in names}
        view |= {"id": f"view-{len(self.reports)}", "project": project, "updatedAt": STAMP}
        return {"upsertView": {"view": view, "inserted": True}}

    def _project(self, name: str, entity: str | None) -> dict[str, Any]:
        names = {"__typename": "Project", "id": "p", "name": name, "entityName": entity or ENTITY}
        return {**names, "createdAt": STAMP, "isBenchmark": False, "user": None}

    def _upload(self, path: str) -> str:
        return f"{self.url}/upload/{path}"

    # What the request handler calls, one request at a time

    def answer(self, path: str, body: bytes) -> Any:
        """Gives the JSON answer to a request."""
        if path.endswith("/graphql"):
            return self._graphql(json.loads(body))
        if stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path):
            self.calls.append("file_stream")
            return self._stream(stream[1], json.loads(body or b"{}"))
        self.calls.append(path)
        if path.startswith("/upload/"):
            self.uploads[path.removeprefix("/upload/")] = body
        else:
            self.unknown.append(path)
        return {}

    def _graphql(self, request: dict[str, Any]) -> Any:
        found = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
        name = request.get("operationName") or (found and found[1]) or "?"
        self.calls.append(name)
        operation = getattr(self, f"op_{name}", None)
        if operation is None:
            self.unknown.append(name)
            return {"data": {}, "errors": [{"message": f"the stub knows no {name}"}]}
        return {"data": operation(request.get("variables") or {})}

    def _stream(self, run: str, told: dict[str, Any]) -> Any:
        files = self.files.setdefault(run, {})
        for name, chunk in (told.get("files") or {}).items():
            offset = 0 if name == "wandb-summary.json" else chunk.get("offset", 0)
            lines = files.setdefault(name, [])
            lines[offset:] = chunk["content"]
        if told.get("complete"):
            self.ended[run] = told.get("exitcode", 0)
        return {"exitcode": None, "limits": {}}

    def is_due_to_die(self) -> bool:
        rows = sum(len(files.get("wandb-history.jsonl", [])) for files in self.files.values())
        return self.dies_after is not None and rows >= self.dies_after


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, stub: WandbStub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stub = stub

    def handle_error(self, *_: object) -> None:
        """A client that was killed is no error of the server."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_request(self) -> None:
        stub = self.server.stub
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if stub.mood == "hang" and not stub.closing.is_set():
            stub.calls.append("hung")
            stub.closing.wait()
        if stub.closing.is_set():
            self.close_connection = True
            return
        with stub.lock:
            if stub.mood == "refuse":
                stub.calls.append("refused")
                status, answer = 500, {"error": "the stub refuses"}
            else:
                status, answer = 200, stub.answer(self.path, body)
            dies = stub.is_due_to_die()
        if dies:
            stub.die()
            self.close_connection = True
            return
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = handle_request

    def log_message(self, *_: object) -> None:
        """Says nothing on the console."""
