"""The doctor's checks on machines that do not exist: each fault is found, named, and told how to be repaired."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from doctor_machine import (
    ANSWER,
    GB,
    KEY,
    NOW,
    OTHER_KEY,
    OURS,
    SETTINGS,
    STOCK,
    Fake,
    manager_ad,
    manager_ad_of,
    manager_answer_of,
    notice,
    seen_file,
    slot_of_a_node_behind,
)

from stageout.cli.doctor import alone, config, node, report
from stageout.cli.doctor.config import AGENT_IN_SPOOL
from stageout.cli.doctor.findings import Finding, Level, Machine, Ran, Role, Unseen, names_of
from stageout.cli.doctor.machine import ThisMachine
from stageout.cli.doctor.pilot import pilot_end
from stageout.cli.main import main
from stageout.core import front_end
from stageout.core.children import having
from stageout.core.classads import ClassAd


def examine(machine: Fake) -> list[Finding]:
    return report.examine(machine, [Role.AP, Role.EP])


def test_all_is_well() -> None:
    busy = {"Name": "slot1_1@node", "State": "Claimed", "Activity": "Busy"}
    job = {"GlobalJobId": "ap#1.0#1", "RemoteUser": "alice@x", "NumShadowStarts": 1}
    findings = examine(Fake(own_slots=[ClassAd({**busy, **job})]))
    assert [item for item in findings if item.level is not Level.OK] == []
    assert len(findings) >= 25
    assert all(item.text and not item.remedy for item in findings)


def unseen(machine: Fake) -> None:
    """A machine of which nothing can be looked at."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise Unseen("it does not answer")

    for name in ("ads", "ask_daemon", "slots", "version", "manager_answer", "try_handoff", "stat", "processes"):
        setattr(machine, name, refuse)


def without_rights(machine: Fake) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", "/x")

    for name in ("stat", "read", "manager_answer", "free_bytes"):
        setattr(machine, name, refuse)


def test_a_check_reports_the_same_names_whether_it_can_run_or_not() -> None:
    spoils = [lambda machine: None, unseen, without_rights, *(spoil for *_, spoil in FAULTS)]
    for role, checks in report.CHECKS.items():
        wanted = {name for check in checks for name in names_of(check)}
        for spoil in spoils:
            machine = Fake()
            spoil(machine)
            seen = {item.name for item in report.examine(machine, [role]) if " " not in item.name}
            assert seen == wanted, spoil


def tiny_disk(machine: Fake) -> None:
    machine.total_free = (12 << 20, 11 << 20)


def values(**changes: str) -> Callable[[Fake], None]:
    return lambda machine: machine.values.update(changes)


def has(**changes: Any) -> Callable[[Fake], None]:
    def spoil(machine: Fake) -> None:
        for name, value in changes.items():
            setattr(machine, name, value)

    return spoil


def file(path: str, what: Any) -> Callable[[Fake], None]:
    return lambda machine: machine.files.update({path: what})


def no_file(path: str) -> Callable[[Fake], None]:
    def spoil(machine: Fake) -> None:
        del machine.files[path]

    return spoil


def collector(**kinds: list[ClassAd]) -> Callable[[Fake], None]:
    return lambda machine: machine.in_collector.update(kinds)


def flocks(**pools: list[ClassAd]) -> Callable[[Fake], None]:
    def spoil(machine: Fake) -> None:
        machine.values["FLOCK_TO"] = "far"
        machine.other_pools = pools

    return spoil


def policy(answer: Any) -> Callable[[Fake], None]:
    def spoil(machine: Fake) -> None:
        machine.values.update(STAGEOUT_POLICY_URL="https://policy:1/", STAGEOUT_POLICY_TOKEN="/token")
        machine.texts["/token"] = "secret\n"
        machine.policy = answer

    return spoil


FORGED = (
    manager_ad()["StageOutPayload"].replace('"key":""', f'"key":"{KEY.public}"').replace('"number":1', '"number":2')
)


#: Of a plugin that nobody else stands in for.
BOX = ANSWER.replace("http,https", "box")


def front_end_of(plugin: str, seen: str) -> Callable[[Fake], None]:
    """A front end that is registered for a plugin, made when the plugin's file was so."""
    path = "/usr/local/libexec/stageout/x_plugin"

    def spoil(machine: Fake) -> None:
        machine.values["FILETRANSFER_PLUGINS"] = f"{path}, {OURS}"
        machine.files[plugin] = machine.files[path] = Path(__file__).stat()
        machine.texts[path] = f"#!/bin/sh\n{front_end._MARK}\nplugin={plugin}\n{seen}\n"
        machine.answers[path] = Ran(0, BOX, 0.01)

    return spoil


def manager(**facts: Any) -> Callable[[Fake], None]:
    said = ClassAd({"Manager": "ep@node", "Uid": 0, "BytesAtRisk": 0, **facts})
    return lambda machine: setattr(machine, "manager", said)


def without_stored_answer(machine: Fake) -> None:
    machine.texts[OURS] = '[ -f "$0.answer" ] && . "$0.answer"\nfrom stageout.plugin import run'


def with_stored_answer(machine: Fake) -> None:
    without_stored_answer(machine)
    machine.files[OURS] = Path(__file__).stat()
    machine.files[f"{OURS}.answer"] = seen_file(mode=0o644)
    machine.texts[f"{OURS}.answer"] = "# /lib/module.py\n"


def answer(path: str, ran: Ran) -> Callable[[Fake], None]:
    return lambda machine: machine.answers.update({path: ran})


ATTRS = SETTINGS["PROTECTED_JOB_ATTRS"]
BUSY = ClassAd({"Name": "slot1_1@node", "State": "Claimed", "Activity": "Busy", "RemoteUser": "alice@x"})
SLOT_WITH_REPORT = ClassAd(
    {
        **manager_ad(KEY),
        "MyType": "Machine",
        "Name": "slot1@node",
        "StageOutAccept": False,
        "StageOutHeartbeat": int(NOW),
    }
)

