"""The state of the emulated service: collections, tokens, tasks, planned refusals. Kept on disk over a restart."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

TRANSFER = "transfer.api.globus.org"
GUEST, MAPPED = "GCSv5_guest_collection", "GCSv5_mapped_collection"
PERSONAL = "GCP_mapped_collection"
ACTIVE, INACTIVE, SUCCEEDED, FAILED = "ACTIVE", "INACTIVE", "SUCCEEDED", "FAILED"


class ApiError(Exception):
    """An answer other than 2xx. :param facts: further members of the document."""

    def __init__(self, status: int, code: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.document = {"code": code, "message": message, "request_id": "emulated", **facts}


@dataclass(frozen=True)
class Collection:
    """A directory that the service can reach, and what is wrong with it.

    :param root: the directory. :param kind: GUEST, MAPPED (asks for a data_access consent) or another entity type.
    :param owner: uid and gid that written files get; None: those of the emulator.
    :param https: the collection has its HTTPS side.
    :param setup_key: of a personal endpoint; :param made_by: its owner.
    :param offline: nobody answers there. :param paused: an administrator has paused its tasks.
    :param denied: paths (and what is below them) that may be neither read nor written.
    :param quota_bytes: most bytes of all files written. :param rate_bytes_s: of each file.
    :param resets: so many files break off once. :param corruptions: so many files arrive damaged once.
    """

    id: str
    root: str
    name: str
    kind: str = GUEST
    high_assurance: bool = False
    owner: tuple[int, int] | None = None
    https: bool = True
    offline: bool = False
    setup_key: str = ""
    made_by: str = ""
    paused: bool = False
    denied: tuple[str, ...] = ()
    quota_bytes: int | None = None
    rate_bytes_s: float | None = None
    resets: int = 0
    corruptions: int = 0

    def place(self, path: str) -> Path:
        """The file behind a path of the collection.

        :raises ApiError: the path leads out of it.
        """
        root = Path(self.root)
        found = Path(os.path.normpath(root / path.replace("/~/", "/", 1).lstrip("/")))
        if found != root and root not in found.parents:
            raise ApiError(403, "EndpointPermissionDenied", "path not allowed")
        return found

    def denies(self, path: str) -> bool:
        """Tell whether this path is one of ``denied``."""
        return any(path == one or path.startswith(one.rstrip("/") + "/") for one in self.denied)


@dataclass
class Token:
    """A bearer token. :param expires_at: wall clock."""

    resource_server: str
    user: str
    scope: str
    expires_at: float


@dataclass
class Refusal:
    """A planned fault of the service itself.

    :param path: regular expression for the whole path. :param times: so many requests meet it.
    :param acts: the request is carried out, and only its answer is lost. :param status: 0: the connection is cut.
    :param cut_bytes: of an HTTPS download, after which the connection is cut.
    :param lacks: headers that the answer to an HTTPS download does not have; without Content-Range it brings the whole
        file.
    """

    path: str
    method: str = "*"
    times: int = 1
    status: int = 503
    code: str = "ServiceUnavailable"
    headers: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    body: str = ""
    acts: bool = False
    cut_bytes: int = 0
    lacks: tuple[str, ...] = ()

    def meets(self, method: str, path: str) -> bool:
        """Tell whether this request is one of the refused ones."""
        return self.times > 0 and self.method in ("*", method) and re.fullmatch(self.path, path) is not None


@dataclass
class Task:
    """A transfer task. :param document: as submitted. :param done: numbers of items (or files of them) that are over.

    :param deadline: wall clock. :param started: it has left the queue. :param events: newest first.
    """

    task_id: str
    owner: str
    document: dict[str, Any]
    deadline: float
    requested_at: float
    status: str = ACTIVE
    nice_status: str | None = "Queued"
    started: bool = False
    files: int = 0
    files_transferred: int = 0
    files_skipped: int = 0
    bytes_transferred: int = 0
    faults: int = 0
    fatal_error: dict[str, str] | None = None
    completed_at: float | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    successful: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    is_paused: bool = False

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of paths to move."""
        return sorted((item["source_path"], item["destination_path"]) for item in self.document["DATA"])

    @property
    def between(self) -> tuple[str, str]:
        """Source and destination collection."""
        return self.document["source_endpoint"], self.document["destination_endpoint"]

    def event(self, code: str, description: str, is_error: bool = False, details: str = "") -> None:
        """Add an event."""
        entry = {"DATA_TYPE": "event", "code": code, "description": description, "details": details}
        self.events.insert(0, {**entry, "is_error": is_error, "time": iso(time.time())})

    def end(self, status: str, code: str = "", description: str = "") -> None:
        """End it."""
        self.status, self.completed_at = status, time.time()
        self.nice_status = None if status == SUCCEEDED else self.nice_status
        self.event(code or status, description or status.lower(), status == FAILED)
        if code:
            self.fatal_error = {"code": code, "description": description}

    def shown(self) -> dict[str, Any]:
        """The document that the service shows."""
        shown = {name: getattr(self, name) for name in _SHOWN}
        given = {name: self.document.get(name) for name in ("label", "sync_level", "verify_checksum")}
        source, destination = self.between
        return {
            "DATA_TYPE": "task",
            "type": "TRANSFER",
            **shown,
            **given,
            "owner_id": self.owner,
            "source_endpoint_id": source,
            "destination_endpoint_id": destination,
            "deadline": iso(self.deadline),
            "request_time": iso(self.requested_at),
            "completion_time": iso(self.completed_at) if self.completed_at else None,
            "effective_bytes_per_second": int(self.bytes_transferred / max(0.001, time.time() - self.requested_at)),
            "nice_status_short_description": self.nice_status,
        }


