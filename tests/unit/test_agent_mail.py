"""Mail to owners: who gets which, how many, and what the mailer is given."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from schedd_agent.mail import CondorMailer, MailKind, MailQueue, is_wanted, mailer_of
from stageout.core.config import ConfigError, mapping_settings
from stageout.model.job import MailRecipient
from tests.polling import wait_for

ALICE = MailRecipient(1, "alice", "example.org")


class MemoryMailer:
    def __init__(self) -> None:
        self.mails: list[tuple[Sequence[str], str, str]] = []

    def addresses(self, to: MailRecipient) -> tuple[str, ...]:
        return (f"{to.address}@{to.domain}",)

    def send(self, addresses: Sequence[str], subject: str, body: str) -> None:
        self.mails.append((addresses, subject, body))

    def reap(self, now_s: float, at_once: bool = False) -> bool:
        return False


def test_which_news_a_notification_asks_for() -> None:
    """``Email::shouldSend`` of HTCondor has the same numbers, and sends all mail for a number that it does not know."""
    asked = {number: {news.name for news in MailKind if is_wanted(number, news)} for number in range(6)}
    failures, ends = {"HELD", "FAILED"}, {"ALL_DELIVERED", "SOME_DELIVERED"}
    everything = {*failures, *ends, "DELIVERED", "ATTEMPT_FAILED"}
    assert asked == {
        0: set(), 1: everything, 2: failures | ends, 3: {*failures, "ATTEMPT_FAILED"}, 4: set(), 5: everything,
    }  # fmt: skip


def test_one_job_one_mail() -> None:
    mailer = MemoryMailer()
    outbox = MailQueue(mailer, 600.0)
    outbox.post(ALICE, "Job 7.0", MailKind.HELD, "no\nroom")
    outbox.send(1.0)
    ((addresses, subject, body),) = mailer.mails
    assert (addresses, subject) == (("alice@example.org",), "[Condor] Condor Job 7.0 put on hold")
    assert "Job 7.0: put on hold\n    no room\n" in body


def test_ten_thousand_jobs_are_two_mails() -> None:
    mailer = MemoryMailer()
    outbox = MailQueue(mailer, 600.0)
    for number in range(10_000):
        outbox.post(ALICE, f"Job {number}.0", MailKind.HELD, "x" * 9000)
        outbox.send(number / 100)
    outbox.send(700.0)
    outbox.send(5000.0)
    assert [subject for _, subject, _ in mailer.mails] == [
        "[Condor] Condor Job 0.0 put on hold",
        "[Condor] 9999 Condor jobs: 9999 put on hold",
    ]
    assert "and 9949 more jobs" in mailer.mails[1][2]
    assert len(mailer.mails[1][2]) < 60_000, "it must fit into a pipe"


def test_many_jobs_leave_room_for_news_about_a_cluster() -> None:
    mailer = MemoryMailer()
    outbox = MailQueue(mailer, 600.0)
    for number in range(60):
        outbox.post(ALICE, f"Job 7.{number}", MailKind.DELIVERED, "x")
    for number in range(7, 9):
        outbox.post(ALICE, f"Cluster {number}", MailKind.ALL_DELIVERED, f"sums of {number}")
    outbox.send(1.0)
    ((_, subject, body),) = mailer.mails
    assert subject == "[Condor] 62 messages on Condor jobs: 60 output delivered, 2 all output delivered"
    assert body.startswith("Cluster 7: all output delivered\n    sums of 7\n\nCluster 8: all output delivered\n")
    assert "and 10 more jobs" in body
    assert "more clusters" not in body


def test_owners_do_not_wait_for_one_another_and_nothing_is_left_at_the_end() -> None:
    mailer = MemoryMailer()
    outbox = MailQueue(mailer, 600.0)
    outbox.post(ALICE, "Job 1.0", MailKind.HELD, "x")
    outbox.send(1.0)
    outbox.post(MailRecipient(1, "bob", "example.org"), "Job 2.0", MailKind.DELIVERED, "x")
    outbox.post(ALICE, "Job 3.0", MailKind.HELD, "x")
    outbox.send(2.0)
    assert [addresses for addresses, _, _ in mailer.mails] == [("alice@example.org",), ("bob@example.org",)]
    outbox.send(2.0, at_once=True)
    assert len(mailer.mails) == 3


def _mailer(tmp_path: Path, **more: str) -> tuple[CondorMailer, Path]:
    program, sent = tmp_path / "mailer", tmp_path / "sent"
    program.write_text(f'#!/bin/sh\n{{ printf "<%s>" "$@"; echo; cat; }} > {shlex.quote(str(sent))}.new\n')
    with program.open("a") as stream:
        stream.write(f"mv {shlex.quote(str(sent))}.new {shlex.quote(str(sent))}\n")
    program.chmod(0o755)
    values = {name: value.replace("PROGRAM", str(program)) for name, value in more.items()}
    return CondorMailer(mapping_settings(values), "ap"), sent


def test_the_mailer_gets_what_htcondor_gives_it(tmp_path: Path) -> None:
    mailer, sent = _mailer(tmp_path, MAIL="PROGRAM", MAIL_FROM="condor@ap", CONDOR_ADMIN="root@ap")
    mailer.send(("alice@example.org", "bob@example.org"), "[Condor] x", "~! a body")
    wait_for(sent.exists)
    first, _, text = sent.read_text().partition("\n")
    assert first == "<-s><[Condor] x><-r><condor@ap><alice@example.org><bob@example.org>"
    assert "~! a body" in text
    assert "root@ap" in text


def test_sendmail_goes_before_mail(tmp_path: Path) -> None:
    mailer, sent = _mailer(tmp_path, MAIL="/bin/false", SENDMAIL="PROGRAM")
    mailer.send(("alice@example.org",), "[Condor] x", "a body")
    wait_for(sent.exists)
    assert sent.read_text().startswith("<-t><-i>\nSubject: [Condor] x\nTo: alice@example.org\n\n")


def test_the_administrator_s_program_gets_the_same_messages(tmp_path: Path) -> None:
    _, sent = _mailer(tmp_path)
    command = str(tmp_path / "mailer")
    outbox = MailQueue(mailer_of(mapping_settings({"STAGEOUT_NOTIFY_COMMAND": command}), "ap"), 600.0)
    outbox.post(MailRecipient(0, "bob", "example.org"), "Job 8.0", MailKind.DELIVERED, "")
    outbox.post(ALICE, "Job 7.0", MailKind.HELD, 'no "room" für 5 €')
    outbox.send(1.0)
    wait_for(sent.exists)
    arguments, _, text = sent.read_text(encoding="utf-8").partition("\n")
    message = json.loads(text)
    assert (arguments, message["to"]) == ("<>", ["alice@example.org"])
    assert message["subject"] == "[Condor] Condor Job 7.0 put on hold"
    assert 'no "room" für 5 €' in message["text"]


def _program(tmp_path: Path, text: str) -> str:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def test_a_program_that_does_not_read_its_input_is_not_waited_for(tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    mailer = CondorMailer(
        mapping_settings({"MAIL": _program(tmp_path, f": > {shlex.quote(str(sent))}; exec sleep 60")}), "ap"
    )
    began_s = time.monotonic()
    mailer.send(("a@b.org",), "s", "x" * 200_000 + "\udcff")
    wait_for(sent.exists)
    (process, _), *others = mailer._programs._running
    process.kill()
    process.wait()
    assert not others and time.monotonic() - began_s < 30


def test_messages_wait_until_others_have_ended(tmp_path: Path) -> None:
    gate, sent = tmp_path / "gate", tmp_path / "sent"
    text = f"while ! [ -e {shlex.quote(str(gate))} ]; do sleep 0.05; done; echo $2 >> {shlex.quote(str(sent))}"
    mailer = CondorMailer(mapping_settings({"MAIL": _program(tmp_path, text)}), "ap")
    for number in range(9):
        mailer.send(("a@b.org",), f"mail{number}", "b")
    assert mailer.reap(0.0)
    assert len(mailer._programs._running) == 4
    gate.touch()
    wait_for(lambda: not mailer.reap(0.0))
    assert sorted(sent.read_text().split()) == [f"mail{number}" for number in range(9)]


def test_programs_of_a_former_mailer_are_collected(tmp_path: Path) -> None:
    former = CondorMailer(mapping_settings({"MAIL": _program(tmp_path, "exit 1")}), "ap")
    outbox = MailQueue(former, 600.0)
    former.send(("a@b.org",), "s", "b")
    outbox.replace_mailer(MemoryMailer(), 600.0)

    def is_collected() -> bool:
        outbox.send(1.0)
        return not former._programs._running

    wait_for(is_collected)
    assert not outbox._former


def test_a_program_that_is_missing_or_hangs_does_not_stop_the_agent(tmp_path: Path) -> None:
    mailer = mailer_of(mapping_settings({"STAGEOUT_NOTIFY_COMMAND": str(tmp_path / "missing")}), "ap")
    mailer.send(("a@b.org",), "s", "b")
    mailer.reap(0.0)
    with pytest.raises(ConfigError, match="absolute path"):
        mailer_of(mapping_settings({"STAGEOUT_NOTIFY_COMMAND": "notify"}), "ap")


@pytest.mark.parametrize(
    ("address", "domain", "more", "full"),
    [
        ("alice", "example.org", {}, ("alice@example.org",)),
        ("alice", "", {"UID_DOMAIN": "site.org"}, ("alice@site.org",)),
        ("alice", "example.org", {"EMAIL_DOMAIN": "mail.org"}, ("alice@mail.org",)),
        ("a@b.org, c@d.org", "", {}, ("a@b.org", "c@d.org")),
        ("-oQ/tmp", "example.org", {}, ()),
        ("|/bin/sh", "example.org", {}, ()),
        ("/etc/passwd", "example.org", {}, ()),
        ("a@b.org\nBcc: x@y.org", "", {}, ("a@b.org", "x@y.org")),
        ("", "example.org", {}, ()),
    ],
)
def test_addresses_are_made_as_htcondor_makes_them_and_are_nothing_else(
    tmp_path: Path, address: str, domain: str, more: dict[str, str], full: tuple[str, ...]
) -> None:
    mailer, _ = _mailer(tmp_path, **more)
    assert mailer.addresses(MailRecipient(1, address, domain)) == full


def test_without_a_mailer_and_with_one_that_is_missing_the_agent_goes_on(tmp_path: Path) -> None:
    for settings in ({}, {"MAIL": str(tmp_path / "missing")}):
        mailer, _ = _mailer(tmp_path, **settings)
        mailer.send(("a@b.org",), "s", "b")
        assert not mailer.reap(0.0), "nothing is left to wait for"