FAULTS: list[tuple[str, Level, str, Callable[[Fake], None]]] = [
    ("version", Level.WARN, "23.9.6", has(condor="23.9.6")),
    ("version", Level.FAIL, "10.0.1", has(condor="10.0.1")),
    ("settings", Level.FAIL, "STAGEOUT_ATTEMPTS = many", values(STAGEOUT_ATTEMPTS="many")),
    ("settings", Level.FAIL, "STAGEOUT_MAX_MOVERS = 0", values(STAGEOUT_MAX_MOVERS="0")),
    ("settings", Level.FAIL, "STAGEOUT_PROFILES = p: write an absolute path", values(STAGEOUT_PROFILES="p")),
    ("settings", Level.FAIL, "write one of crowding", values(STAGEOUT_TUNING="fast")),
    ("settings", Level.FAIL, "at most 100", values(STAGEOUT_SPOOL_HIGH_PERCENT="900")),
    ("settings", Level.WARN, "STAGEOUT_SPOOL_QOUTA_MB is set, but", values(STAGEOUT_SPOOL_QOUTA_MB="100")),
    ("settings", Level.WARN, "STAGOUT_LEASE is set, but", values(STAGOUT_LEASE="100")),
    ("settings", Level.WARN, "STAGEOUT_COLOUR is set, but", values(STAGEOUT_COLOUR="red")),
    ("space", Level.UNCHECKED, "write a number", values(STAGEOUT_SPOOL_QUOTA_MB="100G")),
    ("role", Level.FAIL, "no schedd is", values(DAEMON_LIST="MASTER STARTD STAGEOUT_MANAGER STAGEOUT_AGENT")),
    ("role", Level.FAIL, "no startd is", values(DAEMON_LIST="MASTER SCHEDD STAGEOUT_MANAGER STAGEOUT_AGENT")),
    ("transforms", Level.FAIL, "treated as with opt-out", values(STAGEOUT_DEFAULT="optin")),
    ("transforms", Level.FAIL, "are not told apart", values(STAGEOUT_WORKFLOW_JOBS="regexp(")),
    ("transforms", Level.FAIL, "are not told apart", values(STAGEOUT_WORKFLOW_JOBS="")),
    (
        "startd-attributes",
        Level.WARN,
        "lacks StageOutAgentKey, which",
        values(STARTD_JOB_ATTRS=SETTINGS["STARTD_JOB_ATTRS"].replace(" StageOutAgentKey", "")),
    ),
    ("agent-daemon", Level.FAIL, "no daemon", values(DAEMON_LIST="MASTER SCHEDD STARTD STAGEOUT_MANAGER")),
    ("agent-daemon", Level.FAIL, "does not exist", no_file(SETTINGS["STAGEOUT_AGENT"])),
    ("manager-daemon", Level.FAIL, "no daemon", values(DAEMON_LIST="MASTER SCHEDD STARTD STAGEOUT_AGENT")),
    ("transforms", Level.FAIL, "lacks", values(JOB_TRANSFORM_NAMES="StageOut")),
    ("transforms", Level.FAIL, "StageOutInit before StageOut", values(JOB_TRANSFORM_NAMES="StageOut StageOutInit")),
    ("transforms", Level.FAIL, "does not set", values(JOB_TRANSFORM_StageOut="SET X 1")),
    ("transforms", Level.FAIL, "running schedd", has(live={"JOB_TRANSFORM_NAMES": "Site"})),
    (
        "protected-attributes",
        Level.FAIL,
        "forge StageOutUserLeave",
        values(PROTECTED_JOB_ATTRS=ATTRS.replace("StageOutUserLeave", "")),
    ),
    ("protected-attributes", Level.FAIL, "JobRouter", values(PROTECTED_JOB_ATTRS=ATTRS + " LeaveJobInQueue")),
    ("protected-attributes", Level.FAIL, "StageOutRequest", values(PROTECTED_JOB_ATTRS=ATTRS + " stageoutrequest")),
    (
        "protected-attributes",
        Level.WARN,
        "StageOutStats",
        values(PROTECTED_JOB_ATTRS=ATTRS.replace("StageOutStats", "")),
    ),
    ("protected-attributes", Level.FAIL, "running schedd", has(live={"PROTECTED_JOB_ATTRS": ""})),
    ("secure-attributes", Level.WARN, "owners can write GlobalJobId", values(SECURE_JOB_ATTRS="OsUser")),
    ("secure-attributes", Level.FAIL, "running schedd", has(live={"SECURE_JOB_ATTRS": ""})),
    (
        "chirp-updates",
        Level.FAIL,
        "lets a job change GlobalJobId, NumShadowStarts, StageOutAgentKey, ... on",
        values(CHIRP_DELAYED_UPDATE_PREFIX="*"),
    ),
    (
        "chirp-updates",
        Level.FAIL,
        "change StageOutGuard on",
        values(CHIRP_DELAYED_UPDATE_PREFIX="Chirp*, stageoutguard"),
    ),
    ("chirp-updates", Level.FAIL, "change NumShadowStarts on", values(CHIRP_DELAYED_UPDATE_PREFIX="Num*Starts")),
    ("superuser", Level.FAIL, "condor, who may not", values(QUEUE_SUPER_USERS="root")),
    ("epoch-history", Level.WARN, "lack records", values(JOB_EPOCH_HISTORY="")),
    ("job-records", Level.WARN, "without receipts", values(JOB_EPOCH_HISTORY_DIR="")),
    ("job-records", Level.FAIL, "condor_preen removes", values(VALID_SPOOL_FILES="stageout_agent")),
    ("history", Level.WARN, "HISTORY is not set", values(HISTORY="")),
    ("startd-attributes", Level.FAIL, "NumShadowStarts", values(STARTD_JOB_ATTRS="StageOutGuard")),
    ("startd-attributes", Level.FAIL, "running startd", has(live={"STARTD_JOB_ATTRS": ""})),
    ("start-expression", Level.WARN, "takes new jobs", values(START="TRUE")),
    ("order-numbers", Level.FAIL, "condor_preen", values(VALID_SPOOL_FILES="SCHEDD.lock")),
    (
        "order-numbers",
        Level.FAIL,
        "from SPOOL: stageout_agent_watched",
        values(VALID_SPOOL_FILES=", ".join(AGENT_IN_SPOOL[:-1])),
    ),
    ("startd-cron", Level.FAIL, "no job", values(STARTD_CRON_JOBLIST="Other")),
    (
        "plugin stageout_curl_plugin",
        Level.FAIL,
        "not usable: ImportError",
        answer(OURS, Ran(1, "Traceback:\nImportError: x", 0.1)),
    ),
    ("plugin stageout_curl_plugin", Level.FAIL, "not usable: nothing", answer(OURS, Ran(-1, "", 20))),
    ("plugin curl_plugin", Level.WARN, "not usable", answer(STOCK, Ran(1, "boom", 0.1))),
    (
        "plugin stageout_curl_plugin",
        Level.FAIL,
        "names Foo",
        answer(OURS, Ran(0, ANSWER + 'StartdAttrs = "Foo"\n', 0.1)),
    ),
    (
        "plugin stageout_curl_plugin",
        Level.FAIL,
        "not a plain",
        answer(OURS, Ran(0, ANSWER + 'StartdAttrs="F"\nF=[a=1]\n', 0.1)),
    ),
    ("plugin stageout_curl_plugin", Level.FAIL, "is no attribute", answer(OURS, Ran(0, "warning!\n" + ANSWER, 0.1))),
    ("plugin stageout_curl_plugin", Level.WARN, "2000 ms", answer(OURS, Ran(0, ANSWER, 2.0))),
    ("plugin curl_plugin", Level.UNCHECKED, "not installed", no_file(STOCK)),
    ("plugins", Level.FAIL, "never hands off", values(FILETRANSFER_PLUGINS=f"{OURS} {STOCK}")),
    ("plugins", Level.FAIL, "no plugin takes https", values(FILETRANSFER_PLUGINS="")),
    ("front-ends", Level.WARN, f"{STOCK}: uploads by box hold their slot", answer(STOCK, Ran(0, BOX, 0.1))),
    ("front-ends", Level.WARN, "asks /usr/x_plugin for each job", front_end_of("/usr/x_plugin", "seen='1 2 3'")),
    ("spool-place", Level.FAIL, "inside EXECUTE", values(STAGEOUT_SPOOL="/var/lib/condor/execute/../execute/stageout")),
    ("spool-place", Level.FAIL, "inside SPOOL", values(STAGEOUT_SPOOL="/var/lib/condor/spool")),
    ("spool-place", Level.FAIL, "inside LOG", values(STAGEOUT_SPOOL="/var/log/condor/a/b")),
    ("spool-known", Level.FAIL, "look into /var/lib/condor/stageout", values(STAGEOUT_SPOOL="/data/stageout")),
    (
        "spool-known",
        Level.FAIL,
        "look into /var/lib/condor/stageout",
        values(STAGEOUT_SPOOL="/data/stageout", StageOutSpool='"/data/stageout"', STARTD_ATTRS="Other"),
    ),
    (
        "space",
        Level.FAIL,
        "12.6 MB, too little for any output",
        tiny_disk,
    ),
    ("spool-filesystem", Level.WARN, "copy", file("/var/lib/condor/stageout", seen_file(device=2))),
    ("spool-filesystem", Level.UNCHECKED, "not there yet", no_file("/var/lib/condor/stageout")),
    ("spool-filesystem", Level.WARN, "jobs' directories are other", values(STARTD_ENFORCE_DISK_LIMITS="true")),
    (
        "spool-filesystem",
        Level.WARN,
        "a copy (12 in the last hour, 3.2 GB in 9.5 s)",
        manager(HandoffsCopied=12, HandoffBytesCopied=3 * GB, HandoffCopyMs=9500),
    ),
    ("spool-owner", Level.FAIL, "belongs to uid 7", file("/var/lib/condor/stageout", seen_file(uid=7))),
    ("spool-owner", Level.FAIL, "mode 0777", file("/var/lib/condor/stageout", seen_file(mode=0o777))),
    ("space", Level.FAIL, "above the disk", values(STAGEOUT_SPOOL_QUOTA_MB="999999999")),
    ("space", Level.WARN, "RESERVED_DISK 0 B", values(RESERVED_DISK="0")),
    ("space", Level.WARN, "RESERVED_DISK 10.7 GB", values(STAGEOUT_SPOOL_QUOTA_MB="0")),
    ("space", Level.WARN, "before the quota is", has(total_free=(100 * GB, GB))),
    ("encryption", Level.WARN, "not taken over", values(ENCRYPT_EXECUTE_DIRECTORY="True")),
    ("manager", Level.FAIL, "no sandbox manager listens", has(manager=FileNotFoundError(2, "", "x"))),
    ("manager", Level.FAIL, "nobody answers", has(manager=ConnectionRefusedError(111, ""))),
    ("manager-user", Level.FAIL, "uid 7", has(manager=ClassAd({"Manager": "m", "Uid": 7}))),
    ("startd-answers", Level.FAIL, "GlobalJobId", has(own_slots=[BUSY])),
    ("startd-answers", Level.UNCHECKED, "no job runs", has(own_slots=[])),
    ("plugin-rest", Level.WARN, "could not be killed: 77", lambda machine: leave_behind(machine)),
    ("plugin-rest", Level.UNCHECKED, "uid 0 may not look at all", has(sees_all=False)),
    ("plugin-rest", Level.UNCHECKED, "uid 0 may not look", file("/proc/76/root/movers/1", PermissionError(13, ""))),
    ("restart-risk", Level.UNCHECKED, "no sandbox manager", has(manager=FileNotFoundError(2, "", "x"))),
    ("collector", Level.FAIL, "does not answer", has(collector_down=True)),
    ("clock", Level.WARN, "50 s ahead", has(ahead_s=50)),
    ("clock", Level.FAIL, "200 s ahead", has(ahead_s=200)),
    ("clock", Level.FAIL, "7000 s behind", has(ahead_s=-7000)),
    (
        "node-clocks",
        Level.WARN,
        "ep@node +600 s",
        collector(StageOutManager=[manager_ad(KEY, StageOutSentAt=int(NOW) + 600)]),
    ),
    ("node-clocks", Level.WARN, "ep@node -61 s", collector(Machine=[slot_of_a_node_behind(61)])),
    ("agent-notice", Level.FAIL, "no agent answers for ap", collector(StageOutAgent=[])),
    ("agent-notice", Level.FAIL, "400 s ago", collector(StageOutAgent=[notice(400)])),
    ("agent-notice", Level.FAIL, "cannot be read", collector(StageOutAgent=[ClassAd({"StageOutPayload": "x"})])),
    ("agent-notice", Level.FAIL, "knows no schedd", collector(Scheduler=[])),
    ("file-history", Level.FAIL, "disk is full", collector(StageOutAgent=[notice(history_problem="disk is full")])),
    (
        "matters",
        Level.WARN,
        "left-output: 3 outputs of jobs that have left the queue of ap: 2 failed, 1 waiting to retry. Owner: ",
        collector(StageOutAgent=[notice(left={"Failed": 2, "RetryWait": 1, "Nonsense": 7, "Moving": "x"})]),
    ),
    (
        "matters",
        Level.WARN,
        "silent-node: ep7 sends no reports. 3 outputs there. Owner: alice@x, bob@x. Age: 4m20s.",
        collector(StageOutAgent=[notice(silent=[["manager@ep7", 250, 3, 950, ["alice@x", "bob@x"]], "nonsense"])]),
    ),
    (
        "matters",
        Level.WARN,
        "handoffs-refused: 310 of 500 hand-offs refused within the last hour: SlotUser 300, SlotFull 10.",
        collector(
            StageOutManager=[
                manager_ad_of(manager=name, handoffs=250, handoffs_refused=refused)
                for name, refused in (("a", {"SlotUser": 145, "SlotFull": 10}), ("b", {"SlotUser": 155}))
            ]
        ),
    ),
    (
        "matters",
        Level.WARN,
        "identity: GlobalJobId of 1 job is another job's: 8.0. They are refused. Owner: eve@x. Age: 50s.",
        collector(StageOutAgent=[notice(identities=[["eve@x", "job", 1, ["8.0"], int(NOW) - 50], "odd"])]),
    ),
    ("file-history", Level.FAIL, "condor_preen", values(VALID_SPOOL_FILES="stageout_agent, stageout_history")),
    ("flocking", Level.WARN, "the collector far has no notice of the agent of ap", flocks(far=[])),
    ("flocking", Level.WARN, "far: the collector does not answer", flocks()),
    ("agents-seen", Level.FAIL, "no schedd agent", collector(StageOutAgent=[])),
    ("handoff", Level.FAIL, "of ap is not taken over: no agent was heard", has(refusals={"ap": "no agent was heard"})),
    (
        "handoffs-lately",
        Level.WARN,
        "31 of 40 hand-offs of the last hour refused. 31 times: agent silent",
        manager(HandoffsTried=40, HandoffsRefused=31, HandoffRefusals=[{"Reason": "agent silent", "Count": 31}]),
    ),
    ("stored-answers", Level.WARN, f"of {OURS} is missing, so", without_stored_answer),
    ("stored-answers", Level.WARN, "is out of date", with_stored_answer),
    ("plugins-for-jobs", Level.UNCHECKED, "has not ended within 20 s", has(slow_for=("nobody",))),
    ("manager-daemon", Level.UNCHECKED, "has not ended within 20 s", has(slow_for=("condor",))),
    ("agent-daemon", Level.UNCHECKED, "has not ended within 20 s", has(slow_for=("condor",))),
    ("startd-cron", Level.UNCHECKED, "has not ended within 20 s", has(slow_for=("condor",))),
    ("plugin stageout_curl_plugin", Level.UNCHECKED, "has not ended", answer(OURS, Ran(-1, "", 20, has_ended=False))),
    ("plugins-for-jobs", Level.FAIL, f"jobs cannot run {OURS}: as nobody: [Errno 13]", has(unreadable_for=("nobody",))),
    ("manager-daemon", Level.FAIL, "cannot run: as condor: [Errno 13]", has(unreadable_for=("condor",))),
    ("agent-daemon", Level.FAIL, "cannot run: as condor: [Errno 13]", has(unreadable_for=("condor",))),
    ("startd-cron", Level.FAIL, "the startd cannot run", has(unreadable_for=("condor",))),
    (
        "agent-keys",
        Level.FAIL,
        "another key than the agent of ap",
        manager(AgentKeys=[{"Schedd": "ap", "Key": OTHER_KEY.public, "Learnt": "listed"}]),
    ),
    ("leave-limits", Level.WARN, "ap (3600 s)", collector(StageOutAgent=[notice(leave_limit_s=3600)])),
    ("reporting-door", Level.WARN, "has sent none", collector(StageOutManager=[])),
    ("reporting-door", Level.UNCHECKED, "no sandbox manager", has(manager=ConnectionRefusedError(111, ""))),
    ("slot-attributes", Level.FAIL, "back-pressure", collector(Machine=[ClassAd({"Name": "slot1@node"})])),
    ("slot-attributes", Level.FAIL, "are old", collector(Machine=[ClassAd({"StageOutAccept": True})])),
    ("slot-attributes", Level.UNCHECKED, "no slot", collector(Machine=[])),
    ("trust", Level.WARN, "1 of 1 managers report unsigned", collector(StageOutManager=[manager_ad()])),
    ("trust", Level.WARN, "is not believed: not JSON", collector(StageOutManager=[ClassAd({"StageOutPayload": "x"})])),
    ("trust", Level.WARN, "not that of", collector(StageOutManager=[manager_ad(KEY, StageOutPayload=FORGED)])),
    ("trust", Level.WARN, "is not signed", collector(StageOutManager=[manager_ad(KEY, StageOutSignature="")])),
    ("trust", Level.FAIL, "2 keys speak as", collector(StageOutManager=[manager_ad(KEY), manager_ad(OTHER_KEY)])),
    ("agent-key", Level.WARN, "jobs bring no key", lambda machine: machine.values.pop("STAGEOUT_AGENT_KEY")),
    ("agent-key", Level.FAIL, "is no agent's key", values(STAGEOUT_AGENT_KEY="ed25519:x")),
    ("refused-reports", Level.WARN, "m1: forged", collector(StageOutAgent=[notice(refused=["m1: forged"])])),
    ("refused-orders", Level.WARN, "evil: its key is", manager(Refused=[{"Ad": "evil", "Problem": "its key is x"}])),
    ("credentials", Level.WARN, "is 0", values(SEC_CREDENTIAL_DIRECTORY_OAUTH="/var/lib/condor/oauth")),
    ("credentials", Level.WARN, "no agent offers", values(STAGEOUT_CREDENTIAL_PORT="9621")),
    ("credentials", Level.WARN, "runs as c", values(STAGEOUT_CREDENTIAL_PORT="9621", SCHEDD_AGENT_USERID="condor")),
    ("credentials", Level.WARN, "ap: cannot", has(manager=manager_answer_of("cannot be reached"))),
    ("credentials", Level.UNCHECKED, "no credential had", has(manager=ClassAd({"Manager": "m", "Uid": 0}))),
    ("agent-keys", Level.WARN, "came first", manager(AgentKeys=[{"Schedd": "ap", "Key": "k", "Learnt": "first"}])),
    ("trust", Level.UNCHECKED, "no manager reports", collector(StageOutManager=[])),
    ("policy-service", Level.FAIL, "is no address", values(STAGEOUT_POLICY_URL="policy:9620")),
    ("policy-service", Level.FAIL, "in clear", values(STAGEOUT_POLICY_URL="http://policy:9620")),
    ("policy-service", Level.WARN, "does not answer (no route)", policy(OSError("no route"))),
    ("policy-service", Level.FAIL, "refuses the token", policy(401)),
    ("policy-service", Level.FAIL, "status 404", policy(404)),
    ("accounts", Level.WARN, "under slot1, slot2", values(SLOT1_USER="slot1", SLOT1_2_USER="slot2")),
    ("accounts", Level.WARN, "under nobody", values(STARTER_ALLOW_RUNAS_OWNER="False")),
    ("accounts", Level.FAIL, "no such account", values(STAGEOUT_ACCOUNTS="stageout1, stageout2")),
    ("accounts", Level.FAIL, "of jobs or daemons (nobody)", values(STAGEOUT_ACCOUNTS="nobody")),
    ("accounts", Level.FAIL, "daemons (alice)", values(STAGEOUT_ACCOUNTS="alice", SLOT1_USER="alice")),
]


