"""The Globus plugin's pure parts, and its requests against the SDK's own fixtures."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import responses
from globus_sdk import GlobusAPIError
from globus_sdk.testing import RegisteredResponse, construct_error, get_last_request, load_response
from hypothesis import given
from hypothesis import strategies as st

from stageout.core.config import ConfigError, environment_settings, mapping_settings, tool_settings
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Request, Transfer
from stageout.protocols.globusonline import failures, plan
from stageout.protocols.globusonline.address import Address, address_of
from stageout.protocols.globusonline.direct import Direct, _Version
from stageout.protocols.globusonline.service import RateLimiter, Service, TimeLimit
from stageout.protocols.globusonline.settings import (
    GlobusSettings,
    local_collection,
    named_collections,
    read_settings,
)
from stageout.protocols.globusonline.taskrun import TaskRun
from stageout.protocols.globusonline.tokens import Tokens
from stageout.protocols.globusonline.trouble import Look, Trouble

UUID = "7a1b4c1e-0c6d-4f7a-9a53-0d9f3f0b6a11"
OTHER = "11111111-0c6d-4f7a-9a53-0d9f3f0b6a11"


# ---- URLs and settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path", "is_folder"),
    [
        (f"globus://{UUID}/a/b", "/a/b", False),
        (f"globusonline://me@{UUID.upper()}:/a%20b", "/a b", False),
        ("globusonline://zmiller@NEWBIO01:/scratch.1/zmiller/tmp/", "/scratch.1/zmiller/tmp/", True),
        ("globus://newbio01/~/x", "/~/x", False),
        ("globus://newbio01/x?recursive=1", "/x", True),
        ("globus://newbio01/x?Recursive=no", "/x", False),
        ("globus://newbio01/x%3Fy#z", "/x?y#z", False),
        ("globus://newbio01/a@b:c", "/a@b:c", False),
    ],
)
def test_urls(url: str, path: str, is_folder: bool) -> None:
    found = address_of(url, {"newbio01": UUID})
    assert (found.collection, found.path, found.is_folder) == (UUID, path, is_folder)


@given(st.text(min_size=1).filter(lambda text: "/" not in text and "\0" not in text and text not in ("..", ".")))
def test_any_name_survives_the_wire(name: str) -> None:
    from stageout.plugin.urls import encode_url

    name = name.encode("utf-8", "surrogatepass").decode("utf-8", "replace").lstrip("/")
    url = encode_url(f"globus://{UUID}/d/{name}", f"globus://{UUID}/d")
    assert address_of(url, {}).path == f"/d/{name}"


def test_where_the_nodes_collection_has_a_file() -> None:
    local = local_collection(f"{UUID.upper()} /var/lib/condor=/ep7, /var/lib/condor/execute=/scratch")
    assert local is not None
    assert local.there(Path("/var/lib/condor/execute/dir_1/a")) == "/scratch/dir_1/a"
    assert local.there(Path("/var/lib/condor/stageout/x")) == "/ep7/stageout/x"
    assert local.there(Path("/var/lib/condor2/x")) is None
    whole = local_collection(UUID)
    assert whole is not None
    assert whole.there(Path("/a/b")) == "/a/b"
    assert local_collection(" ") is None


@pytest.mark.parametrize("text", ["name /a=/b", f"{UUID} a=/b", f"{UUID} /a", f"{UUID} /a=b"])
def test_a_path_map_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="STAGEOUT_GLOBUS_LOCAL"):
        local_collection(text)


def test_names_of_collections() -> None:
    assert named_collections(f"NEWBIO01={UUID}, b={OTHER}") == {"newbio01": UUID, "b": OTHER}
    with pytest.raises(ConfigError, match="NAME=UUID"):
        named_collections("a=b")


@pytest.mark.parametrize("wrong", [{"SYNC": "md5"}, {"LEASE": "soon"}, {"TASKS": "0"}, {"LOCAL": "x"}])
def test_settings_that_cannot_be_used_name_the_knob(wrong: dict[str, str]) -> None:
    source = mapping_settings({f"STAGEOUT_GLOBUS_{name}": value for name, value in wrong.items()})
    with pytest.raises(TransferFailure, match=f"STAGEOUT_GLOBUS_{next(iter(wrong))}") as caught:
        read_settings(source)
    assert caught.value.kind is ErrorClass.PLUGIN_BROKEN


def test_settings_come_from_condors_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "condor_config_val"
    tool.write_text(
        "#!/bin/sh\n[ \"$*\" = '-dump -expanded ^STAGEOUT_GLOBUS_' ] || exit 1\n"
        "echo '# Configuration from machine: here'\necho 'stageout_globus_LEASE = 60'\n"
        "echo 'STAGEOUT_GLOBUS_COLLECTIONS = a=b'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("_CONDOR_STAGEOUT_GLOBUS_LEASE", "30")
    found = tool_settings("STAGEOUT_GLOBUS_")
    assert found.number("STAGEOUT_GLOBUS_LEASE") == 60
    assert found.text("STAGEOUT_GLOBUS_COLLECTIONS") == "a=b"
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert tool_settings("STAGEOUT_GLOBUS_").number("STAGEOUT_GLOBUS_LEASE") == 30
    assert environment_settings().number("STAGEOUT_GLOBUS_LEASE") == 30


# ---- plans ----------------------------------------------------------------------------------------------------------


def _move(destination: str, size_bytes: int = 1) -> plan.Move:
    address = Address(UUID, destination, False, "", "", destination)
    transfer = Transfer(Request("globus://x/y", "/here"), None, lambda result: None)  # type: ignore[arg-type]
    return plan.Move(transfer, address, Path("/here"), (f"/src{destination}", destination), size_bytes)


@given(st.lists(st.from_regex(r"/[ab]/[a-z]{1,3}", fullmatch=True), unique=True), st.integers(1, 5))
def test_parts_are_complete_and_bounded(paths: list[str], most: int) -> None:
    moves = [_move(path) for path in paths]
    for parts in (plan.split(moves, most), plan.by_folder(moves)):
        assert sorted(move.pair for part in parts for move in part) == sorted(move.pair for move in moves)
        assert all(parts)
    assert all(len(part) <= most for part in plan.split(moves, most))
    assert all(len({move.destination_folder for move in part}) == 1 for part in plan.by_folder(moves))


@given(st.text(), st.lists(st.tuples(st.text(), st.text())))
def test_labels_are_what_the_service_takes(jobs: str, pairs: list[tuple[str, str]]) -> None:
    label = plan.label_of(jobs, True, pairs)
    assert len(label) <= 128
    assert set(label) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 _-")
    assert label == plan.label_of(jobs, True, pairs[::-1])


def test_labels_of_different_tasks_differ() -> None:
    assert plan.label_of("a#1.0", True, [("a", "b")]) != plan.label_of("a#1.0", True, [("a", "c")])


def test_what_belongs_to_a_directory() -> None:
    pair = ("/db/", "/in/db")
    assert plan.belongs(("/db/x/y", "/in/db/x/y"), pair)
    assert not plan.belongs(("/db2/x", "/in/db2/x"), pair)
    assert plan.belongs(("/a", "/b"), ("/a", "/b"))


# ---- patience -------------------------------------------------------------------------------------------------------

QUICK = GlobusSettings("", "globus", "checksum", lease_s=180, fault_patience_s=5, stall_s=20)


def _watch(*looks: tuple[tuple[int, ...], dict[str, object]]) -> tuple[int, str] | None:
    """The number of the look at which the task is given up, one a second, and the code."""
    trouble = Trouble(QUICK)
    for second, (progress, facts) in enumerate(looks):
        given_up = trouble.see(Look(float(second), progress, *_flags(facts)))
        if given_up:
            return second, given_up.code
    return None


def _flags(facts: dict[str, object]) -> tuple[bool, bool, bool, tuple[str, ...]]:
    codes = facts.get("codes", ())
    assert isinstance(codes, tuple)
    return bool(facts.get("queued")), bool(facts.get("paused")), bool(facts.get("suspended")), codes


def test_what_a_person_must_mend_ends_the_task_soon() -> None:
    codes = {"codes": ("CONNECTION_RESET", "PERMISSION_DENIED")}
    assert _watch(((1,), codes), *[((1,), {})] * 30) == (5, "PERMISSION_DENIED")


def test_but_not_while_other_files_move() -> None:
    moving = [((second,), {"codes": ("PERMISSION_DENIED",)}) for second in range(30)]
    assert _watch(*moving) is None


def test_other_trouble_is_waited_for_longer() -> None:
    assert _watch(((1,), {"codes": ("GC_NOT_CONNECTED",)}), *[((1,), {})] * 30) == (20, "GC_NOT_CONNECTED")
    assert _watch(*[((1,), {})] * 30) == (20, "")


def test_queue_and_pause() -> None:
    assert _watch(*[((0,), {"queued": True})] * 90) is None
    assert _watch(*[((0,), {"paused": True, "codes": ("PAUSED",)})] * 90) == (80, "PAUSED")


def test_a_suspended_task_is_over() -> None:
    assert _watch(((0,), {"suspended": True})) == (0, "INACTIVE")


def test_time_without_a_look_does_not_count() -> None:
    trouble = Trouble(QUICK)
    assert trouble.see(Look(0.0, (1,), False, False, False)) is None
    assert trouble.see(Look(5000.0, (1,), False, False, False)) is None


# ---- the SDK's fixtures ---------------------------------------------------------------------------------------------


class _Context:
    """As much of a context as requests need."""

    remaining_s = 60.0

    def credential(self, service: str, handle: str = "") -> str:
        return "secret-token"

    def log(self, message: str, **facts: object) -> None:
        del message, facts


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "globus.use").write_text(json.dumps({"access_token": "secret-token"}))
    monkeypatch.setenv("_CONDOR_CREDS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    context = _Context()
    responses.start()
    yield Service(Tokens(context, "globus"), "", TimeLimit(context), RateLimiter())  # type: ignore[arg-type]
    responses.stop(allow_assert=False)
    responses.reset()


def test_a_submission_as_the_public_service_gets_it(service: Service) -> None:
    from globus_sdk import TransferClient

    from stageout.protocols.globusonline.journal import Journal

    load_response(TransferClient.get_submission_id)
    meta = load_response(TransferClient.submit_transfer).metadata
    moves = [_move("/d/a"), _move("/d/b")]
    document = plan.document(moves, (OTHER, UUID), "a label", "checksum")
    entry = TaskRun(service, Journal(), QUICK, lambda *_, **__: None).submit(document)
    assert entry.task == meta["task_id"]
    request = get_last_request()
    assert request.headers["Authorization"] == "Bearer secret-token"
    assert request.url == "https://transfer.api.globus.org/v0.10/transfer"
    sent = json.loads(request.body)
    assert sent["submission_id"] == entry.submission
    assert sent["deadline"].endswith("+00:00")
    assert {name: sent[name] for name in document} == document
    assert [item["source_path"] for item in sent["DATA"]] == ["/src/d/a", "/src/d/b"]


def test_a_submission_without_files_is_the_services_error(service: Service) -> None:
    from globus_sdk import TransferClient

    load_response(TransferClient.submit_transfer, case="failure")
    with pytest.raises(TransferFailure) as caught:
        service.ask("submitting the task", lambda client: client.submit_transfer({"submission_id": "x"}))
    assert caught.value.kind is ErrorClass.BAD_REQUEST
    assert "NoTransferItems" in str(caught.value)


def test_cancel_says_whether_it_worked(service: Service) -> None:
    from globus_sdk import TransferClient

    meta = load_response(TransferClient.cancel_task).metadata
    assert service.last_word(lambda client: client.cancel_task(meta["task_id"])) is True
    assert service.last_word(lambda client: client.cancel_task("00000000-0000-0000-0000-000000000000")) is False


def test_pages_of_a_result_are_put_together(service: Service) -> None:
    path = f"/v0.10/task/{UUID}/skipped_errors"
    for marker, following in ((None, "1"), ("1", None)):
        query = [responses.matchers.query_param_matcher({"marker": marker} if marker else {})]
        RegisteredResponse(
            service="transfer", path=path, json={"DATA": [{"row": marker}], "next_marker": following}, match=query
        ).add()
    assert [row["row"] for row in service.rows("reading", UUID, "task_skipped_errors")] == [None, "1"]


def _refused(status: int, code: str, **facts: object) -> GlobusAPIError:
    body = {"code": code, "message": "m", "request_id": "r", **facts}
    return construct_error(http_status=status, body=body, error_class=GlobusAPIError)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (401, "AuthenticationFailed", "CREDENTIAL_REFUSED"),
        (403, "EndpointPermissionDenied", "PERMISSION_DENIED"),
        (404, "EndpointNotFound", "NOT_FOUND"),
        (409, "TooManyPendingJobs", "THROTTLED"),
        (400, "ClientError.BadRequest", "BAD_REQUEST"),
        (502, "ExternalError.DirListingFailed.GCDisconnected", "CONNECT_FAILED"),
        (502, "ExternalError.DirListingFailed.PermissionDenied", "PERMISSION_DENIED"),
        (502, "ExternalError.DirListingFailed.NotDirectory", "CONFLICT"),
        (502, "ExternalError.Something", "CONNECT_FAILED"),
        (500, "InternalError", "SERVER_ERROR"),
        (503, "ServiceUnavailable", "SERVER_BUSY"),
        (429, "RateLimit", "THROTTLED"),
    ],
)
def test_refusals_are_classified_by_code(status: int, code: str, expected: str) -> None:
    assert failures.request_failure(_refused(status, code), "asking").kind is ErrorClass[expected]


def test_a_login_that_is_not_fresh_enough_says_what_is_wanted() -> None:
    wanted = {"session_required_single_domain": ["example.org"], "session_message": "log in again"}
    failure = failures.request_failure(_refused(403, "PermissionDenied", authorization_parameters=wanted), "asking")
    assert failure.kind is ErrorClass.CREDENTIAL_REFUSED
    assert "example.org" in str(failure)


def test_a_disk_that_takes_a_part_of_a_piece_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, whole = bytes(range(256)) * 4, os.pwrite

    class Half(Direct):
        """Of a collection with one file."""

        def __init__(self) -> None:
            self._address, self._lock, self._moved_bytes = Address(UUID, "/f", False, "", "", "f"), threading.Lock(), 0
            self._context = cast(Context, SimpleNamespace(progress=lambda moved_bytes: None))

        @contextlib.contextmanager
        def _exchange(self, *_: object) -> Iterator[Any]:
            length = {"Content-Length": str(len(data))}
            yield SimpleNamespace(status=200, headers=length, read=io.BytesIO(data).read)

    monkeypatch.setattr(os, "pwrite", lambda file, piece, at: whole(file, piece[: max(1, len(piece) // 2)], at))
    with (tmp_path / "f").open("w+b") as file:
        Half()._range(file.fileno(), 0, len(data), _Version(len(data), ""))
        assert file.read() == data
