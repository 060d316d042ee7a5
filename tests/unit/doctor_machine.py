"""A machine that does not exist, on which all is well, for the doctor's checks."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stageout.cli.doctor.config import AGENT_IN_SPOOL
from stageout.cli.doctor.findings import Ran, Unseen
from stageout.core.children import MOVER_MARK
from stageout.core.classads import ClassAd
from stageout.core.config import mapping_settings
from stageout.core.signing import SigningKey
from stageout.wire.custody import AgentNotice, Report, notice_ad, report_ad

NOW = 1_800_000_000.0
GB = 1024**3
OURS, STOCK = "/opt/stageout/bin/stageout_curl_plugin", "/usr/libexec/condor/curl_plugin"
ANSWER = (
    'SupportedMethods = "http,https"\nMultipleFileSupport = true\nProtocolVersion = 4\nPluginType = "FileTransfer"\n'
)

KEY, OTHER_KEY = SigningKey(b"k" * 32), SigningKey(b"o" * 32)
SETTINGS = {
    "STAGEOUT_AGENT_KEY": KEY.public,
    "DAEMON_LIST": "MASTER, SCHEDD, STARTD, STAGEOUT_AGENT, STAGEOUT_MANAGER",
    "STAGEOUT_AGENT": "/opt/stageout/bin/stageout-schedd-agent",
    "STAGEOUT_AGENT_USERID": "condor",
    "STAGEOUT_MANAGER": "/opt/stageout/bin/stageout-sandbox-manager",
    "QUEUE_SUPER_USERS": "root, condor",
    "STAGEOUT_WORKFLOW_JOBS": 'regexp("^parsl", Args ?: "")',
    "JOB_TRANSFORM_NAMES": "Site StageOutInit StageOut",
    "JOB_TRANSFORM_StageOut": "SET StageOutGuard true\nSET LeaveJobInQueue ...",
    "PROTECTED_JOB_ATTRS": "StageOutGuard StageOutAsync StageOutState StageOutRun StageOutReason StageOutUserLeave "
    "StageOutBytesLeft StageOutFilesLeft StageOutAttempts StageOutNextAttempt StageOutManager StageOutReruns "
    "StageOutStats StageOutCustody StageOutUntold StageOutKeptUntil StageOutRefused",
    "SECURE_JOB_ATTRS": "GlobalJobId",
    "JOB_EPOCH_HISTORY": "/var/lib/condor/spool/epoch_history",
    "JOB_EPOCH_HISTORY_DIR": "/var/lib/condor/spool/stageout_agent_runs",
    "VALID_SPOOL_FILES": ", ".join(["SCHEDD.lock", *AGENT_IN_SPOOL, "stageout_agent_runs", "stageout_history*"]),
    "START": "(TRUE) && (StageOutAccept =!= false || time() - (StageOutHeartbeat ?: 0) > 900)",
    "HISTORY": "/var/lib/condor/spool/history",
    "STARTD_JOB_ATTRS": "GlobalJobId RemoteUser NumShadowStarts StageOutGuard StageOutAsync OutputDestination "
    "CheckpointDestination EncryptExecuteDirectory JobPrio StageOutAgentKey StageOutSynchronousCode "
    "StageOutFallback",
    "STARTD_CRON_JOBLIST": "StageOut",
    "STARTD_CRON_StageOut_EXECUTABLE": "/opt/stageout/bin/stageout-startd-cron",
    "FILETRANSFER_PLUGINS": f"{STOCK}, {OURS}",
    "EXECUTE": "/var/lib/condor/execute",
    "SPOOL": "/var/lib/condor/spool",
    "LOG": "/var/log/condor",
    "STAGEOUT_SPOOL": "/var/lib/condor/stageout",
    "STAGEOUT_SPOOL_QUOTA_MB": "10240",
    "RESERVED_DISK": "10240",
    "FULL_HOSTNAME": "node",
}


def seen_file(uid: int = 0, mode: int = 0o755, device: int = 1, kind: int = stat.S_IFDIR) -> os.stat_result:
    return os.stat_result((kind | mode, 1, device, 1, uid, 0, 0, 0, 0, 0))


def notice(age_s: float = 10, renewal_url: str = "", **extra: Any) -> ClassAd:
    ad = notice_ad(AgentNotice("ap", "ap", KEY.public, 1, int(NOW - age_s), renewal_url, extra=extra), KEY)
    return ClassAd({**ad, "LastHeardFrom": int(NOW - age_s)})


def manager_ad(key: SigningKey | None = None, **changed: Any) -> ClassAd:
    report = Report("ep@node", key.public if key else "", 1, int(NOW), {}, 0)
    return ClassAd({**report_ad(report, key), "LastHeardFrom": int(NOW), **changed})


def manager_ad_of(**fields: Any) -> ClassAd:
    """The signed ad of a manager whose report has these fields."""
    report = replace(Report("ep@node", KEY.public, 1, int(NOW), {}, 0), **fields)
    return ClassAd({**report_ad(report, KEY), "LastHeardFrom": int(NOW)})


def slot_of_a_node_behind(by_s: int) -> ClassAd:
    """A slot that carries a report, which may be older than the ad."""
    clock = {"MyType": "Machine", "MyCurrentTime": int(NOW) - by_s, "LastHeardFrom": int(NOW)}
    return manager_ad(KEY, StageOutAccept=True, StageOutHeartbeat=int(NOW), StageOutSentAt=int(NOW) - 999, **clock)


def manager_answer_of(problem: str = "") -> ClassAd:
    source = ClassAd({"Schedd": "ap", "Problem": problem})
    return ClassAd({"Manager": "ep@node", "Uid": 0, "BytesAtRisk": 0, "CredentialSources": [source]})


@dataclass
class Fake:
    """A machine on which all is well, to be spoiled by tests."""

    values: dict[str, str] = field(default_factory=lambda: dict(SETTINGS))
    files: dict[str, Any] = field(
        default_factory=lambda: {
            "/var/lib/condor/execute": seen_file(uid=99),
            "/var/lib/condor/stageout": seen_file(),
            OURS: seen_file(),
            STOCK: seen_file(),
            SETTINGS["STAGEOUT_AGENT"]: seen_file(),
            SETTINGS["STAGEOUT_MANAGER"]: seen_file(),
            "/proc/76/root/movers/1": seen_file(),
            "/proc/self": seen_file(),
        }
    )
    texts: dict[str, str] = field(default_factory=lambda: {OURS: "from stageout.plugin import run"})
    answers: dict[str, Ran] = field(default_factory=lambda: {OURS: Ran(0, ANSWER, 0.04), STOCK: Ran(0, ANSWER, 0.01)})
    total_free: tuple[int, int] = (100 * GB, 50 * GB)
    live: dict[str, str] = field(default_factory=dict)
    in_collector: dict[str, list[ClassAd]] = field(
        default_factory=lambda: {
            "Collector": [ClassAd({"Name": "pool"})],
            "Scheduler": [ClassAd({"Name": "ap"})],
            "StageOutAgent": [notice()],
            "StageOutManager": [manager_ad(KEY)],
            "Machine": [ClassAd({"Name": "slot1@node", "StageOutAccept": True, "StageOutHeartbeat": int(NOW)})],
        }
    )
    own_slots: list[ClassAd] = field(default_factory=list)
    condor: str = "25.14.1"
    manager: Any = field(default_factory=lambda: manager_answer_of())
    generic: bool = True
    ahead_s: float = 0.0
    collector_down: bool = False
    other_pools: dict[str, list[ClassAd]] = field(default_factory=dict)
    policy: Any = 200
    pages: dict[str, str] = field(default_factory=dict)
    others: Any = 0.0
    marked: list[tuple[int, str]] = field(default_factory=lambda: [(76, "/movers/1"), (75, "/movers/ended meanwhile")])

    sees_all: bool = True
    unreadable_for: tuple[str, ...] = ()
    slow_for: tuple[str, ...] = ()
    refusals: dict[str, str] = field(default_factory=dict)
    who: str = (
        '  IsReady = true\n  MASTER = "Alive"\n  NumHung = 0\n  STAGEOUT_AGENT = "Alive"\n  STAGEOUT_AGENT_PID = 58\n'
    )

    def greet(self, host: str, port: int, key: str) -> float:
        if isinstance(self.others, Exception):
            raise self.others
        return self.others  # type: ignore[no-any-return]

    def processes(self, variable: str) -> tuple[list[tuple[int, str]], bool]:
        assert variable == MOVER_MARK
        return self.marked, self.sees_all

    def parameters(self) -> list[str]:
        return list(self.values)

    @property
    def settings(self) -> Any:
        return mapping_settings(self.values)

    def run(self, argv: Sequence[str], timeout_s: float, user: str = "") -> Ran:
        if argv[0] == "condor_who":
            return Ran(0, self.who, 0.1)
        assert argv[1:] in (["-classad"], ["--help"]) and timeout_s <= 20
        if user in self.slow_for:
            return Ran(-1, "timed out", 20.0, has_ended=False)
        if user in self.unreadable_for:
            return Ran(-1, f"[Errno 13] Permission denied: '{argv[0]}'", 0.0)
        return Ran(0, "usage: ...", 0.1) if argv[1:] == ["--help"] else self.answers[argv[0]]

    def try_handoff(self, schedd: str, plugin: str) -> str:
        assert plugin == OURS
        return self.refusals.get(schedd, "")

    def stat(self, path: str) -> os.stat_result:
        if path not in self.files:
            raise FileNotFoundError(2, "no such file", path)
        if isinstance(self.files[path], Exception):
            raise self.files[path]
        return self.files[path]  # type: ignore[no-any-return]

    def read(self, path: str) -> str:
        return self.texts.get(path, "\x7fELF")

    def end_of(self, path: str) -> str:
        return self.texts.get(f"end of {path}", "")

    def free_bytes(self, path: str) -> tuple[int, int]:
        return self.total_free

    def real(self, path: str) -> str:
        return os.path.normpath(path)

    def user_id(self, name: str) -> int | None:
        return {"root": 0, "condor": 99, "nobody": 65534, "alice": 2001}.get(name)

    def ads(self, constraint: str, pool: str = "") -> list[ClassAd]:
        if pool:
            if pool not in self.other_pools:
                raise Unseen("the collector does not answer. Is it up?")
            return self.other_pools[pool]
        if self.collector_down:
            raise Unseen("the collector does not answer. Is it up?")
        if "time()" in constraint:
            return self._clock_answer(constraint)
        found = [ad for kind, ads in self.in_collector.items() if f'MyType == "{kind}"' in constraint for ad in ads]
        return [ad for ad in found if "StageOutPayload" not in constraint or ad.text("StageOutPayload")]

    def _clock_answer(self, constraint: str) -> list[ClassAd]:
        at_least = constraint.partition("&& time() >= ")[2]
        return [ClassAd()] if NOW - self.ahead_s >= int(at_least) else []

    def ask_daemon(self, kind: str, parameter: str) -> str | None:
        return self.live.get(parameter, self.values.get(parameter))

    def slots(self) -> list[ClassAd]:
        return self.own_slots

    def version(self) -> str:
        return self.condor

    def manager_answer(self) -> ClassAd:
        if isinstance(self.manager, Exception):
            raise self.manager
        return self.manager  # type: ignore[no-any-return]

    def is_expression(self, text: str) -> bool:
        return bool(text.strip("()")) and text.count("(") == text.count(")")

    def accepts_generic(self) -> bool:
        return self.generic

    def http_status(self, url: str, token: str) -> int:
        assert (url, token) == ("https://policy:1/v1/leases", "secret")
        if isinstance(self.policy, Exception):
            raise self.policy
        return self.policy  # type: ignore[no-any-return]

    def http_text(self, url: str, certificate: str) -> str:
        if url not in self.pages:
            raise OSError("Connection refused")
        return self.pages[url]

    def listens(self, host: str, port: int) -> bool:
        return (host, port) == ("127.0.0.1", 9621)

    def now(self) -> float:
        return NOW