_SHOWN = (
    "task_id",
    "status",
    "nice_status",
    "files",
    "files_transferred",
    "files_skipped",
    "bytes_transferred",
    "faults",
    "fatal_error",
    "is_paused",
)


def iso(wall_s: float) -> str:
    """A time as the service writes it."""
    return datetime.fromtimestamp(wall_s, timezone.utc).isoformat(timespec="milliseconds")


def wall_s(text: str) -> float:
    """A time as clients write it; one without a zone is taken for UTC, as the service does.

    :raises ApiError: it cannot be read.
    """
    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ApiError(400, "ClientError.BadRequest", f"bad deadline {text!r}") from None
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()


class World:
    """All that the service knows.

    :param home: where it is kept.
    """

    def __init__(self, home: Path) -> None:
        self.lock = threading.RLock()
        self.collections: dict[str, Collection] = {}
        self.tokens: dict[str, Token] = {}
        self.consents: dict[str, set[str]] = {}
        self.clients: dict[str, str] = {}
        self.tasks: dict[str, Task] = {}
        self.submissions: dict[str, str] = {}
        self.refusals: list[Refusal] = []
        self.calls: list[tuple[str, str]] = []
        self._home = home
        self._load()

    def save(self, task: Task | None = None) -> None:
        """Bring everything but tasks, or one task, to the disk."""
        with self.lock:
            if task is not None:
                _write(self._home / f"task-{task.task_id}.json", asdict(task))
                return
            _write(
                self._home / "world.json",
                {
                    "collections": [asdict(item) for item in self.collections.values()],
                    "tokens": {name: asdict(item) for name, item in self.tokens.items()},
                    "consents": {user: sorted(found) for user, found in self.consents.items()},
                    "clients": self.clients,
                    "submissions": self.submissions,
                },
            )

    def _load(self) -> None:
        self._home.mkdir(parents=True, exist_ok=True)
        path = self._home / "world.json"
        if path.exists():
            known = json.loads(path.read_text())
            for item in known["collections"]:
                owner = tuple(item.pop("owner") or ()) or None
                made = Collection(**{**item, "owner": owner, "denied": tuple(item["denied"])})
                self.collections[made.id] = made
            self.tokens = {name: Token(**item) for name, item in known["tokens"].items()}
            self.consents = {user: set(found) for user, found in known["consents"].items()}
            self.clients, self.submissions = known["clients"], known["submissions"]
        for path in sorted(self._home.glob("task-*.json")):
            task = Task(**json.loads(path.read_text()))
            self.tasks[task.task_id] = task

    def change(self, collection: str, **facts: Any) -> None:
        """Change what is wrong with a collection."""
        with self.lock:
            self.collections[collection] = replace(self.collections[collection], **facts)
        self.save()

    def take(self, collection: str, what: str) -> bool:
        """Count a planned damage (``resets``, ``corruptions``) down; False when there is none left."""
        with self.lock:
            left = getattr(self.collections[collection], what)
            if left:
                self.collections[collection] = replace(self.collections[collection], **{what: left - 1})
            return bool(left)

    def issue(self, resource_server: str, user: str, scope: str, life_s: float) -> str:
        """Make a token."""
        name = f"Ag{uuid.uuid4().hex}"
        with self.lock:
            self.tokens[name] = Token(resource_server, user, scope, time.time() + life_s)
        self.save()
        return name

    def user_of(self, header: str, resource_server: str) -> str:
        """Return the user of this Authorization header.

        :raises ApiError: nobody who may.
        """
        token = self.tokens.get(header.partition("Bearer ")[2])
        if token is None or token.resource_server != resource_server or token.expires_at <= time.time():
            raise ApiError(401, "AuthenticationFailed", "Token is not active")
        return token.user

    def collection(self, collection: str) -> Collection:
        """A collection.

        :raises ApiError: there is none.
        """
        found = self.collections.get(collection)
        if found is None:
            raise ApiError(404, "EndpointNotFound", f"No such endpoint '{collection}'")
        return found

    def refusal(self, method: str, path: str) -> Refusal | None:
        """The planned fault that this request meets; it is counted."""
        with self.lock:
            found = next((item for item in self.refusals if item.meets(method, path)), None)
            if found:
                found.times -= 1
            return found


def new_deadline(document: dict[str, Any]) -> float:
    """Return the expiry of a new task: its own, or a day from now."""
    given = document.get("deadline")
    return wall_s(given) if given else time.time() + timedelta(days=1).total_seconds()


def _write(path: Path, what: object) -> None:
    temporary = path.with_suffix(f".{threading.get_ident()}.new")
    temporary.write_text(json.dumps(what))
    temporary.replace(path)
