"""Uploads that a plugin offers to the sandbox manager: a stand-in for the client is put in its place."""

import json
import os

import pytest
from plugin_site import ROOT, Bench

from stageout.core.classads import ClassAd
from stageout.testing.starter import Wanted, filtered

CLIENT = """
import json, os, sys, types
from collections import namedtuple

Offer = namedtuple("Offer", "accepted reason receipt code", defaults=("NoAgent",))
Carried = namedtuple("Carried", "context contents")

def offer(requests, plugin, carried=None):
    with open(os.environ["OFFERS"], "a") as file:
        file.write(json.dumps([requests, plugin]) + "\\n")
    if carried:
        given = carried.context
        names = [[item.file_name, item.size_bytes] for item in given.credentials]
        told = [names, [content.decode() for content in carried.contents], given.job_ad, given.plugin_data]
        with open(os.environ["OFFERS"] + ".carried", "w") as file:
            json.dump(told, file)
    how = os.environ["ANSWER"]
    if how == "raise":
        raise OSError("broken || pipe")
    receipt = {"Ticket": "ab12", "ManagerName": "sm@node", "ManagerKey": "", "Files": len(requests), "Bytes": 10}
    return Offer(True, "", receipt) if how == "yes" else Offer(False, how, {})

module = types.ModuleType("stageout.handoff.client")
module.offer = offer
module.Carried = Carried
sys.modules["stageout.handoff"] = types.ModuleType("stageout.handoff")
sys.modules["stageout.handoff.client"] = module
"""


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture
def client(bench, tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CLIENT)
    bench.environment.update(PYTHONPATH=f"{folder}:{ROOT}", OFFERS=str(tmp_path / "offers"), ANSWER="yes")
    return lambda: [json.loads(line) for line in (tmp_path / "offers").read_text().splitlines()]


def test_handed_off(bench, client):
    run = bench.upload("die", "die")
    assert run.succeeded
    assert run.printed == ""
    urls = [["script://host/die", str(bench.scratch / f"f{index}")] for index in (0, 1)]
    assert client() == [[urls, str(bench.plugin)]]
    for ad in run.ads:
        assert filtered(ad) == ad
        assert (ad["TransferSuccess"], ad["TransferProtocol"]) == (True, "stageout")
        assert (ad["TransferTotalBytes"], ad["TransferFileBytes"]) == (5, 5)
        assert "TransferError" not in ad
        assert "TransferErrorData" not in ad
    assert run.ads[0]["DeveloperData"] == {
        "StageOutReceipt": {"Ticket": "ab12", "ManagerName": "sm@node", "ManagerKey": "", "Files": 2, "Bytes": 10}
    }
    assert run.ads[1]["DeveloperData"] == {"StageOutReceipt": {"Ticket": "ab12"}}


@pytest.mark.parametrize(
    ("answer", "reason", "code"),
    [
        ("no agent seen", "no agent seen", "NoAgent"),
        ("raise", "hand-off failed: OSError: broken ,, pipe", "Failed"),
    ],
)
def test_not_taken_over_is_uploaded_now_and_said(bench, client, answer, reason, code):
    bench.environment["ANSWER"] = answer
    run = bench.upload("ok", "fail/NOT_FOUND")
    assert [ad["TransferProtocol"] for ad in run.ads] == ["script", "script"]
    assert [ad["DeveloperData"]["StageOutSynchronous"] for ad in run.ads] == [reason, reason]
    assert [ad["DeveloperData"]["StageOutSynchronousCode"] for ad in run.ads] == [code, code]
    assert reason in run.printed
    assert len(client()) == 1


def test_never_offered(bench, client, tmp_path):
    assert bench.download("ok").succeeded
    bench.environment["STAGEOUT_MOVER"] = "1"
    (ad,) = bench.upload("ok").ads
    assert "StageOutSynchronous" not in ad["DeveloperData"]
    assert ad["DeveloperData"]["StageOutVerified"] == "md5"
    del bench.environment["STAGEOUT_MOVER"]
    (run,) = bench.starter().upload([Wanted("script://h/ok", "f0"), Wanted("script://h/ok", "missing")])
    assert "cannot be uploaded" in run.ads[0]["DeveloperData"]["StageOutSynchronous"]
    assert not (tmp_path / "offers").exists()


def carried(bench, tmp_path, *wanted: str, status: bool = True):
    """The items that go along with these uploads."""
    (tmp_path / "offers.carried").unlink(missing_ok=True)
    for index in range(len(wanted)):
        (bench.scratch / f"f{index}").write_bytes(b"12345")
    (run,) = bench.starter().upload([Wanted(url, f"f{index}") for index, url in enumerate(wanted)])
    assert run.succeeded
    found = tmp_path / "offers.carried"
    return json.loads(found.read_text()) if found.exists() else run.ads[0]["DeveloperData"].get("StageOutSynchronous")


