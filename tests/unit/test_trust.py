"""The rights to speak: keys, signatures, and every attempt to speak for somebody else."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_manager.custody.ledger import Ledger
from sandbox_manager.intake.agents import AgentTable
from sandbox_manager.report.trust import AgentKeys, OrderVerifier, read_listed
from stageout.core import signing
from stageout.core.config import ConfigError
from stageout.core.signing import BadSignature, KeyUnusable, SigningKey, Vouch, check, load_key, load_or_make_key
from stageout.wire.custody import (
    AGENT_AD,
    ORDERS_AD,
    Action,
    AgentNotice,
    Order,
    OrderSheet,
    notice_ad,
    orders_ad,
    read_notice,
)

AGENT, EVIL, MANAGER = (SigningKey(letter * 32) for letter in (b"a", b"e", b"m"))
JOB = "ap#7.0#1700000000"


class Ticks:
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1_700_000_000 + self.now_s


# ---- keys and signatures ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.text(), st.text(), st.binary(min_size=32, max_size=32))
def test_a_signature_is_good_for_its_kind_text_and_key_only(kind: str, text: str, private: bytes) -> None:
    key = SigningKey(private)
    signature = key.sign(kind, text)
    check(kind, text, signature, key.public)
    for other in ((kind + "x", text, key.public), (kind, text + "x", key.public), (kind, text, EVIL.public)):
        with pytest.raises(BadSignature):
            check(other[0], other[1], signature, other[2])


@pytest.mark.parametrize(
    ("signature", "public", "words"),
    [
        ("", AGENT.public, "not signed"),
        ("x", AGENT.public, "malformed"),
        ("é", AGENT.public, "malformed"),
        (AGENT.sign("k", "t"), "", "malformed"),
        (AGENT.sign("k", "t"), "ed25519:AAAA", "malformed"),
        (AGENT.sign("k", "t"), "rsa:" + AGENT.public, "malformed"),
        (AGENT.sign("k", "t") + "AAAA", AGENT.public, "not that of"),
    ],
)
def test_what_is_no_signature_is_refused_with_words(signature: str, public: str, words: str) -> None:
    with pytest.raises(BadSignature, match=words):
        check("k", "t", signature, public)


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert load_key(path) is None
    made = load_or_make_key("manager-key", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_make_key("manager-key", path).public == made.public
    path.chmod(0o640)
    with pytest.raises(KeyUnusable, match="chmod 600"):
        load_key(path)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"private": "AAAA", "vouches": []}', '{"private": 7, "vouches": []}']
)
def test_a_damaged_key_is_not_replaced_behind_peoples_backs(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeyUnusable, match="cannot be used"):
        load_or_make_key("manager-key", path)
    assert path.read_text() == text


def test_a_chain_of_successors_is_followed_and_a_forged_one_is_not() -> None:
    first, third = AGENT, AGENT.successor().successor()
    assert signing.succeeds(third.public, first.public, third.vouches)
    assert signing.succeeds(third.public, third.vouches[0].new, third.vouches)
    forged = Vouch(first.public, EVIL.public, EVIL.sign("StageOutSuccessor", EVIL.public))
    assert not signing.succeeds(EVIL.public, first.public, [forged])
    assert not signing.succeeds(EVIL.public, first.public, third.vouches)


# ---- the manager's gate ----------------------------------------------------------------------------------------------


class Gate:
    """One manager's gate with what it has learnt."""

    def __init__(self, listed: Mapping[str, str] | None = None) -> None:
        self.clock = Ticks()
        self.keys = AgentKeys(self.clock, listed or {})
        self.agents = AgentTable(self.clock, 180, self.keys.claimed)
        self.gate = OrderVerifier("m1", MANAGER.public, self.agents, self.keys)

    def take(self, *ads: dict[str, Any], held: frozenset[str] = frozenset()) -> list[OrderSheet]:
        return self.gate.sheets(ads, held)

    @property
    def refused(self) -> str:
        return " | ".join(item["Problem"] for item in self.gate.facts()["Refused"])