def together(*changes: Callable[[Fake], None]) -> Callable[[Fake], None]:
    def change(machine: Fake) -> None:
        for one in changes:
            one(machine)

    return change


@pytest.mark.parametrize(
    ("name", "text", "change"),
    [
        (
            "credentials",
            "renewed at https://ap2:9621, https://ap:9621;",
            together(
                values(STAGEOUT_CREDENTIAL_PORT="9621"),
                collector(
                    StageOutAgent=[
                        notice(renewal_url="https://ap2:9621"),
                        ClassAd({"StageOutPayload": "x"}),
                        notice(),
                        notice(renewal_url="https://ap:9621"),
                    ]
                ),
            ),
        ),
    ],
)
def test_what_is_well_is_told(name: str, text: str, change: Callable[[Fake], None]) -> None:
    machine = Fake()
    change(machine)
    assert [
        item.text for item in examine(machine) if item.name == name and item.level is Level.OK and text in item.text
    ]


def test_reports_that_nobody_signed_are_no_matters() -> None:
    refused = manager_ad_of(handoffs=500, handoffs_refused={"SlotUser": 300})
    seen = []
    for signature in (refused["StageOutSignature"], ""):
        machine = Fake()
        collector(StageOutManager=[ClassAd({**refused, "StageOutSignature": signature})])(machine)
        seen.append([item.level for item in examine(machine) if item.name == "matters"])
    assert seen == [[Level.WARN], [Level.OK]]


