"""Attacks on a real pool: an execute point, a local user and a job each speak for others, and nobody believes them.

The attacker has what a stolen or hostile node has: root on an execute point, and so its token, which is good for every
ad in the collector.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stageout.core.signing import SigningKey
from stageout.core.states import State
from stageout.wire import handoff
from stageout.wire.custody import (
    Action,
    AgentNotice,
    Order,
    OrderSheet,
    Report,
    SandboxReport,
    notice_ad,
    orders_ad,
    payload_of,
    read_report,
    report_ad,
)
from tests.harness.pool.node import PILOT
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site
from tests.pool.messages import order_ads, write_messages

pytestmark = pytest.mark.pool

EVIL = SigningKey(b"e" * 32)
_NUMBERS = itertools.count(10**6)
REPORTS = '(StageOutPayload ?: "") != "" && (MyType == "StageOutManager" || MyType == "Machine")'
IN_CUSTODY = ("Confirmed", "Leased", "Moving", "RetryWait")


def holder_of(site: Any, job: Any) -> Any:
    """The execute point that has a job's output."""
    host = str(site.pool.q(job, ["StageOutManager"])["StageOutManager"]).rpartition("@")[2].split(".")[0]
    return next(ep for ep in site.pool.eps if ep.name == host)


def report_of(site: Any, job: Any) -> tuple[dict[str, Any], Report, SandboxReport]:
    """The manager's ad, its report, and the job's sandbox in it."""
    name = str(site.pool.q(job, ["GlobalJobId"])["GlobalJobId"])

    def find() -> Any:
        for ad in site.pool.collector_query(REPORTS, "Any"):
            report = read_report(payload_of(ad))
            box = next((item for item in report.sandboxes if item.job == name), None)
            if box is not None and box.reason != "forged":
                return dict(ad), report, box
        return None

    found = site.pool.wait(find, what=f"the report about {job}")
    assert found
    return found  # type: ignore[no-any-return]


def waiting_job(site: Any) -> tuple[Any, dict[str, Any], Report, SandboxReport]:
    """A job whose output waits on a node for a server that is away."""
    job = site.submit()
    wait_in_custody(site, job)
    return (job, *report_of(site, job))


def wait_in_custody(site: Any, job: Any) -> None:
    """Wait until the job's output is confirmed and waits for its server."""
    site.pool.wait(lambda: site.state(job) in IN_CUSTODY, timeout_s=90, what=f"the output of {job} to be in custody")


def lines_of(node: Any, daemon: str, *words: str) -> list[str]:
    """Lines of a daemon's log with all of these words."""
    return [line for line in node.log(daemon).splitlines() if all(word in line for word in words)]


def named(site: Any, name: str, state: State) -> bool:
    """The agent's log says that what the impostor called ``name`` said is not believed."""
    return bool(lines_of(site.pool.ap, "ScheddAgentLog", f'ad="{name} {EVIL.public}" problem="{state} of run'))


def insist(site: Any, attacker: Any, ads: list[dict[str, Any]], heard: Callable[[], bool], what: str) -> None:
    """Write the ads again and again, as the one whose they should be does too, until somebody has read them."""

    def write_and_look() -> bool:
        if heard():
            return True
        write_messages(attacker, ads)
        return False

    site.pool.wait(write_and_look, timeout_s=120, what=what, interval_s=0.3)


def check_untouched(site: Any, job: Any) -> None:
    """The job waits for its output, which nobody has ended, held or called anything else."""
    ad = site.pool.q(job)
    assert ad and ad["JobStatus"] == 4, ad.get("HoldReason")
    assert ad["StageOutState"] in ("Accepted", *IN_CUSTODY), "Accepted: no report of the real one for the moment"
    assert "forged" not in ad["StageOutReason"]


@pytest.fixture
def away(site: Any) -> Iterator[Any]:
    """A site whose destination is down until :func:`back`."""
    site.destination.stop()
    site.gone = True
    try:
        yield site
    finally:
        back(site)


def back(site: Any) -> None:
    """The destination answers again; it must be started only once."""
    if site.gone:
        site.gone = False
        site.destination.start()


def forged(
    report: Report, box: SandboxReport, state: State, key: SigningKey, manager: str, public: str = ""
) -> dict[str, Any]:
    """A report that says that the run is at its end. :param key: signs. :param public: key that it claims to be of."""
    said = SandboxReport(**{**vars(box), "state": state.value, "change": box.change + 1000, "reason": "forged",
                            "files_left": 0, "bytes_left": 0, "files": ()})  # fmt: skip
    number = report.number + next(_NUMBERS)  # A number is believed only once.
    facts = {"manager": manager, "key": public or key.public, "number": number, "sent_at": int(time.time())}
    facts["sandboxes"] = (said,)
    return report_ad(Report(**{**vars(report), **facts}), key)


