"""The Transfer service's part of the emulation: paths below ``/v0.10/`` and what they answer."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tests.harness.globus.mover import Mover
from tests.harness.globus.world import (
    ACTIVE,
    FAILED,
    INACTIVE,
    MAPPED,
    PERSONAL,
    ApiError,
    Collection,
    Task,
    World,
    iso,
    new_deadline,
    wall_s,
)

Answer = tuple[int, dict[str, Any]]
_MOST_PENDING = 100
_PAGE = 100
_SCOPE = "urn:globus:auth:scope:transfer.api.globus.org:all"


class TransferApi:
    """Answers requests of users that are known. :param address: of the emulator, for ``https_server``."""

    def __init__(self, world: World, mover: Mover, address: str) -> None:
        self._world = world
        self._mover = mover
        self._address = address
        self._routes: list[tuple[str, str, Callable[..., Answer]]] = [
            ("GET", r"submission_id", self._submission_id),
            ("POST", r"transfer", self._submit),
            ("GET", r"task_list", self._task_list),
            ("POST", r"endpoint", self._make_endpoint),
            ("GET", r"endpoint_search", self._search),
            ("GET", r"endpoint/([^/]+)", self._endpoint),
            ("DELETE", r"endpoint/([^/]+)", self._delete_endpoint),
            ("GET", r"task/([^/]+)", self._task),
            ("PUT", r"task/([^/]+)", self._update),
            ("POST", r"task/([^/]+)/cancel", self._cancel),
            ("GET", r"task/([^/]+)/event_list", self._events),
            ("GET", r"task/([^/]+)/(successful_transfers|skipped_errors)", self._listing),
            ("GET", r"operation/endpoint/([^/]+)/ls", self._ls),
            ("GET", r"operation/endpoint/([^/]+)/stat", self._stat),
            ("POST", r"operation/endpoint/([^/]+)/rename", self._rename),
        ]

    def answer(self, user: str, method: str, path: str, query: Mapping[str, str], body: Any) -> Answer:
        """Carry a request out.

        :param path: behind ``/v0.10/``. :raises ApiError: it is refused.
        """
        for verb, pattern, function in self._routes:
            found = re.fullmatch(pattern, path)
            if found and verb == method:
                return function(*found.groups(), user=user, query=query, body=body)
        raise ApiError(404, "ClientError.NotFound", f"the emulator has no {method} {path}")

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def _submission_id(self, **_: Any) -> Answer:
        return 200, {"DATA_TYPE": "submission_id", "value": str(uuid.uuid4())}

    def _submit(self, user: str, body: Any, **_: Any) -> Answer:
        if not body.get("DATA"):
            raise ApiError(400, "ClientError.BadRequest.NoTransferItems", "A transfer requires at least one item")
        submission = body["submission_id"]
        with self._world.lock:
            if submission in self._world.submissions:
                return 200, _result("Duplicate", submission_id=submission, task_id=self._world.submissions[submission])
            for collection in (body["source_endpoint"], body["destination_endpoint"]):
                self._consented(self._world.collection(collection), user)
            task = Task(str(uuid.uuid4()), user, body, new_deadline(body), time.time())
            self._refuse_twins(task)
            task.files = len(body["DATA"])
            self._world.tasks[task.task_id] = task
            self._world.submissions[submission] = task.task_id
            self._world.save(task)
            self._world.save()
        self._mover.start(task)
        return 202, _result("Accepted", submission_id=submission, task_id=task.task_id)

    def _refuse_twins(self, task: Task) -> None:
        """Refuse a second task for the same paths, and the 101st task, as the service does."""
        living = [one for one in self._world.tasks.values() if one.owner == task.owner and one.status == ACTIVE]
        if any(one.between == task.between and one.pairs == task.pairs for one in living):
            raise ApiError(409, "Conflict", "A transfer with identical paths has not yet completed")
        if len(living) >= _MOST_PENDING:
            raise ApiError(409, "TooManyPendingJobs", f"You already have {_MOST_PENDING} pending tasks")

    def _mine(self, task: str, user: str) -> Task:
        found = self._world.tasks.get(task)
        if found is None or found.owner != user:
            raise ApiError(404, "ClientError.NotFound", f"No task found with id {task}")
        return found

    def _task(self, task: str, user: str, **_: Any) -> Answer:
        return 200, self._mine(task, user).shown()

    def _task_list(self, user: str, query: Mapping[str, str], **_: Any) -> Answer:
        tasks = [one.shown() for one in self._world.tasks.values() if one.owner == user]
        for clause in filter(None, query.get("filter", "").split("/")):
            name, mark, text = clause.partition(":")
            wanted = [value.lstrip("=") for value in text.split(",")] if mark else []
            tasks = [one for one in tasks if str(one.get(name)) in wanted]
        limit = int(query.get("limit", 10))
        return 200, {"DATA_TYPE": "task_list", "DATA": tasks[:limit], "total": len(tasks), "offset": 0, "limit": limit}

    def _update(self, task: str, user: str, body: Any, **_: Any) -> Answer:
        found = self._mine(task, user)
        with self._world.lock:
            if found.status not in (ACTIVE, INACTIVE):
                raise ApiError(409, "Conflict", "The task is complete")
            if "deadline" in body:
                found.deadline = wall_s(body["deadline"])
            self._world.save(found)
        return 200, _result("Updated")

    def _cancel(self, task: str, user: str, **_: Any) -> Answer:
        found = self._mine(task, user)
        with self._world.lock:
            if found.status not in (ACTIVE, INACTIVE):
                return 200, _result("TaskComplete")
            found.end(FAILED, "CANCELED", "canceled by the user")
            self._world.save(found)
        return 200, _result("Canceled")

    def _events(self, task: str, user: str, query: Mapping[str, str], **_: Any) -> Answer:
        events = self._mine(task, user).events
        if query.get("filter") == "is_error:1":
            events = [one for one in events if one["is_error"]]
        limit = int(query.get("limit", 10))
        return 200, {"DATA_TYPE": "event_list", "DATA": events[:limit], "total": len(events), "limit": limit}

    def _listing(self, task: str, kind: str, user: str, query: Mapping[str, str], **_: Any) -> Answer:
        found = self._mine(task, user)
        if found.status in (ACTIVE, INACTIVE):
            raise ApiError(409, "Conflict", "The task is still active")
        rows = found.successful if kind == "successful_transfers" else found.skipped
        start = int(query.get("marker", 0))
        after = start + _PAGE if start + _PAGE < len(rows) else None
        return 200, {"DATA_TYPE": kind, "DATA": rows[start : start + _PAGE], "next_marker": after, "marker": start}

    # ---- collections -------------------------------------------------------------------------------------------------

    def _make_endpoint(self, user: str, body: Any, **_: Any) -> Answer:
        """A personal endpoint; it is offline until its program connects (``/relay/KEY``)."""
        made = Collection(str(uuid.uuid4()), "/", body["display_name"], PERSONAL, https=False, offline=True)
        made = replace(made, made_by=user, setup_key=str(uuid.uuid4()))
        with self._world.lock:
            self._world.collections[made.id] = made
        self._world.save()
        return 201, _result("Created", id=made.id, globus_connect_setup_key=made.setup_key)

    def _delete_endpoint(self, collection: str, user: str, **_: Any) -> Answer:
        if self._world.collection(collection).made_by != user:
            raise ApiError(403, "PermissionDenied", "not yours")
        with self._world.lock:
            del self._world.collections[collection]
        self._world.save()
        return 200, _result("Deleted")

    def _search(self, user: str, **_: Any) -> Answer:
        mine = [self._shown(one, user) for one in self._world.collections.values() if one.made_by == user]
        return 200, {"DATA_TYPE": "endpoint_list", "DATA": mine, "has_next_page": False, "offset": 0, "limit": 100}

    def _endpoint(self, collection: str, user: str, **_: Any) -> Answer:
        return 200, self._shown(self._world.collection(collection), user)

    def _shown(self, found: Collection, user: str) -> dict[str, Any]:
        return {
            "DATA_TYPE": "endpoint",
            "id": found.id,
            "display_name": found.name,
            "entity_type": found.kind,
            "high_assurance": found.high_assurance,
            "https_server": f"{self._address}/c/{found.id}" if found.https else None,
            "owner_id": user,
            "disable_verify": False,
            "gcp_connected": not found.offline if found.kind == PERSONAL else None,
        }

    def _consented(self, collection: Collection, user: str) -> None:
        needs = collection.kind == MAPPED and not collection.high_assurance
        if needs and collection.id not in self._world.consents.get(user, ()):
            scope = f"{_SCOPE}[*https://auth.globus.org/scopes/{collection.id}/data_access]"
            raise ApiError(403, "ConsentRequired", "Missing required data_access consent", required_scopes=[scope])

    def _reach(self, collection: str, user: str) -> Collection:
        found = self._world.collection(collection)
        self._consented(found, user)
        if found.offline:
            raise ApiError(502, "ExternalError.DirListingFailed.GCDisconnected", "the collection is not connected")
        return found

    def _ls(self, collection: str, user: str, query: Mapping[str, str], **_: Any) -> Answer:
        found = self._reach(collection, user)
        folder = found.place(query.get("path", "/"))
        if not folder.is_dir():
            raise ApiError(404, "ClientError.NotFound", "Directory not found")
        if found.denies(query.get("path", "/")):
            raise ApiError(403, "PermissionDenied", "Permission denied")
        rows = [_entry(path.name, path.is_dir(), path.stat().st_size) for path in sorted(folder.iterdir())]
        return 200, {"DATA_TYPE": "file_list", "path": query.get("path"), "DATA": rows, "length": len(rows)}

    def _stat(self, collection: str, user: str, query: Mapping[str, str], **_: Any) -> Answer:
        place = self._reach(collection, user).place(query["path"])
        if not place.exists():
            raise ApiError(404, "NotFound", "path not found")
        return 200, _entry(place.name, place.is_dir(), place.stat().st_size)

    def _rename(self, collection: str, user: str, body: Any, **_: Any) -> Answer:
        found = self._reach(collection, user)
        if found.denies(body["new_path"]):
            raise ApiError(403, "PermissionDenied", "Permission denied")
        found.place(body["old_path"]).replace(found.place(body["new_path"]))
        return 200, _result("FileRenamed")


def _entry(name: str, is_folder: bool, size_bytes: int) -> dict[str, Any]:
    kind = "dir" if is_folder else "file"
    return {"DATA_TYPE": "file", "name": name, "type": kind, "size": size_bytes, "last_modified": iso(time.time())}


def _result(code: str, **facts: Any) -> dict[str, Any]:
    return {"DATA_TYPE": "result", "code": code, "message": code, "request_id": "emulated", **facts}
