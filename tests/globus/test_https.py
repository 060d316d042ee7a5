"""Files over HTTPS, on a node that no collection sees."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass
from tests.globus.conftest import Bench, error, kind

LARGE = os.urandom(40 << 20)


@pytest.fixture
def bench(bench: Bench) -> Bench:
    """The same node without a collection, and a token for the other end's HTTPS side."""
    bench.set(LOCAL="")
    bench.give_token(bench.archive.id, "globus_https")
    return bench


def _path(bench: Bench, name: str) -> str:
    return f"/c/{bench.archive.id}/{name}"


def test_there_and_back(bench: Bench) -> None:
    files = {f"new/deep/{number}": bytes([number]) * number for number in range(8)}
    run = bench.upload(files)
    assert run.succeeded, run.printed
    assert {f"new/deep/{path.name}": path.read_bytes() for path in bench.at("new/deep").iterdir()} == files
    assert {ad["DeveloperData"]["StageOutVerified"] for ad in run.ads} == {"size"}
    run = bench.download(*files)
    assert run.succeeded, run.printed
    assert {f"new/deep/{number}": (bench.scratch / str(number)).read_bytes() for number in range(8)} == files
    assert bench.globus.tasks == []


def test_a_second_upload_replaces_the_first(bench: Bench) -> None:
    assert bench.upload({"a": b"first"}).succeeded
    assert bench.upload({"a": b"second"}).succeeded
    assert bench.at("a").read_bytes() == b"second"
    assert [path.name for path in bench.at("").iterdir()] == ["a"]


def test_large_files_come_in_ranges(bench: Bench) -> None:
    bench.environment["STAGEOUT_PARALLELISM"] = "3"
    bench.put("large", LARGE)
    assert bench.download("large").succeeded
    assert (bench.scratch / "large").read_bytes() == LARGE
    assert len(bench.globus.calls(f"GET {_path(bench, 'large')}")) == 1 + 3


def test_a_cut_download_goes_on_where_it_was(bench: Bench) -> None:
    bench.put("large", LARGE)
    bench.globus.refuse(_path(bench, "large"), method="GET", cut_bytes=10 << 20, times=4)
    run = bench.download("large")
    assert run.succeeded, run.printed
    assert (bench.scratch / "large").read_bytes() == LARGE
    assert run.ads[0]["TransferTotalBytes"] < 1.5 * len(LARGE)


def _written(bench: Bench, name: str) -> int:
    """Bytes on this node's disk of a download that has not ended."""
    return sum(part.stat().st_blocks for part in bench.scratch.glob(f".{name}.*.part"))


def test_a_file_that_is_replaced_meanwhile_is_never_a_mixture(bench: Bench) -> None:
    bench.put("large", LARGE)
    bench.put("other", LARGE[::-1])
    bench.globus.change(bench.archive.id, rate_bytes_s=2 << 20)  # the first 10 MiB take five seconds
    bench.globus.refuse(_path(bench, "large"), method="GET", cut_bytes=10 << 20, times=2)

    def replace() -> None:
        bench.until("the first bytes", lambda: _written(bench, "large"))
        bench.at("other").replace(bench.at("large"))
        bench.globus.change(bench.archive.id, rate_bytes_s=None)

    replacing = threading.Thread(target=replace)
    replacing.start()
    run = bench.download("large")
    replacing.join()
    assert run.succeeded, run.printed
    assert (bench.scratch / "large").read_bytes() == LARGE[::-1]


def test_without_a_version_to_hold_on_to_a_cut_download_begins_again(bench: Bench) -> None:
    bench.environment["STAGEOUT_PARALLELISM"] = "3"
    bench.put("large", LARGE)
    bench.globus.refuse(_path(bench, "large"), method="GET", lacks=("ETag",), cut_bytes=10 << 20, times=2)
    bench.globus.refuse(_path(bench, "large"), method="GET", lacks=("ETag",), times=9)
    run = bench.download("large")
    assert run.succeeded, run.printed
    assert (bench.scratch / "large").read_bytes() == LARGE
    assert run.ads[0]["TransferTotalBytes"] == (10 << 20) + len(LARGE), "one connection, from the first byte on"