def test_an_execute_point_cannot_end_what_another_has(away: Any) -> None:
    """Delivered, failed, lost, cancelled, superseded: as itself, and in the name of the one who has the output."""
    site = away
    job, real_ad, report, box = waiting_job(site)
    holder = holder_of(site, job)
    attacker = next(ep for ep in site.pool.eps if ep is not holder)
    site.stageout("pause", str(job))  # nothing is tried any more, so the manager has nothing new to report
    ends = (State.CANCELLED, State.SUPERSEDED, State.DELIVERED, State.FAILED, State.LOST)
    as_itself = [forged(report, box, state, EVIL, f"manager@evil-{state}") for state in ends]
    write_messages(attacker, as_itself)
    in_its_name = forged(report, box, State.LOST, EVIL, report.manager)
    insist(site, attacker, [in_its_name], lambda: named(site, report.manager, State.LOST), "the impostor to be named")
    for state in ends[2:]:
        site.pool.wait(
            lambda state=state: named(site, f"manager@evil-{state}", state), what=f"the one who says {state}"
        )
    check_untouched(site, job)
    in_its_key = forged(report, box, State.LOST, EVIL, report.manager, report.key)
    stolen = {**in_its_key, "StageOutSignature": real_ad["StageOutSignature"]}
    words = ("report-refused", f"ad={report.manager} ", f"not that of {report.key}")
    refused = functools.partial(lines_of, site.pool.ap, "ScheddAgentLog", *words)
    insist(site, attacker, [stolen], lambda: bool(refused()), "the stolen signature to be refused")
    check_untouched(site, job)

    def doctor_tells() -> bool:
        command = ["/opt/stageout/bin/stageout", "doctor", "--role", "ap"]
        said = site.pool.ap.run(command, user="root", check=False).stdout
        return "refused-reports" in said and "manager@evil" in said

    site.pool.wait(doctor_tells, what="doctor to name the impostor", interval_s=1)
    site.stageout("resume", str(job))
    back(site)
    site.wait_left(job, timeout_s=120)
    site.check_delivered(job)


def test_an_execute_point_cannot_give_orders(away: Any) -> None:
    """Every order in the name of the access point, signed with another key and not signed at all."""
    site = away
    job, _, report, box = waiting_job(site)
    holder = holder_of(site, job)
    attacker = next(ep for ep in site.pool.eps if ep is not holder)
    agent = box.run.schedd
    ads = [notice_ad(AgentNotice(agent, agent, EVIL.public, 10**18, int(time.time())), EVIL)]
    for number, action in enumerate(Action):
        order = Order(
            10**17 + number, action, box.job, box.number + 5, box.tickets, box.files_total, owner=box.owner
        )  # fmt: skip
        sheet = OrderSheet(agent, report.manager, int(time.time()), (order,), report.key)
        ads.append({**orders_ad(sheet, EVIL), "Name": f"evil/{action.value}"})
        ads.append({**orders_ad(sheet), "Name": f"unsigned/{action.value}"})
    write_messages(attacker, ads)

    def refused() -> set[str]:
        return {line.split("ad=")[1].split()[0] for line in lines_of(holder, "SandboxManagerLog", "message-refused")}

    wanted = {f"{kind}/{action.value}" for kind in ("evil", "unsigned") for action in Action}
    site.pool.wait(lambda: wanted <= refused(), timeout_s=60, what="the manager to refuse all of it")
    after = report_of(site, job)[2]
    assert after.state in IN_CUSTODY and after.tickets == box.tickets
    doctor = holder.run(["/opt/stageout/bin/stageout", "doctor", "--role", "ep"], user="root", check=False).stdout
    assert "refused-orders" in doctor
    back(site)
    site.wait_left(job, timeout_s=120)
    site.check_delivered(job)


def test_recorded_messages_are_not_played_back(away: Any) -> None:
    """True reports and orders of a minute ago: read by anybody, written again by a node."""
    site = away
    job, recorded_report, report, _ = waiting_job(site)
    attacker = next(ep for ep in site.pool.eps if ep is not holder_of(site, job))
    recorded_orders: dict[str, dict[str, Any]] = {}

    def record() -> bool:
        found = order_ads(site.pool, report.manager)
        recorded_orders.update({ad["StageOutPayload"]: ad for ad in found if '"action":' in ad["StageOutPayload"]})
        return not site.pool.q(job, ["StageOutRequest"]).get("StageOutRequest")

    site.pool.qedit(job, user="alice", StageOutRequest='"pause"')
    site.pool.wait(record, what="the pause")
    site.stageout("resume", str(job))
    assert recorded_orders, "true orders were seen on the way"
    kept = ("MyType", "Name", "StageOutManager", "StageOutPayload", "StageOutSignature")
    played = [{name: ad[name] for name in kept} for ad in (*recorded_orders.values(), recorded_report)]
    old = ("report-refused", f"of {report.manager} is old")
    heard = functools.partial(lines_of, site.pool.ap, "ScheddAgentLog", *old)
    insist(site, attacker, played, lambda: bool(heard()), "the agent to refuse the old report")
    check_untouched(site, job)
    back(site)
    site.wait_left(job, timeout_s=120)
    site.check_delivered(job)