def notice(key: SigningKey, schedd: str = "ap", number: int = 1, **changed: Any) -> dict[str, Any]:
    facts = AgentNotice(schedd, schedd, key.public, number, 1, vouches=key.vouches)
    return notice_ad(replace(facts, **changed), key)


def orders(key: SigningKey | None, job: str = JOB, action: Action = Action.CANCEL, **changed: Any) -> dict[str, Any]:
    sheet = OrderSheet("ap", "m1", 1, (Order(5, action, job, 1),), MANAGER.public)
    return orders_ad(replace(sheet, **changed), key)


def test_orders_of_the_access_point_are_obeyed() -> None:
    gate = Gate()
    (sheet,) = gate.take(orders(AGENT), notice(AGENT))
    assert sheet.orders[0].action is Action.CANCEL
    assert gate.agents.is_fresh("ap")
    assert gate.refused == ""


OTHER_TEXT = orders(None, "ap#8.0#1")["StageOutPayload"]


@pytest.mark.parametrize("action", list(Action))
@pytest.mark.parametrize(
    ("forged", "words"),
    [
        (lambda a: orders(EVIL, action=a), "not that of"),
        (lambda a: orders(None, action=a), "not signed"),
        (lambda a: {**orders(AGENT, action=a), "StageOutPayload": OTHER_TEXT}, "not that of"),
        (lambda a: orders(AGENT, action=a, manager="m2"), "it is for m2"),
        (lambda a: orders(AGENT, action=a, manager_key=EVIL.public), "it is for m1 with key"),
        (lambda a: orders(AGENT, action=a, manager_key=""), "with key none"),
        (lambda a: orders(AGENT, "other#7.0#1", a), "a job of another access point"),
        (lambda a: orders(EVIL, action=a, agent="evil"), "no key of evil"),
        (lambda a: {"MyType": ORDERS_AD, "Name": "x", "StageOutPayload": "{"}, "not JSON"),
        (lambda a: {"MyType": ORDERS_AD, "Name": "x"}, "no StageOutPayload"),
    ],
    ids=["key", "unsigned", "text", "manager", "manager-key", "no-manager-key", "job", "stranger", "json", "empty"],
)  # fmt: skip
def test_nobody_else_gives_orders(forged: Any, words: str, action: Action) -> None:
    gate = Gate()
    gate.take(notice(AGENT))
    assert gate.take(forged(action)) == []
    assert words in gate.refused.replace("(", "").replace(")", "")


def test_another_access_point_may_not_order_about_this_ones_jobs() -> None:
    gate = Gate()
    gate.take(notice(AGENT), notice(EVIL, "evil"))
    assert gate.take(orders(EVIL, agent="evil")) == []
    assert "evil gives orders about ap#7.0" in gate.refused


def test_the_first_key_stays_and_is_remembered(tmp_path: Path) -> None:
    gate = Gate()
    gate.take(notice(AGENT))
    gate.take(notice(EVIL, number=9), orders(EVIL))
    assert "that of ap is" in gate.refused
    ledger = Ledger(tmp_path / "ledger.sqlite")

    async def through_the_ledger() -> None:
        await ledger.write(gate.keys.save)
        await ledger.write(again.keys.load)

    import asyncio

    again = Gate()
    asyncio.run(through_the_ledger())
    ledger.close()
    assert again.take(orders(EVIL), notice(EVIL)) == []
    assert len(again.take(orders(AGENT), notice(AGENT))) == 1


def test_the_key_that_a_job_brings_beats_one_that_only_came_first() -> None:
    gate = Gate()
    gate.take(notice(EVIL))
    assert gate.agents.objection("ap", AGENT.public) == ""
    assert gate.take(orders(EVIL), notice(EVIL, number=2)) == []
    assert len(gate.take(notice(AGENT), orders(AGENT))) == 1
    assert "another key of ap" in gate.agents.objection("ap", EVIL.public)
    assert gate.agents.objection("ap", "") == ""


