"""The execution of a task: it copies files between directories, a few tasks of each user at a time, with all faults."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.globus.world import ACTIVE, FAILED, SUCCEEDED, ApiError, Collection, Task, World

_PIECE_BYTES = 1 << 18
_SAVE_INTERVAL_S = 0.2


class Fault(Exception):
    """A file did not move. :param code: of the event. :param fatal: the task fails with it."""

    def __init__(self, code: str, fatal: bool = False, item: str = "") -> None:
        super().__init__(code)
        self.code = code
        self.fatal = fatal
        self.item = item


class Over(Exception):
    """The task has ended meanwhile, or the emulator has."""


class Piece(NamedTuple):
    """One file of a task: paths in the collections, and the item that it belongs to."""

    source: str
    destination: str
    item: dict[str, Any]

    @property
    def key(self) -> str:
        """Return the key that identifies it."""
        return f"{self.source}\n{self.destination}"


class Mover:
    """Runs the tasks of a world.

    :param active: tasks of one user that run at once. :param pause_s: between two attempts of what failed.
    :param setup_s: that a task takes before its first byte.
    """

    def __init__(self, world: World, active: int, pause_s: float, setup_s: float) -> None:
        self._world = world
        self._active = active
        self._pause_s = pause_s
        self._setup_s = setup_s
        self.closing = threading.Event()
        self._saved_s = 0.0
        self._threads: list[threading.Thread] = []

    def start(self, task: Task) -> None:
        """Carry a task out in the background."""
        thread = threading.Thread(target=self._run, args=(task,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Stop moving; what is half moved is moved again after the next start."""
        self.closing.set()
        for thread in self._threads:
            thread.join(10)

    def _run(self, task: Task) -> None:
        with contextlib.suppress(Over):
            self._queue(task)
            self._wait(task, self._setup_s)
            self._move(task)
        self._world.save(task)

    def _queue(self, task: Task) -> None:
        while not self._has_turn(task):
            self._wait(task, 0.02)
        with self._world.lock:
            if not task.started:
                task.event("STARTED", "started")
            task.started, task.nice_status = True, "OK"
        self._world.save(task)

    def _has_turn(self, task: Task) -> bool:
        with self._world.lock:
            mine = [item for item in self._world.tasks.values() if item.owner == task.owner and item.status == ACTIVE]
            return task in sorted(mine, key=lambda item: item.requested_at)[: self._active]

    def _wait(self, task: Task, seconds: float) -> None:
        """Let time pass, as long as the task lives.

        :raises Over: it does not.
        """
        until = time.monotonic() + seconds
        while True:
            self._look(task)
            left = until - time.monotonic()
            if left <= 0:
                return
            self.closing.wait(min(left, 0.05))

    def _look(self, task: Task) -> None:
        if self.closing.is_set() or task.status != ACTIVE:
            raise Over
        if time.time() > task.deadline:
            with self._world.lock:
                if task.status == ACTIVE:
                    task.end(FAILED, "EXPIRED", "The task did not complete before its deadline")
            raise Over

    def _move(self, task: Task) -> None:
        while True:
            fault = self._round(task)
            if fault is None:
                with self._world.lock:
                    if task.status == ACTIVE:
                        task.end(SUCCEEDED)
                return
            self._wait(task, self._pause_s)

    def _round(self, task: Task) -> Fault | None:
        """Try all files that are not done; the last fault, None when all are over."""
        last = None
        for piece in list(self._pieces(task)):
            self._look(task)
            if piece.key in task.done:
                continue
            try:
                self._one(task, piece)
            except Fault as fault:
                last = fault
                self._blame(task, piece, fault)
        return last

    def _blame(self, task: Task, piece: Piece, fault: Fault) -> None:
        with self._world.lock:
            task.event(fault.code, "an error", True, f"Error ({fault.code}) at {piece.source} -> {piece.destination}")
            task.faults += 1
            task.nice_status = fault.code
            task.is_paused = fault.code == "PAUSED"
            if fault.fatal:
                task.end(FAILED, fault.code, f"the task failed: {fault.code}")
        self._world.save(task)

    def _pieces(self, task: Task) -> Iterator[Piece]:
        source = self._world.collection(task.between[0])
        for item in task.document["DATA"]:
            if not item.get("recursive"):
                yield Piece(item["source_path"], item["destination_path"], item)
                continue
            top = source.place(item["source_path"])
            for path in sorted(top.rglob("*")):
                if path.is_file():
                    rest = str(path.relative_to(top))
                    whole = [item[name].rstrip("/") + "/" + rest for name in ("source_path", "destination_path")]
                    yield Piece(whole[0], whole[1], item)

    def _one(self, task: Task, piece: Piece) -> None:
        task.files = max(task.files, len(task.done) + 1, len(task.document["DATA"]))
        source, destination = (self._world.collection(name) for name in task.between)
        for collection in (source, destination):
            if collection.paused:
                raise Fault("PAUSED")
            if collection.offline:
                raise Fault("GC_NOT_CONNECTED")
        if task.is_paused:
            task.is_paused = False
        try:
            origin, target = source.place(piece.source), destination.place(piece.destination)
        except ApiError:
            raise Fault("PERMISSION_DENIED") from None
        problem = _source_problem(source, origin, piece.source)
        if problem:
            self._skip_or_fail(task, piece, problem)
            return
        if destination.denies(piece.destination):
            raise Fault("PERMISSION_DENIED")
        if _is_same(task.document.get("sync_level"), origin, target):
            self._over(task, piece, "files_skipped")
            return
        self._copy(task, piece, origin, target, source, destination)

    def _skip_or_fail(self, task: Task, piece: Piece, code: str) -> None:
        if not task.document.get("skip_source_errors"):
            raise Fault(code)
        row = {"DATA_TYPE": "skipped_error", "source_path": piece.source, "destination_path": piece.destination}
        task.skipped.append({**row, "error_code": code, "error_details": "skipped", "is_directory": False})
        self._over(task, piece, "files_skipped")

    def _over(self, task: Task, piece: Piece, counter: str) -> None:
        with self._world.lock:
            task.done.append(piece.key)
            setattr(task, counter, getattr(task, counter) + 1)
            is_due = time.monotonic() - self._saved_s > _SAVE_INTERVAL_S
        if is_due:
            self._world.save(task)
            self._saved_s = time.monotonic()

    def _copy(
        self, task: Task, piece: Piece, origin: Path, target: Path, source: Collection, destination: Collection
    ) -> None:
        if destination.quota_bytes is not None and _used(destination) + origin.stat().st_size > destination.quota_bytes:
            raise Fault("QUOTA_EXCEEDED", bool(task.document.get("fail_on_quota_errors")))
        rates = [one.rate_bytes_s for one in (source, destination) if one.rate_bytes_s]
        break_off = self._world.take(destination.id, "resets")
        try:
            _make_parents(target, destination)
            digest = self._pump(task, origin, target, min(rates, default=0.0), break_off)
        except OSError as problem:
            raise Fault("PERMISSION_DENIED" if isinstance(problem, PermissionError) else "ENDPOINT_ERROR") from None
        _give(target, destination)
        if self._world.take(destination.id, "corruptions"):
            _damage(target)
        row = {"DATA_TYPE": "successful_transfer", "source_path": piece.source, "destination_path": piece.destination}
        if task.document.get("verify_checksum"):
            if hashlib.sha256(target.read_bytes()).hexdigest() != digest:
                raise Fault("VERIFY_CHECKSUM")
            row |= {"checksum": digest, "checksum_algorithm": "SHA256"}
        wanted = piece.item.get("external_checksum")
        if wanted and _digest(target, piece.item.get("checksum_algorithm") or "md5") != wanted:
            raise Fault("EXTERNAL_CHECKSUM_MISMATCH", True)
        task.successful.append(row)
        self._over(task, piece, "files_transferred")

    def _pump(self, task: Task, origin: Path, target: Path, rate_bytes_s: float, break_off: bool) -> str:
        digest = hashlib.sha256()
        piece_bytes = max(1, min(_PIECE_BYTES, int(rate_bytes_s / 20))) if rate_bytes_s else _PIECE_BYTES
        with origin.open("rb") as reading, target.open("wb") as writing:
            while piece := reading.read(piece_bytes):
                writing.write(piece)
                digest.update(piece)
                task.bytes_transferred += len(piece)
                if break_off:
                    raise Fault("CONNECTION_RESET")
                self._wait(task, len(piece) / rate_bytes_s if rate_bytes_s else 0)
        return digest.hexdigest()