_REWRITES = r"""#!/bin/sh
victim='%s'
for ad in "$_CONDOR_JOB_AD" "$_CONDOR_MACHINE_AD" .job.ad .machine.ad; do
    [ -e "$ad" ] || continue
    sed -i -e "s/^GlobalJobId = .*/GlobalJobId = \"$victim\"/" -e 's/^NumShadowStarts = .*/NumShadowStarts = 99/' \
        -e 's/^Owner = .*/Owner = "alice"/' -e 's/^User = .*/User = "alice@test"/' \
        -e 's/^StageOutGuard = .*/StageOutGuard = true/' "$ad" 2>/dev/null ||
        { cp "$ad" ad.new && sed -i "s/^GlobalJobId = .*/GlobalJobId = \"$victim\"/" ad.new && mv -f ad.new "$ad"; }
done
grep -l "$victim" "$_CONDOR_JOB_AD" .job.ad 2>/dev/null | head -n 1
echo evil > out1
"""


def test_a_job_that_rewrites_its_ads_speaks_for_itself_only(away: Any) -> None:
    """Bob's job calls itself a newer run of Alice's. Its output stays its own; hers is not superseded."""
    site = away
    victim, _, _, box = waiting_job(site)
    script = _REWRITES % box.job
    lines = ["executable = evil.sh", "should_transfer_files = YES", "transfer_output_files = out1",
             "when_to_transfer_output = ON_EXIT", f"output_destination = {site.url('evil')}", "output = evil.out",
             "request_disk = 10M", "request_memory = 50", "queue"]  # fmt: skip
    evil = site.pool.submit("bob", "\n".join(lines), files={"evil.sh": script})
    site.jobs.append(evil)
    wait_in_custody(site, evil)
    assert ".job.ad" in (evil.dir / "evil.out").read_text(), "the job did rewrite its ad"
    own = report_of(site, evil)[2]
    assert own.owner.split("@")[0] == "bob" and own.number == 1
    after = report_of(site, victim)[2]
    assert (after.tickets, after.number) == (box.tickets, box.number) and after.state != "Superseded"
    back(site)
    for job in (victim, evil):
        site.wait_left(job, timeout_s=120)
    site.check_delivered(victim)
    assert site.state(victim) == "Delivered"
    assert site.destination.file(f"{site.prefix}/evil/out1").read_text() == "evil\n"


_TALK = r"""
import json, os, socket, struct, sys
def frame(message):
    body = json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body
def ask(path, *messages):
    with socket.socket(socket.AF_UNIX) as talk:
        talk.settimeout(30)
        talk.connect(path)
        try:
            for message in messages:
                talk.sendall(frame(message))
        except BrokenPipeError:
            pass  # it was refused before it was read to its end
        (length,) = struct.unpack(">I", talk.recv(4))
        return json.loads(talk.recv(length))
run = sys.argv[1] + "/run/"
found = {"ops": {}, "reached": []}
for op in ("retry", "cancel", "confirm", "forget", "order", "status"):
    found["ops"][op] = ask(run + "control", {"op": op, "job": sys.argv[2]})
hand_off = sys.argv[3]
offer = {"op": "offer", "version": int(sys.argv[6]), "plugin": sys.argv[4], "files": 1, "size_bytes": 1}
found["hand_off"] = ask(run + hand_off, offer, {"op": "files", "files": [["http://x/y", "/etc/passwd", 1]]})
ticket = "sandboxes/" + sys.argv[5]
for name in ("ledger", "sandboxes", "intake", ticket, ticket + "/0", "ledger/manager_key", "ledger/ledger.sqlite"):
    try:
        path = os.path.join(sys.argv[1], name)
        os.listdir(path) if os.path.isdir(path) else open(path, "rb").close()
        found["reached"].append(name)
    except OSError:
        pass
print(json.dumps(found))
"""