def test_listed_keys_are_the_only_ones() -> None:
    gate = Gate({"ap": AGENT.public})
    assert (
        gate.take(notice(EVIL), orders(EVIL), notice(EVIL, "other"), orders(EVIL, "other#1.0#1", agent="other")) == []
    )
    assert not gate.agents.fresh
    assert "does not name other" in gate.agents.objection("other", EVIL.public)
    assert "(listed)" in gate.agents.objection("ap", EVIL.public)
    assert len(gate.take(notice(AGENT), orders(AGENT))) == 1


def test_made_up_access_points_fill_nothing() -> None:
    gate = Gate()
    gate.take(*(notice(EVIL, f"made-up-{number}") for number in range(1010)))
    assert len(gate.gate.facts()["AgentKeys"]) == 1000
    assert "list yours" in gate.refused
    assert gate.agents.objection("ap", AGENT.public) == "", "one that a job names is always learnt"
    assert len(gate.take(notice(AGENT), orders(AGENT))) == 1


def test_a_list_that_cannot_be_read_is_said() -> None:
    assert read_listed(f"a={AGENT.public}, b={EVIL.public}") == {"a": AGENT.public, "b": EVIL.public}
    with pytest.raises(ConfigError, match="cannot read"):
        read_listed("a")


def test_a_successor_is_obeyed_and_its_predecessor_no_longer() -> None:
    gate = Gate()
    gate.take(notice(AGENT))
    new = AGENT.successor()
    assert len(gate.take(orders(new), notice(new, number=2), held=frozenset({"ap"}))) == 1
    assert gate.take(orders(AGENT)) == []
    for key in (AGENT, new):
        assert gate.agents.objection("ap", key.public) == "", "jobs of before the renewal are taken too"
    assert gate.take(orders(AGENT)) == []
    assert len(gate.take(orders(new))) == 1


def test_a_lost_key_is_replaced_only_after_a_day_and_with_nothing_at_stake() -> None:
    gate = Gate()
    gate.take(notice(AGENT))
    gate.clock.now_s += 86_000
    gate.take(notice(EVIL, number=2))
    gate.clock.now_s += 1_000
    gate.take(notice(EVIL, number=3), held=frozenset({"ap"}))
    assert not gate.agents.is_fresh("ap")
    gate.take(notice(EVIL, number=4))
    assert gate.agents.is_fresh("ap")


def test_an_old_notice_does_not_make_a_dead_agent_alive() -> None:
    gate = Gate()
    for number in (1, 2, 3):
        gate.take(notice(AGENT, number=number))
    gate.clock.now_s += 200
    gate.take(notice(AGENT, number=2))
    gate.take(notice(AGENT, number=1))
    assert not gate.agents.is_fresh("ap")
    assert "is old" in gate.refused


def test_a_notice_without_signature_or_in_another_name_is_not_heard() -> None:
    gate = Gate()
    unsigned = notice_ad(AgentNotice("ap", "ap", "", 1, 1))
    gate.take(unsigned, {**notice(AGENT), "StageOutSignature": ""}, notice(EVIL, agent="evil"))
    assert not gate.agents.fresh
    assert gate.gate.facts()["AgentKeys"] == []


def test_messages_are_read_over_versions() -> None:
    """A reader from before keys knows no ``vouches`` and no ``manager_key``."""
    assert "vouches" not in json.loads(notice(AGENT)["StageOutPayload"])
    assert "manager_key" not in json.loads(orders(AGENT, manager_key="")["StageOutPayload"])
    new = AGENT.successor()
    assert read_notice(notice(new)["StageOutPayload"]).vouches == new.vouches
    assert notice(new)["MyType"] == AGENT_AD