def test_a_collection_that_gives_no_ranges_sends_the_whole_file(bench: Bench) -> None:
    bench.environment["STAGEOUT_PARALLELISM"] = "3"
    bench.put("large", LARGE)
    bench.globus.refuse(_path(bench, "large"), method="GET", lacks=("Content-Range",), times=9)
    assert bench.download("large").succeeded
    assert (bench.scratch / "large").read_bytes() == LARGE


def test_an_answer_without_a_length_is_no_success(bench: Bench) -> None:
    bench.put("there")
    bench.globus.refuse(_path(bench, ".*"), method="GET", lacks=("Content-Range", "Content-Length"), times=99)
    run = bench.download("there")
    assert error(run) is ErrorClass.SERVER_ERROR
    assert "does not say how long" in run.ads[0].text("TransferError")
    assert not (bench.scratch / "there").exists()
    assert error(bench.upload({"empty": b""})) is ErrorClass.SERVER_ERROR
    assert not bench.at("empty").exists()


def test_a_404_is_a_missing_file_only_when_it_says_so(bench: Bench) -> None:
    bench.put("there")
    body = "ENDPOINT_ERROR GCS Manager Internal Error"
    bench.globus.refuse(_path(bench, "there"), status=404, body=body, times=2)
    run = bench.download("there", "missing")
    assert run.ads[0]["TransferSuccess"] is True
    assert kind(run.ads[1]) is ErrorClass.NOT_FOUND
    assert not (bench.scratch / "missing").exists()


@pytest.mark.parametrize(
    ("status", "expected"),
    [(401, "CREDENTIAL_REFUSED"), (403, "PERMISSION_DENIED"), (413, "TOO_LARGE"), (507, "NO_SPACE_REMOTE")],
)
def test_refused_uploads(bench: Bench, status: int, expected: str) -> None:
    bench.globus.refuse(f"/c/{bench.archive.id}/.*", method="PUT", status=status, times=9)
    assert error(bench.upload({"a": b"x"})) is ErrorClass[expected]
    assert list(bench.at("").iterdir()) == []


def test_a_busy_collection_is_waited_for(bench: Bench) -> None:
    bench.globus.refuse(f"/c/{bench.archive.id}/.*", status=503, times=2, headers={"Retry-After": "1"})
    assert bench.upload({"a": b"x"}).succeeded


def test_the_token_for_the_transfer_service_is_not_enough(bench: Bench) -> None:
    (bench.creds / "globus_https.use").unlink()
    run = bench.upload({"a": b"x"})
    assert error(run) is ErrorClass.CREDENTIAL_MISSING
    assert f"https://auth.globus.org/scopes/{bench.archive.id}/https" in run.ads[0].text("TransferError")
    bench.give_token(bench.archive.id, "globus_https", life_s=-1.0)
    assert error(bench.upload({"a": b"x"})) is ErrorClass.CREDENTIAL_EXPIRED


def test_what_https_cannot_do_is_said(bench: Bench) -> None:
    run = bench.download("db/")
    assert error(run) is ErrorClass.NOT_SUPPORTED
    assert "STAGEOUT_GLOBUS_LOCAL" in run.ads[0].text("TransferError")
    bench.globus.change(bench.archive.id, https=False)
    run = bench.upload({"a": b"x"})
    assert error(run) is ErrorClass.NOT_SUPPORTED
    assert "STAGEOUT_GLOBUS_LOCAL" in run.ads[0].text("TransferError")


def test_files_outside_what_the_collection_sees_go_by_https(bench: Bench) -> None:
    bench.set(LOCAL=f"{bench.node.id} {Path(bench.node.root, 'elsewhere')}=/")
    assert bench.upload({"a": b"x"}).succeeded
    assert bench.globus.tasks == []
