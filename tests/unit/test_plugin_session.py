"""One call of a plugin, from outside: the executable under the embedded starter."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from plugin_site import DEADLINE_S, Bench

from stageout.core.classads import ClassAd
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.results import exit_status
from stageout.testing.starter import (
    PREALLOCATED_BYTES,
    Result,
    Wanted,
    dropped,
    filtered,
    read_results,
)
from tests.polling import wait_for


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_success_ad(bench):
    before = int(time.time())
    run = bench.download("ok")
    (ad,) = run.ads
    assert run.succeeded
    assert run.printed == ""
    assert filtered(ad) == ad
    assert before <= ad.pop("TransferStartTime") <= ad.pop("TransferEndTime") <= time.time()
    developer = ad.pop("DeveloperData")
    assert 0 <= developer.pop("StageOutSeconds") <= 60
    assert ad == {
        "TransferSuccess": True,
        "TransferFileName": str(bench.scratch / "f0"),
        "TransferUrl": "script://host/ok",
        "TransferProtocol": "script",
        "TransferType": "download",
        "TransferFileBytes": 5,
        "TransferTotalBytes": 7,
        "ConnectionTimeSeconds": 0.25,
    }
    assert developer.pop("StageOutVersion")
    assert developer.pop("TransferLocalMachineName")
    assert developer == {
        "TransferHostName": "host",
        "TransferTries": 1,
        "StageOutAttempts": 1,
        "StageOutVerified": "md5",
        "StageOutDigests": "crc32:ff md5:0a",
        "Mirror": "m1",
    }


def test_every_error_class_becomes_a_complete_ad(bench):
    run = bench.download(*(f"fail/{kind.name}/9.2" for kind in ErrorClass))
    assert len(run.ads) == len(ErrorClass)
    for kind, ad in zip(ErrorClass, run.ads):
        (error,) = ad["TransferErrorData"]
        assert not dropped(ad)
        assert filtered(ad)["TransferErrorData"] == [error]
        assert error["ErrorType"] == kind.value.error_type
        assert error.get("FailureType") == kind.value.failure_type
        assert error["ErrorCode"] == ad["DeveloperData"]["StageOutErrorCode"] == kind.code
        assert error["Retryable"] == (10 if kind.retryable else -1)
        assert ad["TransferError"] == error["ErrorString"] == f"scripted {kind.name}"


@pytest.mark.parametrize("kind", list(ErrorClass), ids=lambda kind: kind.name)
def test_every_error_class_has_its_exit_status(kind):
    assert exit_status([TransferFailure(kind, "")]) == (11 if kind.retryable else 1)


@pytest.mark.parametrize(
    ("behaviours", "status"),
    [
        (["ok", "fail/SERVER_BUSY"], 11),
        (["fail/SERVER_BUSY", "fail/CONNECT_FAILED"], 11),
        (["fail/SERVER_BUSY", "fail/NOT_FOUND", "ok"], 1),
        (["ok", "ok"], 0),
    ],
)
def test_exit_status(bench, behaviours, status):
    run = bench.download(*behaviours)
    assert run.exit_code == status
    assert [ad["TransferSuccess"] for ad in run.ads] == [what == "ok" for what in behaviours]
    assert run.subcode == status << 8


def test_failed_attempts_are_told_even_after_success(bench):
    run = bench.download("flaky/2", "flaky/9")
    elements = [ad["TransferErrorData"] for ad in run.ads]
    assert [item["ErrorString"] for item in elements[0]] == ["attempt 0", "attempt 1"]
    assert [item["Retryable"] for item in elements[0]] == [4, 4]
    assert 1 <= len(elements[1]) <= 5
    assert elements[1][-1]["ErrorString"] == "attempt 8"
    assert [ad["DeveloperData"]["StageOutAttempts"] for ad in run.ads] == [3, 10]
    assert run.succeeded


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("raise", "RuntimeError in the plugin: something ,, odd in two lines, SHADOW"),
        ("exit", "SystemExit in the plugin: 0"),
        ("nothing", "returned str, not an Outcome"),
        ("nosuch", "AttributeError in the plugin"),
    ],
)
def test_a_broken_protocol_class_gets_its_ad(bench, behaviour, words):
    run = bench.download("ok", behaviour)
    assert run.exit_code == 11
    assert run.ads[0]["TransferSuccess"] is True
    assert words in run.ads[1]["TransferError"]
    assert run.ads[1]["TransferErrorData"][0]["ErrorType"] == "Parameter"
    assert run.ads[1]["TransferErrorData"][0]["PluginVersion"] == "7.1"
    assert run.ads[1]["TransferErrorData"][0]["PluginLaunched"] is True


def test_a_protocol_that_cannot_be_loaded_gets_its_ads(bench):
    bench.plugin.write_text(bench.plugin.read_text().replace("__main__:Scripted", "no_such_module:Thing"))
    run = bench.download("ok", "ok")
    assert run.exit_code == 11
    assert ["No module named 'no_such_module'" in ad["TransferError"] for ad in run.ads] == [True, True]
    assert "Traceback" in run.printed


def test_messages_are_clean(bench):
    text = 'a\nb\x00\x1b[31m || c ; STARTER x;shadow y |Error: z \u00e9 "q"\\ ' + "long " * 500
    (bench.scratch / "f0.text").write_text(text)
    (ad,) = bench.download("say").ads
    said = ad["TransferError"]
    assert said.startswith('a b [31m ,, c , STARTER x,shadow y ,Error: z \u00e9 "q"\\ long')
    assert said.isprintable()
    assert len(said) <= 500
    assert said.endswith(" ...")


def test_no_secrets_anywhere(bench):
    secrets = ["hunter2secret", "sEcReTsIgNaTuRe", "eyJ0b2tlbjEyMzQ1Njc4OTA", "AKIA00EXAMPLE"]
    url = f"script://user:{secrets[0]}@host/say/x?X-Amz-Signature={secrets[1]}&plain={secrets[3]}"
    text = (
        f"GET {url} failed; Authorization: Bearer {secrets[2]}; sig was {secrets[1]}, user {secrets[0]}, {secrets[3]}"
    )
    (bench.scratch / "f0.text").write_text(text)
    (run,) = bench.starter().download([Wanted(url, "f0")])
    outfile = (bench.scratch / ".scripted_plugin.out").read_text()
    for secret in secrets:
        assert secret not in outfile
        assert secret not in run.printed
    assert run.ads[0]["TransferUrl"] == "script://host/say/x"
    assert "GET script://host/say/x failed" in run.ads[0]["TransferError"]


def test_credentials(bench, tmp_path):
    bench.credentials = tmp_path / "creds"
    bench.credentials.mkdir()
    token = "tok3nVeryLongAndSecret"
    (bench.credentials / "svc_hdl.use").write_text(json.dumps({"access_token": token}))
    run = bench.download("credential")
    assert run.ads[0]["TransferError"] == "refused: *** and Bearer ***"
    assert run.ads[0]["TransferErrorData"][0]["ShouldRefresh"] is True
    assert token not in run.printed
    assert "have it" in run.printed
    (bench.credentials / "svc_hdl.use").write_text(f"{token}\n")
    assert bench.download("credential").ads[0]["TransferError"] == "refused: *** and Bearer ***"
    for broken in ("{", '{"other": 1}', ""):
        (bench.credentials / "svc_hdl.use").write_text(broken)
        assert bench.download("credential").ads[0]["DeveloperData"]["StageOutErrorCode"] == 30
    bench.credentials = None
    (ad,) = bench.download("credential").ads
    assert ad["DeveloperData"]["StageOutErrorCode"] == ErrorClass.CREDENTIAL_MISSING.code
    assert "use_oauth_services" in ad["TransferError"]


def told(bench, index=0):
    return json.loads((bench.scratch / f"f{index}").read_text())


def test_surroundings_reach_the_protocol(bench):
    bench.job_ad = {"Owner": "alice"}
    bench.machine_ad = {"SlotID": 3, "STAGEOUT_TEST_KNOB": "machine"}
    bench.environment["HTTP_X"] = "1"
    assert bench.download("tell").succeeded
    seen = told(bench)
    assert (seen["owner"], seen["slot"], seen["knob"]) == ("alice", 3, "machine")
    assert 71_000 < seen["remaining"] <= 71_700
    bench.environment["STAGEOUT_TEST_KNOB"] = "environment"
    bench.download("tell")
    assert told(bench)["knob"] == "environment"


def test_plugin_data_protocol_4(bench):
    bench.job_ad = {
        "PluginData": ClassAd({"a": 1, "b": 1}),
        "script_PluginData": ClassAd({"b": 2}),
        "zzz_PluginData": 1,
    }
    assert bench.download("tell", "tell").succeeded
    assert [told(bench, index)["data"] for index in (0, 1)] == ["{'a': 1, 'b': 2}"] * 2


def test_plugin_data_applies_to_later_files_only(bench):
    files = [f'[ Url = "script://h/tell"; LocalFileName = "{bench.scratch}/f{i}" ]' for i in range(3)]
    text = (
        files[0]
        + "[ PluginData = [ a = 1 ] ]"
        + files[1]
        + '[ Protocol="script"; SCRIPT_pluginDATA=[ b = 2 ] ]'
        + files[2]
    )
    assert bench.starter().run(bench.plugin, text, False).succeeded
    assert [told(bench, index)["data"] for index in range(3)] == ["{}", "{'a': 1}", "{'a': 1, 'b': 2}"]


def test_plugin_data_of_the_file_comes_before_that_of_the_call(bench):
    file = f'[ Url = "script://h/tell"; LocalFileName = "{bench.scratch}/f0"; PluginData = [ a = 2 ] ]'
    assert bench.starter().run(bench.plugin, "[ PluginData = [ a = 1; b = 1 ] ]" + file, False).succeeded
    assert told(bench)["data"] == "{'a': 2, 'b': 1}"


def test_plugin_data_protocol_2(bench):
    data = 'PluginData = [ a = 1 ]; script_PluginData = [ c = "x" ]'
    text = f'[ Url = "script://h/tell"; LocalFileName = "{bench.scratch}/f0"; {data} ]'
    assert bench.starter().run(bench.plugin, text, False).succeeded
    assert told(bench)["data"] == "{'a': 1, 'c': 'x'}"


def test_files_move_in_parallel_and_results_keep_their_order(bench):
    bench.environment["STAGEOUT_CONCURRENCY"] = "6"
    run = bench.download(*["together/6"] * 6)
    assert run.succeeded
    assert [Path(ad["TransferFileName"]).name for ad in run.ads] == [f"f{index}" for index in range(6)]


def test_concurrency_is_bounded(bench):
    bench.environment["STAGEOUT_CONCURRENCY"] = "1"
    bench.environment["STAGEOUT_PLUGIN_LIFETIME_S"] = "1"
    run = bench.download(*["together/2"] * 2)
    assert [ad["TransferSuccess"] for ad in run.ads] == [False, False]
    assert len(list(bench.scratch.glob("*.here"))) == 1


def test_uploads_to_the_same_url_go_one_after_the_other(bench):
    """So the last one of the list stays, as where a plugin sends one file at a time."""
    bench.environment["STAGEOUT_PLUGIN_LIFETIME_S"] = "1"
    assert bench.upload("together/2", "together/2", "ok").exit_code == 11
    assert len(list(bench.scratch.glob("*.here"))) == 1


def test_own_deadline(bench):
    bench.environment["STAGEOUT_PLUGIN_LIFETIME_S"] = "1"
    run = bench.download("ok", "sleep/60", "steps", *["sleep/60"] * 8)
    assert run.duration_s < 15
    assert run.exit_code == 11
    assert run.ads[0]["TransferSuccess"] is True
    for ad in run.ads[1:]:
        assert ad["DeveloperData"]["StageOutErrorCode"] == ErrorClass.DEADLINE.code
        assert "STAGEOUT_PLUGIN_LIFETIME_S" in ad["TransferError"]
    assert not (bench.scratch / "f2.part").exists()


def test_sigterm(bench):
    process = bench.start("ok", "sleep/60", "steps", "fail/NOT_FOUND")
    wait_for((bench.scratch / "f1.begun").exists, "the transfer to begin")
    wait_for((bench.scratch / "f2.part").exists, "the other transfer to begin")
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=DEADLINE_S)[1]
    ads, unread = bench.ads()
    assert process.returncode in (1, 11)
    assert not unread
    assert [ad["TransferSuccess"] for ad in ads] == [True, False, False, False]
    assert "signal 15" in ads[1]["TransferError"]
    assert not (bench.scratch / "f2.part").exists()
    assert "finished" in said


def test_sigkill_leaves_an_ad_for_each_file(bench):
    process = bench.start("ok", "sleep/60", "sleep/60")
    wait_for(lambda: bench.ads()[0] and bench.ads()[0][0]["TransferSuccess"], "the first result")
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    ads, unread = bench.ads()
    assert not unread
    assert [ad["TransferSuccess"] for ad in ads] == [True, False, False]
    assert ads[2]["TransferErrorData"][0]["ErrorCode"] == ErrorClass.NOT_ATTEMPTED.code
    assert (bench.scratch / "out").stat().st_size == PREALLOCATED_BYTES


def test_a_plugin_that_dies_in_the_protocol_has_told_its_ads(bench):
    run = bench.download("die")
    assert run.exit_signal == signal.SIGKILL
    assert run.ads[0]["TransferSuccess"] is False


def test_ends_when_its_parent_is_gone(bench):
    """The starter can be killed alone; a plugin that goes on would write into a dead sandbox."""
    shell = bench.start("tell", "sleep/60", wrapper=("/bin/sh", "-c", '"$0" "$@"; exit 0'))
    wait_for((bench.scratch / "f1.begun").exists, "the transfer to begin")
    wait_for(lambda: (bench.scratch / "f0").exists() and (bench.scratch / "f0").read_text(), "the plugin's pid")
    pid = told(bench)["pid"]
    shell.kill()
    shell.wait()
    wait_for(lambda: not _alive(pid), "the plugin to end")
    assert "starter of this plugin is gone" in bench.ads()[0][1]["TransferError"]
    shell.stderr.close()


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_noise_never_reaches_stdout(bench):
    run = bench.download("noise")
    assert run.succeeded
    assert run.printed == ""
    run = bench.download("noise", "fail/NOT_FOUND")
    assert "noise on std" in run.printed
    assert len(run.printed) < 16 * 1024


def test_a_child_does_not_hold_the_transfer(bench):
    run = bench.download("child")
    os.kill(int((bench.scratch / "f0").read_text()), signal.SIGKILL)
    assert run.succeeded
    assert run.duration_s < 20


def test_descriptors_0_to_2_are_not_condors(bench):
    bench.download("tell")
    null, *pipes = told(bench)["files"]
    assert null == "/dev/null"
    assert [name.startswith("pipe:") for name in pipes] == [True, True]


def test_two_files_of_one_name(bench):
    (run,) = bench.starter().download([Wanted("script://a/ok", "same"), Wanted("script://b/ok", "./same")])
    assert [ad["TransferSuccess"] for ad in run.ads] == [True, False]
    assert "script://a/ok is written to the same file same" in run.ads[1]["TransferError"]
    assert run.exit_code == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no file"),
        ("[ ]", "names no file"),
        ("[ PluginData = [ a = 1 ] ]", "names no file"),
        ('[ Url = 5; LocalFileName = "/x" ]', "must be strings"),
        ('[ Url = "script://h/ok" ]', "must be strings"),
        ('[ Url = "/no/url"; LocalFileName = "x" ]', "not a URL"),
        ('[ Url = "ftp://h/x"; LocalFileName = "x" ]', "ftp is not for this plugin, which moves script, other"),
        ('[ Url = "script://h/ok"; LocalFileName = "x" ][ Url = "scr', "the input file is broken"),
        ("garbage", "the input file is broken"),
    ],
)
def test_bad_requests_get_an_ad(bench, text, words):
    run = bench.starter().run(bench.plugin, text, False)
    assert run.exit_code == 1
    assert run.ads
    assert all(ad["TransferSuccess"] is False for ad in run.ads)
    assert all(words in ad["TransferError"] for ad in run.ads)
    assert not (bench.scratch / "x").exists()


def test_bad_arguments(bench):
    out = bench.scratch / "out"
    out.write_text(" " * 500)
    for arguments in (
        ["-outfile", out],
        ["-infile", "/absent", "-outfile", out],
        ["-outfile", out, "-uplaod", "-infile", out],
    ):
        done = subprocess.run([bench.plugin, *arguments], capture_output=True, text=True, check=False)
        (ad,), unread = read_results(out.read_text())
        assert (done.returncode, unread, done.stdout) == (1, "", "")
        assert ad["TransferErrorData"][0]["ErrorCode"] == ErrorClass.BAD_REQUEST.code
    for arguments in ([], ["-help"], ["-infile", "x"], ["a", "b"]):
        done = subprocess.run([bench.plugin, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "usage: PLUGIN -classad" in done.stderr
    done = subprocess.run([bench.plugin, "-infile", out, "-outfile", "/nowhere/x"], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"cannot write the output file" in done.stderr


def test_single_file_form(bench):
    target = bench.scratch / "x"
    done = subprocess.run([bench.plugin, "script://host/ok", target], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert target.read_bytes() == b"12345"
    assert 'TransferUrl = "script://host/ok"' in done.stdout.split("\n")
    assert "TransferSuccess = true" in done.stdout.split("\n")
    done = subprocess.run(
        [bench.plugin, target, "script://host/fail/NOT_FOUND"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert 'TransferError = "scripted NOT_FOUND"' in done.stdout.split("\n")
    assert 'TransferType = "upload"' in done.stdout.split("\n")


def test_upload_of_a_missing_file_fails_alone(bench):
    (bench.scratch / "f1").write_bytes(b"1")
    os.mkfifo(bench.scratch / "pipe")
    names = ["f0", "f1", "pipe"]
    (run,) = bench.starter().upload([Wanted("script://h/ok", name) for name in names])
    assert [ad["TransferSuccess"] for ad in run.ads] == [False, True, False]
    assert "f0 does not exist" in run.ads[0]["TransferError"]
    assert "pipe is not an ordinary file" in run.ads[2]["TransferError"]
    assert run.exit_code == 1


def test_a_directory_is_nothing_to_send(bench):
    """HTCondor 23.9 names directories beside each of the files in them."""
    (bench.scratch / "d").mkdir()
    (bench.scratch / "d/f").write_bytes(b"1")
    (run,) = bench.starter().upload([Wanted("script://h/fail/NOT_FOUND", "d"), Wanted("script://h/ok", "d/f")])
    assert [ad["TransferSuccess"] for ad in run.ads] == [True, True]
    assert run.ads[0]["TransferTotalBytes"] == 0
    assert run.exit_code == 0


def test_raw_names_are_encoded_behind_the_output_destination(bench):
    bench.job_ad = {"OutputDestination": "script://host/tell"}
    names = ["a#b", "50%25", "q?x=1", "sp ace"]
    wanted = []
    for name in names:
        (bench.scratch / name).write_text("")
        wanted.append(Wanted(f"script://host/tell/{name}", name))
    (run,) = bench.starter().upload(wanted)
    assert run.succeeded
    encoded = [json.loads((bench.scratch / name).read_text())["encoded"].rpartition("/")[2] for name in names]
    assert encoded == ["a%23b", "50%2525", "q%3Fx=1", "sp%20ace"]


def test_methods_ignore_case_and_prefixes(bench):
    wanted = [Wanted("SVC.hdl+Script://h/ok", "a"), Wanted("OTHER://h/ok", "b")]
    (run,) = bench.starter().download(wanted)
    assert run.succeeded
    assert [ad["TransferProtocol"] for ad in run.ads] == ["script", "other"]


def test_unreadable_disk_and_lifetime_kill(bench):
    bench.lifetime_s = 2
    run = bench.download("ok", "sleep/60")
    assert run.result is Result.TIMED_OUT
    assert run.subcode == 62
    assert [ad["TransferSuccess"] for ad in run.ads] == [True, False]


def test_python_is_the_one_under_test(bench):
    assert bench.plugin.read_text().startswith(f"#!{sys.executable}")