def leave_behind(machine: Fake) -> None:
    machine.marked.append((77, "/movers/2"))
    machine.files["/proc/77"] = seen_file()


@pytest.mark.parametrize(
    ("own", "spool", "level"), [(7, 7, Level.OK), (7, 0, Level.UNCHECKED), (0, 0, Level.UNCHECKED)]
)
def test_who_may_not_see_what_plugins_leave_is_told(own: int, spool: int, level: Level) -> None:
    """A pilot's plugins run as its own user; those of a manager of root's as any."""
    machine = Fake(sees_all=False)
    machine.files.update({"/proc/self": seen_file(uid=own), "/var/lib/condor/stageout": seen_file(uid=spool)})
    (found,) = [item for item in examine(machine) if item.name == "plugin-rest"]
    assert found.level is level
    assert level is Level.OK or f"uid {own} " in found.text
    assert level is Level.OK or ("as root" if own else "CAP_SYS_PTRACE") in found.remedy


def test_processes_that_may_not_be_looked_at_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: Path) -> bytes:
        raise PermissionError(13, "", path)

    denied: list[int] = []
    monkeypatch.setattr(Path, "read_bytes", closed)
    assert list(having("PATH", denied.append)) == []
    assert os.getppid() in denied


@pytest.mark.parametrize(("name", "level", "words", "spoil"), FAULTS, ids=[f"{f[0]}-{f[2]}" for f in FAULTS])
def test_faults_are_found(name: str, level: Level, words: str, spoil: Callable[[Fake], None]) -> None:
    machine = Fake()
    spoil(machine)
    found = [item for item in examine(machine) if item.name == name and item.level is level and words in item.text]
    assert found, [item for item in examine(machine) if item.level is not Level.OK]
    assert level is Level.UNCHECKED or found[0].remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"SECURE_JOB_ATTRS": "", "SYSTEM_SECURE_JOB_ATTRS": "x509userproxy globaljobid"},
        {"CHIRP_DELAYED_UPDATE_PREFIX": "Chirp*, Site*"},
        {"CHIRP_DELAYED_UPDATE_PREFIX": "*", "ENABLE_CHIRP": "False"},
        {"CHIRP_DELAYED_UPDATE_PREFIX": "*", "ENABLE_CHIRP_DELAYED": "false"},
    ],
)
def test_attributes_that_no_job_and_no_owner_writes(changes: dict[str, str]) -> None:
    machine = Fake()
    machine.values.update(changes)
    found = {item.name: item.level for item in examine(machine)}
    assert (found["secure-attributes"], found["chirp-updates"]) == (Level.OK, Level.OK)


