"""Mail to owners: who gets which, how many, and what the mailer is given."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from schedd_agent.mail import CondorMailer, News, Outbox, wants
from schedd_agent.model import MailTo
from stageout.core.config import mapping_settings
from tests.polling import wait_for

ALICE = MailTo(1, "alice", "example.org")


class MemoryMailer:
    def __init__(self) -> None:
        self.mails: list[tuple[Sequence[str], str, str]] = []

    def addresses(self, to: MailTo) -> tuple[str, ...]:
        return (f"{to.address}@{to.domain}",)

    def send(self, addresses: Sequence[str], subject: str, body: str) -> None:
        self.mails.append((addresses, subject, body))

    def look_after(self, now_s: float) -> None:
        pass


def test_which_news_a_notification_asks_for() -> None:
    asked = {number: [news.name for news in News if wants(number, news)] for number in range(5)}
    everything = ["HELD", "FAILED", "DELIVERED"]
    assert asked == {0: [], 1: everything, 2: everything, 3: ["HELD", "FAILED"], 4: []}


def test_one_job_one_mail() -> None:
    mailer = MemoryMailer()
    outbox = Outbox(mailer, 600.0)
    outbox.post(ALICE, "7.0", News.HELD, "no\nroom")
    outbox.send(1.0)
    ((addresses, subject, body),) = mailer.mails
    assert (addresses, subject) == (("alice@example.org",), "[Condor] Condor Job 7.0 put on hold")
    assert "Job 7.0: put on hold\n    no room\n" in body


def test_ten_thousand_jobs_are_two_mails() -> None:
    mailer = MemoryMailer()
    outbox = Outbox(mailer, 600.0)
    for number in range(10_000):
        outbox.post(ALICE, f"{number}.0", News.HELD, "x" * 9000)
        outbox.send(number / 100)
    outbox.send(700.0)
    outbox.send(5000.0)
    assert [subject for _, subject, _ in mailer.mails] == [
        "[Condor] Condor Job 0.0 put on hold",
        "[Condor] 9999 Condor jobs: 9999 put on hold",
    ]
    assert "and 9949 more jobs" in mailer.mails[1][2]
    assert len(mailer.mails[1][2]) < 60_000, "it must fit into a pipe"


def test_owners_do_not_wait_for_one_another_and_nothing_is_left_at_the_end() -> None:
    mailer = MemoryMailer()
    outbox = Outbox(mailer, 600.0)
    outbox.post(ALICE, "1.0", News.HELD, "x")
    outbox.send(1.0)
    outbox.post(MailTo(1, "bob", "example.org"), "2.0", News.DELIVERED, "x")
    outbox.post(ALICE, "3.0", News.HELD, "x")
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
    assert mailer.addresses(MailTo(1, address, domain)) == full


def test_without_a_mailer_and_with_one_that_is_missing_the_agent_goes_on(tmp_path: Path) -> None:
    for settings in ({}, {"MAIL": str(tmp_path / "missing")}):
        mailer, _ = _mailer(tmp_path, **settings)
        mailer.send(("a@b.org",), "s", "b")
        mailer.look_after(0.0)