def _source_problem(collection: Collection, origin: Path, path: str) -> str:
    if collection.denies(path):
        return "PERMISSION_DENIED"
    if origin.is_dir():
        return "IS_A_DIRECTORY"
    return "" if origin.exists() else "FILE_NOT_FOUND"


def _is_same(level: int | None, origin: Path, target: Path) -> bool:
    """Tell whether this sync level finds nothing to do."""
    if level is None or not target.exists():
        return False
    if level == 0:
        return True
    ours, theirs = origin.stat(), target.stat()
    same = ours.st_size == theirs.st_size
    if level == 2:
        return same and ours.st_mtime <= theirs.st_mtime
    return same and (level == 1 or origin.read_bytes() == target.read_bytes())


def _used(collection: Collection) -> int:
    return sum(path.stat().st_size for path in Path(collection.root).rglob("*") if path.is_file())


def _make_parents(target: Path, collection: Collection) -> None:
    missing = [path for path in target.parents if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _give(path, collection)


def _give(path: Path, collection: Collection) -> None:
    if collection.owner and os.geteuid() == 0:
        os.chown(path, *collection.owner)


def _damage(path: Path) -> None:
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]) if first else b"x")


def _digest(path: Path, algorithm: str) -> str:
    return hashlib.new(algorithm.replace("-", "").lower(), path.read_bytes()).hexdigest()