def test_front_ends_are_proposed_and_then_known() -> None:
    bare = Fake()
    bare.answers[STOCK] = Ran(0, BOX, 0.1)
    (found,) = [item for item in examine(bare) if item.name == "front-ends"]
    made = f"/usr/local/libexec/stageout/{Path(STOCK).name}"
    assert f"'stageout wrap {STOCK}'" in found.remedy
    assert found.remedy.endswith(f"FILETRANSFER_PLUGINS = {made}, {OURS}")
    wrapped = Fake()
    front_end_of("/usr/x_plugin", f"seen='{front_end.signature(Path(__file__).stat())}'")(wrapped)
    assert [item for item in examine(wrapped) if item.name == "front-ends" and item.level is not Level.OK] == []


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("STAGEOUT_MAX_RERUN", "STAGEOUT_MAX_RERUNS"),
        ("STAGOUT_LEASE", "STAGEOUT_LEASE"),
        ("STAGEOUT_BINS", "STAGEOUT_BIN"),
    ],
)
def test_a_misspelt_knob_is_told_its_name(name: str, means: str) -> None:
    machine = Fake()
    machine.values[name] = "1"
    (found,) = (item for item in examine(machine) if item.level is Level.WARN)
    assert found.remedy == f"did you mean {means}? If not, delete it"


def test_names_of_others_are_theirs() -> None:
    others = ("STAGING_DIR", "STAGEOUT_ROUTER_USERID", "STAGEOUT_POLICY_SERVICE_LOG", "STARTD_CRON_STAGEOUT_MODE")
    machine = Fake()
    machine.values.update(dict.fromkeys(others, "x"))
    assert not [item for item in examine(machine) if item.name == "settings" and item.level is not Level.OK]


def test_the_doctor_and_the_fragment_name_the_same_files_of_the_agent() -> None:
    fragment = (Path(__file__).parents[2] / "condor_config.d" / "20-stageout-ap.conf").read_text()
    (line,) = [line for line in fragment.splitlines() if line.startswith("VALID_SPOOL_FILES")]
    others = {"$(VALID_SPOOL_FILES)", "stageout_agent_runs", "stageout_history*"}
    assert set(line.partition(" = ")[2].split(", ")) == {*AGENT_IN_SPOOL, *others}