def test_a_local_user_of_the_node_gets_nowhere(away: Any) -> None:
    """Somebody with a shell on the node: no orders by sockets, no hand-off, no look into the spool or at the key."""
    site = away
    job, _, _, box = waiting_job(site)
    holder = holder_of(site, job)
    socket = handoff.socket_name(holder.config_val("EXECUTE"))
    arguments = [holder.config_val("STAGEOUT_SPOOL"), box.job, socket, "/opt/stageout/bin/stageout_curl_plugin"]
    arguments += [box.tickets[0], str(handoff.VERSION)]
    for user in ("bob", "alice"):
        done = holder.run(["python3", "-c", _TALK, *arguments], user=user, cwd="/")
        found = json.loads(done.stdout)
        assert {op: answer["op"] for op, answer in found["ops"].items() if op != "status"} == dict.fromkeys(
            ("retry", "cancel", "confirm", "forget", "order"), "refuse"
        )
        assert (found["ops"]["status"]["op"] == "sandbox") is (user == "alice"), "one's own output may be looked at"
        assert found["hand_off"]["op"] == "refuse"
        assert "condor_starter" in found["hand_off"]["reason"]
        assert found["reached"] == []
    assert lines_of(holder, "SandboxManagerLog", "handoff-refused pid="), "and the administrator can see it"
    check_untouched(site, job)
    back(site)
    site.wait_left(job, timeout_s=120)
    site.check_delivered(job)


def test_pilots_sign_in_their_slot_ads_and_speak_for_nobody_else(
    stageout_pools: Any, destination: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Two pilots whose tokens may only advertise slots: one writes the other's report into a slot of its own."""
    fragment = (Path(__file__).resolve().parents[2] / "condor_config.d" / "20-stageout-ep.conf").read_text()
    pilot = dataclasses.replace(PILOT, config=f"{fragment}\n{QUICK_EP}")
    with stageout_pools(version="25.14", execute_points=[pilot, pilot], ap_config=QUICK_AP) as pool:
        site = Site(pool, destination, "trust-pilots", tmp_path)
        destination.stop()
        try:
            job, real_ad, report, box = waiting_job(site)
            assert real_ad["MyType"] == "Machine" and report.key.startswith("ed25519:")
            assert pool.q(job, ["StageOutKeys"])["StageOutKeys"] == report.key
            attacker = next(ep for ep in pool.eps if ep is not holder_of(site, job))
            slot = {"MyType": "Machine", "Machine": "evil", "SlotID": 1, "State": "Owner", "Activity": "Idle",
                    "MyAddress": "<127.0.0.1:9>", "StartdIpAddr": "<127.0.0.1:9>"}  # fmt: skip
            wrong = {
                state: forged(report, box, state, EVIL, f"manager@{state}") for state in (State.DELIVERED, State.LOST)
            }
            ads = [{**ad, **slot, "Name": f"slot1@{state}"} for state, ad in wrong.items()]
            ads.append({**forged(report, box, State.FAILED, EVIL, report.manager), **slot, "Name": "slot1@evil"})
            write_messages(attacker, ads)
            names = {State.DELIVERED: "manager@Delivered", State.LOST: "manager@Lost", State.FAILED: report.manager}
            for state, name in names.items():
                pool.wait(lambda state=state, name=name: named(site, name, state), what=f"the one who says {state}")
            check_untouched(site, job)
        finally:
            destination.start()
            keep_logs(request, [pool])
        site.wait_left(job, timeout_s=120)
        site.check_delivered(job)


def test_keys_travel_with_jobs_and_are_renewed(site: Any) -> None:
    """STAGEOUT_AGENT_KEY: managers learn the key from jobs; a new one is vouched for by the old one."""
    ap = site.pool.ap
    agent = ["/opt/stageout/bin/stageout-schedd-agent"]
    key = ap.run([*agent, "--key"], user="condor", cwd="/").stdout.strip()

    def tell(told: str) -> None:
        ap.configure(f"STAGEOUT_AGENT_KEY = {told}\n", name="96-key.conf")
        ask = ["condor_config_val", "-schedd", "STAGEOUT_AGENT_KEY"]
        site.pool.wait(lambda: ap.run(ask, check=False).stdout.strip() == told, what="the schedd to know the key")

    tell(key)
    job = site.submit()
    assert site.pool.q(job, ["StageOutAgentKey"])["StageOutAgentKey"] == key
    site.wait_left(job)

    def learnt(ep: Any, what: str, *words: str) -> bool:
        return any(lines_of(ep, "SandboxManagerLog", f"key={what} learnt={word}") for word in words)

    assert any(learnt(ep, key, "claim") for ep in site.pool.eps)
    nodes = [ep for ep in site.pool.eps if learnt(ep, key, "claim", "first")]
    new = ap.run([*agent, "--new-key"], user="condor", cwd="/").stdout.strip()
    assert new != key
    tell(new)
    site.pool.wait(
        lambda: all(learnt(ep, new, "claim", "first") for ep in nodes), timeout_s=60, what="the new key to be known"
    )
    job = site.submit()
    history = site.wait_left(job)
    assert history["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 2
    site.check_delivered(job)
