"""Files by tasks: one task for a call, whatever the service does meanwhile."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass
from stageout.testing.starter import Wanted
from tests.globus.conftest import Bench, error, kind
from tests.harness.globus import MAPPED

FILES = {f"run/{number}": bytes([number]) * (100 + number) for number in range(20)}


def test_upload_of_many_files_is_one_task(bench: Bench) -> None:
    run = bench.upload({f"deep/down/{number}": bytes([number]) * number for number in range(200)})
    assert run.succeeded, run.printed
    (task,) = bench.globus.tasks
    assert task.files_transferred == 200
    for number, ad in enumerate(run.ads):
        data = bytes([number]) * number
        assert bench.at(f"deep/down/{number}").read_bytes() == data
        developer = ad["DeveloperData"]
        assert (ad["TransferFileBytes"], ad["TransferTotalBytes"]) == (number, number)
        assert (developer["StageOutVerified"], developer["GlobusTask"]) == ("sha256", task.task_id)
        assert developer["StageOutDigests"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert task.document["label"].startswith("HTCondor output of ap-example-12-0-1700000000 ")
    assert {task.document[name] for name in task.document if name.startswith("notify")} == {False}
    assert not (bench.scratch / ".globusonline_plugin").exists()


def test_download_of_many_files_is_one_task(bench: Bench) -> None:
    for name, data in FILES.items():
        bench.put(name, data)
    run = bench.download(*FILES)
    assert run.succeeded, run.printed
    assert len(bench.globus.tasks) == 1
    assert {path.name: path.read_bytes() for path in bench.scratch.iterdir() if not path.name.startswith(".")} == {
        Path(name).name: data for name, data in FILES.items()
    }
    assert not (bench.scratch / ".globusonline_plugin").exists()


def test_a_directory_comes_whole(bench: Bench) -> None:
    for name, data in FILES.items():
        bench.put(f"db/{name}", data)
    bench.put("elsewhere", b"x")
    wanted = [Wanted(bench.url("db?recursive=1"), "nr"), Wanted(bench.url("elsewhere"), "e")]
    (run,) = bench.starter().download(wanted)
    assert run.succeeded, run.printed
    assert len(bench.globus.tasks) == 1
    assert {f"run/{path.name}": path.read_bytes() for path in (bench.scratch / "nr" / "run").iterdir()} == FILES
    assert run.ads[0]["TransferFileBytes"] == sum(map(len, FILES.values()))


def test_names_survive(bench: Bench) -> None:
    names = ["a b", "100%", "what?", "c#", "ü", "x;y", "%41"]
    bench.job_ad["OutputDestination"] = bench.url("odd")
    (bench.scratch / "f").write_bytes(b"data")
    wanted = []
    for number, name in enumerate(names):
        (bench.scratch / f"f{number}").write_bytes(name.encode())
        wanted.append(Wanted(f"{bench.url('odd')}/{name}", f"f{number}"))
    (run,) = bench.starter().upload(wanted)
    assert run.succeeded, run.printed
    assert {path.name: path.read_text() for path in bench.at("odd").iterdir()} == {name: name for name in names}


def test_collections_have_a_task_each_and_names(bench: Bench) -> None:
    other = bench.globus.collection("other")
    bench.set(COLLECTIONS=f"NEWBIO01={bench.archive.id} second={other.id}")
    wanted = []
    for number, url in enumerate(["globusonline://zm@NEWBIO01:/scratch.1/a", "globus://second/b", "globus://SECOND/c"]):
        (bench.scratch / f"f{number}").write_bytes(b"x")
        wanted.append(Wanted(url, f"f{number}"))
    (run,) = bench.starter().upload(wanted)
    assert run.succeeded, run.printed
    assert len(bench.globus.tasks) == 2
    assert bench.at("scratch.1/a").exists()
    assert Path(other.root, "c").exists()


def test_the_limit_of_files_per_task_and_of_tasks(bench: Bench) -> None:
    bench.set(TASK_FILES="6", TASKS="2")
    bench.globus.change(bench.archive.id, rate_bytes_s=2000.0)
    run = bench.upload(FILES)
    assert run.succeeded, run.printed
    assert sorted(task.files for task in bench.globus.tasks) == [2, 6, 6, 6]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("globus://NEWBIO02/a", "STAGEOUT_GLOBUS_COLLECTIONS"),
        ("globus:///a", "names no collection"),
        ("globus://{archive}", "no path"),
        ("globus://{archive}/../a", ".."),
        ("globus://{archive}/a?fast=1", "recursive=1 only"),
        ("globus://{archive}/a?b", "recursive=1 only"),
    ],
)
def test_urls_that_lead_nowhere_are_explained(bench: Bench, url: str, words: str) -> None:
    (run,) = bench.starter().download([Wanted(url.format(archive=bench.archive.id), "a")])
    assert error(run) is ErrorClass.BAD_URL
    assert words in run.ads[0].text("TransferError")
    assert bench.globus.calls() == []


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_no_token(bench: Bench) -> None:
    (bench.creds / "globus.use").unlink()
    run = bench.upload({"a": b"x"})
    assert error(run) is ErrorClass.CREDENTIAL_MISSING
    assert "use_oauth_services = globus" in run.ads[0].text("TransferError")


def test_a_token_that_is_refused(bench: Bench) -> None:
    bench.globus.revoke()
    assert error(bench.upload({"a": b"x"})) is ErrorClass.CREDENTIAL_REFUSED
    bench.give_token(life_s=-5.0)
    assert error(bench.upload({"a": b"x"})) is ErrorClass.CREDENTIAL_EXPIRED


def test_a_token_for_something_else_is_no_token(bench: Bench) -> None:
    bench.give_token(bench.archive.id)
    assert error(bench.upload({"a": b"x"})) is ErrorClass.CREDENTIAL_MISSING


def test_tokens_are_found_by_what_they_are_for(bench: Bench) -> None:
    (bench.creds / "globus.use").unlink()
    bench.give_token(bench.archive.id, "globus_a")
    bench.give_token(name="globus_b")
    bench.give_token(name="globusother", life_s=-5.0)
    assert bench.upload({"a": b"x"}).succeeded
    (run,) = bench.starter().upload([Wanted(bench.url("b").replace("globus://", "globus.a+globus://"), "f0")])
    assert error(run) is ErrorClass.CREDENTIAL_REFUSED


def test_a_renewed_token_is_used_at_once(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, rate_bytes_s=100e3)
    process = bench.start({"a": b"x" * 200_000})
    bench.until("the task runs", lambda: bench.globus.tasks and bench.globus.tasks[0].bytes_transferred)
    old = (bench.creds / "globus.use").read_text()
    bench.give_token()
    assert (bench.creds / "globus.use").read_text() != old
    with bench.globus.world.lock:
        del bench.globus.world.tokens[json.loads(old)["access_token"]]
    assert process.wait(60) == 0
    assert len(bench.globus.tasks) == 1


def test_a_consent_that_is_missing_is_named(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, kind=MAPPED)
    run = bench.upload({"a": b"x"})
    assert error(run) is ErrorClass.CREDENTIAL_REFUSED
    scope = f"all[*https://auth.globus.org/scopes/{bench.archive.id}/data_access]"
    assert scope in run.ads[0].text("TransferError")
    bench.globus.consent("alice", bench.archive.id)
    assert bench.upload({"a": b"x"}).succeeded


def test_no_such_collection(bench: Bench) -> None:
    run = bench.upload({"a": b"x"}, "globus://00000000-0000-4000-8000-000000000000/")
    assert error(run) is ErrorClass.NOT_FOUND
    assert "EndpointNotFound" in run.ads[0].text("TransferError")


def test_a_denied_directory_fails_alone(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, denied=("/no",))
    run = bench.upload({"yes/a": b"a", "no/b": b"b", "also/c": b"c", "no/d": b"d"})
    assert [ad["TransferSuccess"] for ad in run.ads] == [True, False, True, False]
    assert kind(run.ads[1]) is kind(run.ads[3]) is ErrorClass.PERMISSION_DENIED
    assert "PERMISSION_DENIED" in run.ads[1].text("TransferError")
    assert all(task.status == "FAILED" for task in bench.globus.tasks)
    assert not bench.at("no").exists()


def test_two_denied_directories_are_told_apart_from_a_good_one(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, denied=("/no", "/never"))
    bench.set(TASK_FILES="2")
    run = bench.upload({"no/b": b"b", "never/c": b"c", "yes/a": b"a"})
    assert [ad["TransferSuccess"] for ad in run.ads] == [False, False, True]


def test_a_missing_source_fails_alone_and_is_named(bench: Bench) -> None:
    bench.put("there", b"x")
    bench.put("secret", b"x")
    bench.globus.change(bench.archive.id, denied=("/secret",))
    run = bench.download("there", "missing", "secret")
    assert [ad["TransferSuccess"] for ad in run.ads] == [True, False, False]
    assert [kind(ad) for ad in run.ads[1:]] == [ErrorClass.NOT_FOUND, ErrorClass.PERMISSION_DENIED]
    assert "/missing" in run.ads[1].text("TransferError")
    assert len(bench.globus.tasks) == 1
    assert not (bench.scratch / "missing").exists()


def test_a_directory_of_which_a_file_is_missing_does_not_come(bench: Bench) -> None:
    bench.put("db/a", b"x")
    bench.put("db/b", b"x")
    bench.globus.change(bench.archive.id, denied=("/db/b",))
    (run,) = bench.starter().download([Wanted(bench.url("db/"), "db")])
    assert error(run) is ErrorClass.PERMISSION_DENIED
    assert "/db/b" in run.ads[0].text("TransferError")
    assert not (bench.scratch / "db").exists()


def test_a_full_quota(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, quota_bytes=10)
    run = bench.upload({"small": b"x", "large": b"x" * 100})
    assert [ad["TransferSuccess"] for ad in run.ads] == [True, False]
    assert kind(run.ads[1]) is ErrorClass.QUOTA_EXCEEDED


def test_a_collection_that_is_down(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, offline=True)
    run = bench.upload({"a": b"x"})
    assert error(run) is ErrorClass.CONNECT_FAILED
    assert run.exit_code == 11
    assert [task.fatal_error["code"] for task in bench.globus.tasks if task.fatal_error] == ["CANCELED"]


def test_a_paused_task_goes_on_or_is_given_up(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, paused=True)
    assert error(bench.upload({"a": b"x"})) is ErrorClass.SERVER_BUSY
    bench.set(STALL="60")
    process = bench.start({"a": b"x"})
    bench.until("it is paused", lambda: bench.globus.tasks[-1].is_paused and bench.globus.tasks[-1].status == "ACTIVE")
    bench.globus.change(bench.archive.id, paused=False)
    assert process.wait(60) == 0


def test_passing_trouble_is_waited_out(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, resets=3, corruptions=2)
    run = bench.upload(FILES)
    assert run.succeeded, run.printed
    assert bench.globus.tasks[0].faults == 5
    assert {name: bench.at(name).read_bytes() for name in FILES} == FILES


def test_a_person_cancels_the_task(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, rate_bytes_s=1000.0)
    process = bench.start({"a": b"x" * 50_000})
    task = bench.until("the task runs", lambda: bench.globus.tasks and bench.globus.tasks[0])
    with bench.globus.world.lock:
        task.end("FAILED", "CANCELED", "by a person")
    assert process.wait(60) == 1
    assert kind(bench.ads()[0]) is ErrorClass.PERMISSION_DENIED
    assert "a person has cancelled" in bench.ads()[0].text("TransferError")


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_service_that_is_busy_for_a_moment(bench: Bench, status: int) -> None:
    bench.globus.refuse(r"/v0.10/submission_id", status=status, times=2, headers={"Retry-After": "1"})
    bench.globus.refuse(r"/v0.10/task/[^/]+", status=status, times=2)
    assert bench.upload({"a": b"x"}).succeeded
    assert len(bench.globus.tasks) == 1


def test_more_tasks_than_may_wait(bench: Bench) -> None:
    refusal = bench.globus.refuse(r"/v0.10/transfer", status=409, code="TooManyPendingJobs", times=2)
    assert bench.upload({"a": b"x"}).succeeded
    assert refusal.times == 0


@pytest.mark.parametrize("status", [0, 503])
def test_a_lost_answer_makes_no_second_task(bench: Bench, status: int) -> None:
    bench.globus.refuse(r"/v0.10/transfer", status=status, acts=True)
    assert bench.upload(FILES).succeeded
    assert len(bench.globus.tasks) == 1
    assert len(bench.globus.calls("POST /v0.10/transfer")) == 2


def test_requests_that_are_refused_are_not_repeated(bench: Bench) -> None:
    bench.globus.refuse(r"/v0.10/transfer", status=400, code="ClientError.BadRequest", times=9)
    assert error(bench.upload({"a": b"x"})) is ErrorClass.BAD_REQUEST
    assert len(bench.globus.calls("POST /v0.10/transfer")) == 1
    assert not (bench.scratch / ".globusonline_plugin").exists()


# ---- leases, signals, crashes ---------------------------------------------------------------------------------------


def test_sigterm_cancels_the_task_at_once(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, rate_bytes_s=1000.0)
    process = bench.start({"a": b"x" * 500_000, "b": b"y"})
    bench.until("the task runs", lambda: bench.globus.tasks and bench.globus.tasks[0].bytes_transferred)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 11
    (task,) = bench.globus.tasks
    assert task.fatal_error and task.fatal_error["code"] == "CANCELED"
    assert kind(bench.ads()[0]) is ErrorClass.NOT_ATTEMPTED


def test_sigkill_leaves_a_task_that_ends_within_its_lease(bench: Bench) -> None:
    bench.set(LEASE="3")
    bench.globus.change(bench.archive.id, rate_bytes_s=1000.0)
    process = bench.start({"a": b"x" * 500_000})
    task = bench.until("the lease was renewed", lambda: bench.globus.tasks and
                       len(bench.globus.calls("PUT /v0.10/task/.*")) >= 4 and bench.globus.tasks[0])  # fmt: skip
    assert task.status == "ACTIVE"
    process.kill()
    process.wait()
    bench.until("the task has expired", lambda: task.status == "FAILED")
    assert task.fatal_error["code"] == "EXPIRED"


def test_a_call_after_a_kill_finds_the_task_again(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, rate_bytes_s=100e3)
    files = {"a": b"x" * 150_000, "b": b"y" * 1000}
    process = bench.start(files)
    bench.until("the task runs", lambda: bench.globus.tasks and bench.globus.tasks[0].bytes_transferred)
    process.kill()
    process.wait()
    assert bench.start(files).wait(60) == 0
    assert len(bench.globus.tasks) == 1
    assert [ad["DeveloperData"]["StageOutVerified"] for ad in bench.ads()] == ["sha256", "sha256"]


def test_calls_after_a_kill_that_ask_for_one_file_each_find_the_task_again(bench: Bench, tmp_path: Path) -> None:
    """A manager tries each file again when its own time has come."""
    bench.globus.change(bench.archive.id, rate_bytes_s=100e3)
    bench.environment["STAGEOUT_STATE_DIR"] = str(tmp_path)
    files = {"a": b"x" * 150_000, "b": b"y" * 1000, "c": b"z" * 1000}
    process = bench.start(files)
    bench.until("the task runs", lambda: bench.globus.tasks and bench.globus.tasks[0].bytes_transferred)
    process.kill()
    process.wait()
    for name in files:
        assert bench.start(files, only=name).wait(60) == 0
    assert len(bench.globus.tasks) == 1
    assert not list(tmp_path.glob("globusonline/*-*.json"))


@pytest.mark.parametrize("label", ["globus-submission", "globus-task", "globus-over"])
@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
def test_a_crash_at_each_durable_step(bench: Bench, tmp_path: Path, label: str, when: str) -> None:
    armed = tmp_path / "armed"
    armed.touch()
    bench.environment["STAGEOUT_FAULTS"] = f"{label}={when}@{armed}"
    process = bench.start(FILES)
    assert process.wait(60) == -signal.SIGKILL
    assert not armed.exists()
    assert bench.start(FILES).wait(60) == 0
    assert {name: bench.at(name).read_bytes() for name in FILES} == FILES
    moved = [task.files_transferred for task in bench.globus.tasks]
    assert sum(moved) == len(FILES), "something was sent twice"


@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
def test_a_crash_when_the_results_of_some_files_are_recorded(bench: Bench, tmp_path: Path, when: str) -> None:
    """At `globus-settled`: each call asks for one file of a task that has them all."""
    armed = tmp_path / "armed"
    bench.globus.change(bench.archive.id, rate_bytes_s=100e3)
    bench.environment.update(STAGEOUT_STATE_DIR=str(tmp_path), STAGEOUT_FAULTS=f"globus-settled={when}@{armed}")
    files = {"a": b"x" * 150_000, "b": b"y" * 1000, "c": b"z" * 1000}
    process = bench.start(files)
    bench.until("the task runs", lambda: bench.globus.tasks and bench.globus.tasks[0].bytes_transferred)
    process.kill()
    process.wait()
    armed.touch()
    assert bench.start(files, only="a").wait(60) == -signal.SIGKILL
    assert not armed.exists()
    for name in files:
        assert bench.start(files, only=name).wait(60) == 0
    assert {name: bench.at(name).read_bytes() for name in files} == files
    assert sum(task.files_transferred for task in bench.globus.tasks) == len(files), "something was sent twice"
    assert not list(tmp_path.glob("globusonline/*-*.json"))


@pytest.mark.parametrize("lasting", [True, False])
def test_a_call_whose_time_is_over(bench: Bench, tmp_path: Path, lasting: bool) -> None:
    """Below a manager the next call goes on with the task; from a starter there is no next call."""
    bench.globus.change(bench.archive.id, rate_bytes_s=8e3)  # ten seconds
    bench.environment["STAGEOUT_PLUGIN_LIFETIME_S"] = "4"
    if lasting:
        bench.environment["STAGEOUT_STATE_DIR"] = str(tmp_path)
    files = {"a": b"x" * 80_000}
    assert bench.start(files).wait(60) == 11
    assert kind(bench.ads()[0]) is ErrorClass.DEADLINE
    (task,) = bench.globus.tasks
    assert (task.status == "ACTIVE") is lasting
    bench.globus.change(bench.archive.id, rate_bytes_s=None)
    bench.environment["STAGEOUT_PLUGIN_LIFETIME_S"] = "60"
    assert bench.start(files).wait(60) == 0
    assert len(bench.globus.tasks) == (1 if lasting else 2)


def test_a_task_whose_record_is_lost_is_found_by_its_label(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, rate_bytes_s=25e3)  # it still runs when the second call starts
    files = {"a": b"x" * 150_000}
    process = bench.start(files)
    bench.until("the task runs", lambda: bench.globus.tasks and bench.globus.tasks[0].bytes_transferred)
    process.kill()
    process.wait()
    for path in bench.scratch.glob(".globusonline_plugin/*.json"):
        path.unlink()
    assert bench.start(files).wait(60) == 0
    assert len(bench.globus.tasks) == 1


def test_a_service_that_restarts_meanwhile(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, rate_bytes_s=200e3)
    process = bench.start({f"d/{number}": bytes([number]) * 100_000 for number in range(5)})
    bench.until("the task runs", lambda: bench.globus.tasks and bench.globus.tasks[0].files_transferred)
    bench.globus.stop()
    bench.globus.start()
    assert process.wait(60) == 0
    assert len(bench.globus.tasks) == 1


def test_a_disk_that_does_not_take_the_record_makes_no_task(bench: Bench) -> None:
    bench.environment["STAGEOUT_FAULTS"] = "globus-submission=ENOSPC"
    assert error(bench.upload({"a": b"x"})) is ErrorClass.NO_SPACE_LOCAL
    assert bench.globus.tasks == []


def test_settings_that_lead_elsewhere_are_not_taken_from_the_environment(bench: Bench) -> None:
    bench.environment["GLOBUS_SDK_SERVICE_URL_TRANSFER"] = "http://127.0.0.1:1/"
    assert bench.upload({"a": b"x"}).succeeded


def test_no_secret_leaves_the_plugin(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, offline=True)
    run = bench.upload({"a": b"x"})
    secret = json.loads((bench.creds / "globus.use").read_text())["access_token"]
    assert secret not in run.printed + str(run.ads)