def test_every_macro_of_the_fragments_is_known() -> None:
    directory = Path(__file__).parents[2] / "condor_config.d"
    text = "\n".join(path.read_text() for path in directory.glob("*.conf"))
    machine = Fake()
    machine.values.update(dict.fromkeys(re.findall(r"\bSTAGEOUT_[A-Z_]+(?=\s*=)", text), ""))
    assert not [item for item in config.settings(machine) if item.level is not Level.OK]


def test_a_disk_of_its_own_for_the_spool_is_the_one_that_is_measured() -> None:
    machine = Fake()
    machine.free_bytes = lambda path: {"/var/lib/condor/stageout": (GB, GB)}[path]  # type: ignore[method-assign]
    assert [item.level for item in node.space(machine)] == [Level.FAIL]
    machine.values.update(STAGEOUT_SPOOL_QUOTA_MB="500", RESERVED_DISK="0")
    machine.files["/var/lib/condor/stageout"] = seen_file(device=2)
    assert [item.level for item in node.space(machine)] == [Level.OK], "jobs have the other disk for themselves"


def test_why_the_manager_does_not_start_is_read_in_its_log() -> None:
    machine = Fake(manager=FileNotFoundError(2, "", "x"))
    machine.values["SANDBOX_MANAGER_LOG"] = "/log"
    machine.texts["end of /log"] = '12:00 INFO daemon-started\n12:01 ERROR daemon-failed problem="read-only"\n'
    (found,) = node.manager(machine)
    assert 'ends with: 12:01 ERROR daemon-failed problem="read-only"' in found.remedy
    machine.texts["end of /log"] += "12:02 INFO daemon-stopped\n"
    (found,) = node.manager(machine)
    assert found.remedy.startswith("look into SandboxManagerLog")


def test_the_file_of_a_pilot_is_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"#!/usr/bin/env python3\nPK\x03\x04\xff stageout \xfe" + bytes(9000) + b"end")
    real = object.__new__(ThisMachine)
    assert config.is_ours(real, str(tmp_path / "file"))
    assert real.end_of(str(tmp_path / "file")).endswith("end")
    assert real.end_of(str(tmp_path / "none")) == ""


def test_the_other_doors() -> None:
    machine = Fake()
    machine.in_collector.update(StageOutManager=[], Machine=[SLOT_WITH_REPORT])
    texts = {item.name: item.text for item in examine(machine)}
    assert texts["reporting-door"].startswith("startd:")
    assert texts["slot-attributes"] == "1 slots take no new work until the spool is emptier"
    machine.in_collector.update(Machine=[])
    machine.generic = False
    assert "nobody hears it" in {item.name: item.text for item in examine(machine)}["reporting-door"]


def test_the_policy_service_answers() -> None:
    machine = Fake()
    policy(200)(machine)
    texts = {item.name: item.text for item in examine(machine) if item.level is Level.OK}
    assert texts["policy-service"] == "https://policy:1 answers and knows this node's token"


def test_the_status_of_a_service() -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer secret" and self.path == "/v1/leases"
            self.send_response(200 if known else 401)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1/leases"
        asked = object.__new__(ThisMachine).http_status  # its other questions need HTCondor
        assert [asked(url, token) for token in ("secret", "wrong")] == [200, 401]
        server.shutdown()
    with pytest.raises(OSError):
        asked(url, "secret")


def test_a_command_that_does_not_end_has_not_ended() -> None:
    run = object.__new__(ThisMachine).run
    assert not run(["sleep", "5"], 0.1).has_ended
    assert run(["/no/such/program"], 5).has_ended and run(["true"], 5).has_ended


def test_nodes_are_counted_by_version() -> None:
    reports = [
        manager_ad_of(manager=name, version=version) for name, version in (("a", "1.0"), ("b", "1.1"), ("c", "1.1"))
    ]
    slots = [
        ClassAd({"Machine": name, "CondorVersion": f"$CondorVersion: {version} 2026-11-01 BuildID: 1 $"})
        for name, version in (("a", "25.14.1"), ("a", "25.14.1"), ("b", "24.0.1"), ("c", "24.0.1"))
    ]
    machine = Fake()
    collector(StageOutManager=reports, Machine=slots)(machine)
    (found,) = [item for item in examine(machine) if item.name == "versions"]
    assert found.text == "stageout 1.1 on 2 nodes, 1.0 on 1 node; HTCondor 24.0.1 on 2 nodes, 25.14.1 on 1 node"
    assert any("versions of stageout" in item.text for item in examine(machine) if item.level is Level.WARN)


def test_no_fault_of_the_system_ends_the_doctor() -> None:
    """Not even one that no check expects."""

    def manager(machine: Machine) -> Iterator[Finding]:
        raise OSError(errno.ENAMETOOLONG, "File name too long", "/a/b")
        yield

    (found,) = report.run_checks([manager], Fake())
    assert found.level is Level.UNCHECKED and "File name too long: '/a/b'" in found.text


def test_a_planned_restart_with_output_at_risk() -> None:
    machine = Fake(manager=ClassAd({"Manager": "m", "Uid": 0, "BytesAtRisk": 5 * GB}))
    (found,) = [item for item in examine(machine) if item.name == "restart-risk"]
    assert found.level is Level.OK and "5.4 GB" in found.text
    machine.files["/run/systemd/shutdown/scheduled"] = seen_file()
    (found,) = [item for item in examine(machine) if item.name == "restart-risk"]
    assert found.level is Level.WARN and "a shutdown is scheduled" in found.text and "drain" in found.remedy


def test_what_may_not_be_looked_at_is_unchecked_not_wrong() -> None:
    machine = Fake(files={**Fake().files, "/var/lib/condor/stageout": PermissionError(13, "no", "/var/lib/condor")})
    found = [item for item in examine(machine) if item.name == "spool-owner"]
    assert [item.level for item in found] == [Level.UNCHECKED]
    assert found[0].remedy == "run the doctor as root"


def test_without_a_collector_it_is_said_once_loudly() -> None:
    failed = [item.name for item in examine(Fake(collector_down=True)) if item.level is Level.FAIL]
    assert failed == ["collector"]


def test_the_default_of_the_spool_is_beside_execute() -> None:
    machine = Fake()
    del machine.values["STAGEOUT_SPOOL"]
    (found,) = [item for item in examine(machine) if item.name == "spool-place"]
    assert found.text.startswith("/var/lib/condor/stageout,")