@pytest.fixture
def tokens(bench, tmp_path):
    bench.credentials = tmp_path / "creds"
    bench.credentials.mkdir()
    for name in ("vault_team", "vault", "other", "vaults"):
        (bench.credentials / f"{name}.use").write_text(f"secret-of-{name}")
    return bench.credentials


def test_only_the_credentials_that_are_needed_go_along(bench, client, tmp_path, tokens):
    proxy = tmp_path / "proxy"
    proxy.write_text("certificate")
    bench.environment["X509_USER_PROXY"] = str(proxy)
    assert carried(bench, tmp_path, "script://h/ok") is None
    names, contents, job_ad, data = carried(bench, tmp_path, "vault.team+script://h/ok", "vault.team+script://h/ok")
    assert (names, contents) == ([["vault_team.use", 20]], ["secret-of-vault_team"])
    assert job_ad == data == ""
    assert carried(bench, tmp_path, "other://h/ok")[:2] == [[["x509_proxy", 11]], ["certificate"]]
    assert carried(bench, tmp_path, "vault+other://h/ok")[1] == ["secret-of-vault"]
    bench.environment["SCRIPTED_CREDENTIALS"] = "vault"
    assert carried(bench, tmp_path, "script://h/ok")[1] == ["secret-of-vault", "secret-of-vault_team"]


def test_the_proxy_of_the_job_goes_along_though_only_its_ad_names_it(bench, client, tmp_path):
    (bench.scratch / "proxy").write_text("certificate")
    bench.job_ad = {"Owner": "alice", "x509userproxy": "/home/alice/proxy"}
    assert carried(bench, tmp_path, "script://h/ok") is None
    assert carried(bench, tmp_path, "other://h/ok")[:2] == [[["x509_proxy", 11]], ["certificate"]]
    (bench.scratch / "proxy").unlink()
    assert carried(bench, tmp_path, "other://h/ok") is None


def test_a_credential_that_cannot_be_taken_along_makes_the_upload_synchronous(bench, client, tmp_path, tokens):
    assert "missing.use" in carried(bench, tmp_path, "missing+script://h/ok")
    (tokens / "vault.use").write_text(" ")
    assert "vault.use is empty" in carried(bench, tmp_path, "vault+script://h/ok")
    (tokens / "vault.use").write_text("x" * 300_000)
    assert "more than" in carried(bench, tmp_path, "vault+script://h/ok")
    (tokens / "vault.use").unlink()
    os.mkfifo(tokens / "vault.use")
    assert "not a regular file" in carried(bench, tmp_path, "vault+script://h/ok")
    bench.credentials = None
    assert "use_oauth_services = vault" in carried(bench, tmp_path, "vault+script://h/ok")
    bench.environment["SCRIPTED_CREDENTIALS"] = "vault"
    assert "use_oauth_services = vault" in carried(bench, tmp_path, "script://h/ok")
    bench.environment["X509_USER_PROXY"] = str(tmp_path / "none")
    del bench.environment["SCRIPTED_CREDENTIALS"]
    assert "credential none: No such file" in carried(bench, tmp_path, "other://h/ok")
    assert not (tmp_path / "offers").exists()


def test_data_and_attributes_go_along(bench, client, tmp_path):
    bench.job_ad = {"PluginData": ClassAd({"a": 1}), "other_PluginData": "x", "Owner": "alice", "ClusterId": 7}
    assert carried(bench, tmp_path, "script://h/ok")[2:] == ["", "[ PluginData = [ a = 1 ] ]"]
    bench.environment["SCRIPTED_ATTRIBUTES"] = "owner Nothing"
    _, _, job_ad, data = carried(bench, tmp_path, "other://h/ok")
    assert (job_ad, data) == ('[ owner = "alice" ]', '[ PluginData = [ a = 1 ]; other_PluginData = "x" ]')


def test_without_a_client_uploads_go_on(bench):
    """The hand-off client may do anything, or not be installed at all."""
    bench.environment["PYTHONPATH"] = f"{bench.scratch.parent}:{ROOT}"
    (bench.scratch.parent / "sitecustomize.py").write_text("import sys; sys.modules['stageout.handoff.client'] = None")
    (ad,) = bench.upload("ok").ads
    assert ad["TransferSuccess"] is True
    assert ad["DeveloperData"]["StageOutSynchronous"].startswith("hand-off failed")