@pytest.mark.parametrize(
    ("roles", "daemons", "uid"),
    [
        ([Role.AP], "MASTER SCHEDD COLLECTOR", 99),
        ([Role.EP], "MASTER STARTD", 99),
        ([Role.EP], "MASTER, STARTD2", 0),
        ([Role.PILOT], "MASTER STARTD", 1000),
        ([Role.AP, Role.EP], "MASTER SCHEDD STARTD", 99),
    ],
)
def test_roles_are_seen(roles: list[Role], daemons: str, uid: int) -> None:
    machine = Fake()
    machine.values["DAEMON_LIST"] = daemons
    machine.files["/var/lib/condor/execute"] = seen_file(uid=uid)
    assert report.roles_of(machine) == roles


@pytest.mark.parametrize(
    "found",
    [
        values(STAGEOUT_SPOOL="/data/s", StageOutSpool='"/data/s"', STARTD_ATTRS="X, StageOutSpool"),
        values(STAGEOUT_SPOOL="/data/s", STARTD_ENVIRONMENT='"STAGEOUT_SPOOL=/data/s"'),
    ],
)
def test_spools_that_plugins_find(found: Callable[[Fake], None]) -> None:
    machine = Fake()
    found(machine)
    assert [item.level for item in node.spool_known(machine)] == [Level.OK]


@pytest.mark.parametrize(
    ("said", "level", "words"),
    [
        ("  IsReady = true", Level.OK, "counts all daemons as alive"),
        ('  IsReady = false\n  SANDBOX_MANAGER = "Startup"\n  STARTD_State = "Ready"', Level.WARN, "MANAGER (Startup)"),
        ('  IsReady = false\n  SCHEDD_AGENT = "Hung"', Level.WARN, "SCHEDD_AGENT (Hung)"),
        ("no master here\n", Level.UNCHECKED, "no master here"),
        ("", Level.UNCHECKED, "exit status 0"),
    ],
)  # fmt: skip
def test_daemons_of_which_the_master_has_not_heard_are_named(said: str, level: Level, words: str) -> None:
    (found,) = config.daemons_alive(Fake(who=said))
    assert (found.level, words in found.text) == (level, True), found


def test_a_pilot_serves_its_own_user() -> None:
    machine = Fake(manager=ClassAd({"Manager": "m", "Uid": 1000}))
    machine.files["/var/lib/condor/execute"] = seen_file(uid=1000)
    machine.files["/var/lib/condor/stageout"] = seen_file(uid=1000, mode=0o700)
    findings = {item.name: item for item in report.examine(machine, [Role.PILOT])}
    assert findings["manager-user"].level is Level.OK
    assert findings["spool-owner"].level is Level.OK


@pytest.mark.parametrize(("missing", "level"), [("", Level.OK), ("overlay root", Level.FAIL)])
def test_what_no_plugin_moves_is_found(missing: str, level: Level) -> None:
    said = ClassAd({"Manager": "m", "Uid": 0, "MissingPlugins": missing})
    (found,) = node.plugins_for_waiting(Fake(manager=said))
    assert found.level is level and missing in found.text


@pytest.mark.parametrize(
    ("problem", "age_s", "level"), [("", 290, Level.OK), ("malformed", 5, Level.FAIL), ("", 3600, Level.FAIL)]
)
def test_a_manager_that_makes_no_reports_is_found(problem: str, age_s: int, level: Level) -> None:
    said = ClassAd({"Manager": "m", "Uid": 0, "ReportProblem": problem, "ReportAge": age_s})
    (found,) = node.last_report(Fake(manager=said))
    assert found.level is level and problem in found.text


@pytest.mark.parametrize(("count", "level"), [(0, Level.OK), (3, Level.WARN)])
def test_output_without_a_record_is_found(count: int, level: Level) -> None:
    (found,) = node.unknown_output(Fake(manager=ClassAd({"Manager": "m", "Uid": 0, "UnknownOutput": count})))
    assert found.level is level
    assert ("3 hand-offs" in found.text) == bool(count)


@pytest.mark.parametrize(
    ("problem", "level", "advice"),
    [
        ("", Level.OK, ""), ("output was deleted in the spool, lately that of 2 runs", Level.FAIL, "who deletes files"),
        ("/s is not there: is its filesystem mounted?", Level.FAIL, "mount it again"),
    ],
)  # fmt: skip
def test_output_that_was_deleted_in_the_spool_is_found(problem: str, level: Level, advice: str) -> None:
    (found,) = node.deleted_output(Fake(manager=ClassAd({"Manager": "m", "Uid": 0, "SpoolProblem": problem})))
    assert found.level is level and problem in found.text and advice in found.remedy


def test_text_and_json() -> None:
    machine = Fake(condor="23.9.6")
    machine.values["QUEUE_SUPER_USERS"] = "root"
    findings = examine(machine)
    text = report.as_text([Role.AP, Role.EP], findings, colour=False)
    assert text[0] == "Checked as AP, EP:"
    assert any(line.startswith("fail      superuser") for line in text)
    assert any(line.strip().startswith("-> add it to QUEUE_SUPER_USERS") for line in text)
    assert text[-1].endswith("1 warn, 1 fail")
    assert "\x1b" not in "".join(text)
    data = json.loads(json.dumps(report.as_json([Role.AP], findings)))
    assert list(data) == ["schema", "roles", "healthy", "checks"]
    assert data["healthy"] is False and data["roles"] == ["ap"]
    assert {"name": "version", "level": "warn"}.items() <= data["checks"][0].items()


def test_the_reserve_for_the_default_quota_is_half_of_the_disk_in_whole_megabytes() -> None:
    odd = Fake(values={**SETTINGS, "STAGEOUT_SPOOL_QUOTA_MB": "0", "RESERVED_DISK": "51199"})
    odd.total_free = (100 * GB - 1, 100 * GB - 1)
    (finding,) = node.space(odd)
    assert finding.level is Level.OK
    odd.values["RESERVED_DISK"] = "51198"
    (finding,) = node.space(odd)
    assert finding.level is Level.WARN
    assert "STAGEOUT_SPOOL_QUOTA_MB" in finding.remedy


def test_no_reserve_is_asked_for_where_jobs_have_logical_volumes() -> None:
    """HTCondor would take RESERVED_DISK from the volume group, and the spool would get nothing of it."""
    machine = Fake(values={**SETTINGS, "RESERVED_DISK": "0", "STARTD_ENFORCE_DISK_LIMITS": "true"})
    (finding,) = node.space(machine)
    assert finding.level is Level.OK, finding


@pytest.mark.parametrize(
    ("settings", "level", "text"),
    [
        ({}, Level.WARN, "STAGEOUT_PILOT is not set"),
        ({"STAGEOUT_PILOT": "true"}, Level.OK, "has 90 s"),
        ({"STAGEOUT_PILOT": "true", "SHUTDOWN_GRACEFUL_TIMEOUT": "90 + 5"}, Level.OK, "has 90 s"),
        ({"STAGEOUT_PILOT": "true", "SHUTDOWN_FAST_TIMEOUT": "60"}, Level.FAIL, "SHUTDOWN_FAST_TIMEOUT = 60"),
        ({"STAGEOUT_PILOT": "true", "SHUTDOWN_FAST_TIMEOUT": "ifThenElse(x, 1, 2)"}, Level.OK, "has 90 s"),
        ({"STAGEOUT_PILOT": "perhaps"}, Level.FAIL, "write true or false"),
    ],
)
def test_the_end_of_a_pilot(settings: dict[str, str], level: Level, text: str) -> None:
    machine = Fake()
    machine.values.update(settings)
    (found,) = pilot_end(machine)
    assert found.level is level and text in found.text


def _routers(**changes: str) -> dict[str, tuple[Level, str]]:
    machine = Fake()
    machine.values.update({"DAEMON_LIST": "MASTER, R", "R": "/opt/stageout/bin/stageout-router", **changes})
    machine.files["/opt/stageout/bin/stageout-router"] = seen_file()
    machine.files["/tokens/vo.use"] = seen_file(mode=0o600, kind=stat.S_IFREG)
    machine.files["/open/vo.use"] = seen_file(mode=0o644, kind=stat.S_IFREG)
    assert report.roles_of(machine) == [Role.ROUTER]
    found = report.examine(machine, [Role.ROUTER])
    return {item.name: (item.level, item.text) for item in found}


def test_a_gateway_whose_plugins_cannot_deliver_is_found() -> None:
    assert _routers()["egress"][0] is Level.OK
    assert _routers(STAGEOUT_ROUTER_EGRESS="out=x")["egress"][0] is Level.FAIL
    assert _routers(STAGEOUT_ROUTER_EGRESS="/o=http://s/", STAGEOUT_ROUTER_EGRESS_LEASES=":")["egress"][0] is Level.FAIL
    good = _routers(
        STAGEOUT_ROUTER_EGRESS="/o=https://me:secret@s/ /v=vo+https://s/", STAGEOUT_ROUTER_EGRESS_CREDENTIALS="/tokens"
    )
    assert good["egress /o"] == (Level.OK, f"goes to https://s/ by {OURS}")
    assert good["egress /v"][0] is Level.OK
    for place, words in (("", "needs the token"), ("/none", "does not exist"), ("/open", "open to other users")):
        level, text = _routers(
            STAGEOUT_ROUTER_EGRESS="/v=vo+https://s/", STAGEOUT_ROUTER_EGRESS_CREDENTIALS=place
        )["egress /v"]  # fmt: skip
        assert (level, words in text) == (Level.FAIL, True), text
    level, text = _routers(STAGEOUT_ROUTER_EGRESS="/o=root://s/")["egress /o"]
    assert (level, text) == (Level.FAIL, "no plugin takes root")


def test_a_router_without_the_fast_packages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _routers()["checksums"][0] is Level.OK
    monkeypatch.setitem(sys.modules, "xxhash", None)
    level, text = _routers()["checksums"]
    assert level is Level.WARN
    assert "xxh3-32" in text and "crc32c" not in text


def alone_with(
    change: Callable[[Fake], None] = lambda machine: None, **values: str
) -> dict[str, tuple[Level, str, str]]:
    machine = Fake()
    machine.values = {f"STAGEOUT_ROUTER_{name}": value for name, value in _ALONE.items()}
    machine.values.update({f"STAGEOUT_ROUTER_{name}": value for name, value in values.items()})
    for path in ("/data/in", "/records"):
        machine.files[path] = seen_file(mode=0o755, kind=stat.S_IFDIR)
    machine.files["/keys"] = seen_file(mode=0o640, kind=stat.S_IFREG)
    change(machine)
    found = report.run_checks(alone.CHECKS, machine)
    return {item.name: (item.level, item.text, item.remedy) for item in sorted(found, key=lambda item: item.level)}


_ALONE = {"ROOT": "/data/in", "DIR": "/records", "KEYS": "/keys"}


def test_a_router_without_htcondor_that_works_is_called_so() -> None:
    found = alone_with()
    assert {name: level for name, (level, _, _) in found.items()} == dict.fromkeys(found, Level.OK)
    assert alone_with(ROOT="", NEIGHBOURS="gw.example.org:9621")["router-places"][0] is Level.OK, "a relay"


@pytest.mark.parametrize(
    ("values", "name", "words"),
    [({"ROOT": "/none"}, "router-places", "no such directory"), ({"ROOT": ""}, "router-places", "ROOT is not set"),
     ({"DIR": ""}, "router-places", "DIR is not set"), ({"DIR": "/keys"}, "router-places", "no such directory"),
     ({"KEYS": "/none"}, "router-keys", "does not exist"), ({"PORT": "9999"}, "router-port", "nothing listens"),
     ({"EGRESS": "/o=root://s/"}, "egress /o", "no plugin takes root"), ({"PORT": "x"}, "settings", "write a number")],
)  # fmt: skip
def test_what_a_router_without_htcondor_lacks_is_found(values: dict[str, str], name: str, words: str) -> None:
    level, text, remedy = alone_with(**values)[name]
    assert level is Level.FAIL
    assert words in text
    assert remedy


def test_of_a_router_without_htcondor_open_keys_full_disks_and_misspelt_names_are_found() -> None:
    def spoil(machine: Fake) -> None:
        machine.files["/keys"] = seen_file(mode=0o644, kind=stat.S_IFREG)
        machine.total_free = (100, 1)
        machine.values["STAGEOUT_ROUTER_PROT"] = "1"

    found = alone_with(spoil)
    assert "open to all" in found["router-keys"][1]
    assert (found["router-places"][0], found["settings"][0]) == (Level.WARN, Level.WARN)
    assert "STAGEOUT_ROUTER_PROT" in found["settings"][1]


def test_the_doctor_looks_at_a_router_without_htcondor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "router.env"
    settings.write_text(f"STAGEOUT_ROUTER_ROOT={tmp_path}\nSTAGEOUT_ROUTER_DIR={tmp_path}\nSTAGEOUT_ROUTER_PORT=1\n")
    assert main(["doctor", "--settings", str(settings)]) == 1
    shown = capsys.readouterr().out
    assert "Checked as ROUTER" in shown and "nothing listens on port 1 of 127.0.0.1" in shown
