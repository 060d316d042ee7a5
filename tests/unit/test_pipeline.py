"""The way of one sandbox, with real spool, ledger and plugin processes; what happens when something is in the way."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from manager_site import SCHEDD, Site, made, run

from sandbox_manager.intake.acceptance import Handoff, Refusal
from sandbox_manager.report.reporter import sandbox_report
from sandbox_manager.rules import read_rules
from stageout.core import durable
from stageout.core.children import MOVER_MARK
from stageout.core.config import mapping_settings
from stageout.core.errors import ErrorClass
from stageout.core.states import State
from stageout.wire.custody import Action
from stageout.wire.handoff import OfferedFile
from tests.polling import until


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


def held(site: Site) -> list[str]:
    return [path.name for path in (site.base / "spool" / "sandboxes").iterdir()]


# ---- the way --------------------------------------------------------------------------------------------------------


def test_plugins_of_an_earlier_manager_are_ended_before_anything_is_sent(site: Site) -> None:
    """The manager died, and what its plugin had started still writes to the destination."""
    batch = site.base / "spool" / "movers" / "7"

    async def story() -> None:
        async with site.manager():
            pass
        batch.mkdir()
        with subprocess.Popen(["sleep", "600"], env={**os.environ, MOVER_MARK: str(batch)}) as left:
            try:
                async with site.manager():
                    assert left.poll() == -signal.SIGKILL
                    assert not batch.exists()
            finally:
                left.kill()

    run(story())


def test_nothing_is_sent_before_the_agent_s_word_and_everything_after_it(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/a": b"aaa", "copy://h/ok/b": b""})
            assert (receipt.files, receipt.size_bytes, receipt.manager_name) == (2, 3, "manager@ep")
            assert node.state() is State.ACCEPTED
            await node.deliver_another()
            assert (node.state(), site.delivered()) == (State.ACCEPTED, ["later"])
            await node.confirm(receipt)
            box = await node.until_state(State.RELEASED)
            assert (box.files_total, box.files_left, box.bytes_left) == (2, 0, 0)
            assert node.pipeline.admission.space.used_bytes == 0
            assert sorted(site.delivered()) == ["a", "b", "later"]
            assert (site.base / "dest/a").read_bytes() == b"aaa"
            assert held(site) == []
            assert node.pipeline.store.registry.bytes_at_risk == 0
            await node.order(Action.FORGET)
            await until(lambda: node.box() is None, "the record to go")

    run(story())
    assert len(site.calls()) == 2


def test_one_call_for_files_of_several_jobs(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            runs = [node.facts(f"{number}.0", dslot_id=number) for number in range(1, 5)]
            for facts in runs:
                await node.confirm(
                    await node.hand_off({f"copy://h/ok/{facts.slot.dslot_id}": b"x"}, facts), facts=facts
                )
            moving = asyncio.ensure_future(node.pipeline.run())
            for facts in runs:
                await node.until_state(State.RELEASED, facts)
            moving.cancel()

    run(story())
    assert [len(call["urls"]) for call in site.calls()] == [4]


def test_several_hand_offs_of_one_run(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            one = await node.hand_off({"copy://h/ok/a": b"old", "copy://h/ok/b": b"b"})
            two = await node.hand_off({"copy://h/ok/a": b"new"})
            stray = await node.hand_off({"copy://h/ok/stray": b"s"})
            await node.confirm(one, two)
            await node.until_state(State.RELEASED)
            await until(lambda: held(site) == [], f"the spool to be empty; stray is {stray.ticket}")

    run(story())
    assert sorted(site.delivered()) == ["a", "b"]
    assert (site.base / "dest/a").read_bytes() == b"new"


def test_a_released_run_with_a_stray_hand_off_is_left_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with site.manager() as node:
            stray = await node.hand_off({"copy://h/ok/a": b"old"})
            await node.confirm(await node.hand_off({"copy://h/ok/a": b"new"}))
            await node.until_state(State.RELEASED)
            await until(lambda: held(site) == [], f"the spool to be empty; stray is {stray.ticket}")
            writes = Counter[str]()
            write = node.pipeline.store.ledger.write

            async def counted(change: Any, *labels: str) -> Any:
                writes.update(labels)
                return await write(change, *labels)

            monkeypatch.setattr(node.pipeline.store.ledger, "write", counted)
            await asyncio.sleep(0.5)
            assert writes["record-released"] < 3, f"{writes} in half a second"

    run(story())


def test_a_batch_is_given_back_when_the_disk_takes_records_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_manager.pipeline._AGAIN_S", 0.1)

    async def story() -> None:
        async with site.manager(moving=False) as node:
            await node.confirm(await node.hand_off({"copy://h/ok/a": b"a"}))
            write, refused = node.pipeline.store.write, 3

            async def full_for_a_while(change: Any, *labels: str) -> Any:
                nonlocal refused
                if refused and not {"record-leased", "record-moving"} & set(labels):
                    refused -= 1
                    raise OSError(errno.ENOSPC, "No space left on device")
                return await write(change, *labels)

            monkeypatch.setattr(node.pipeline.store, "write", full_for_a_while)
            moving = asyncio.ensure_future(node.pipeline.run())
            await node.until_state(State.RELEASED)
            assert refused == 0, "the disk was never full"
            moving.cancel()

    run(story())


def test_a_newer_run_supersedes_at_once(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            old, new = node.facts(), node.facts(number=2)
            first = await node.hand_off({"copy://h/ok/a": b"one"}, old)
            second = await node.hand_off({"copy://h/ok/a": b"two"}, new)
            assert node.state(old) is State.SUPERSEDED
            await node.confirm(first, facts=old)
            await node.confirm(second, facts=new)
            await node.until_state(State.RELEASED, new)
            assert node.state(old) is State.SUPERSEDED
            await until(lambda: held(site) == [], "the spool to be empty")
            refused = node.offer(old, ["copy://h/ok/a"])
            assert isinstance(refused, Refusal)
            assert "newer" in refused.reason

    run(story())
    assert site.delivered() == ["a"]
    assert (site.base / "dest/a").read_bytes() == b"two"


def test_cancel_ends_a_running_transfer_and_no_other(site: Site) -> None:
    async def story() -> None:
        site.flag("hold")
        async with site.manager(moving=False) as node:
            gone, stays = node.facts("1.0"), node.facts("2.0", dslot_id=2)
            for facts, mode in ((gone, "wait"), (stays, "ok")):
                await node.confirm(await node.hand_off({f"copy://h/{mode}/{mode}": b"x"}, facts), facts=facts)
            moving = asyncio.ensure_future(node.pipeline.run())
            await until(lambda: (site.base / "waiting").exists(), "the transfer to run")
            assert node.state(gone) is State.MOVING
            await node.order(Action.CANCEL, gone)
            assert node.state(gone) is State.CANCELLED
            box = await node.until_state(State.RELEASED, stays)
            assert box.attempts == 1
            moving.cancel()
            await until(lambda: held(site) == [], "the spool to be empty")

    run(story())
    assert site.delivered() == ["ok"]


def test_pause_and_resume(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/a": b"x"})
            await node.order(Action.PAUSE)
            await node.confirm(receipt)
            await node.deliver_another()
            assert (node.state(), site.delivered()) == (State.CONFIRMED, ["later"])
            await node.order(Action.RESUME)
            await node.until_state(State.RELEASED)

    run(story())


# ---- what is refused ------------------------------------------------------------------------------------------------


def refusal(node: Any, **changed: Any) -> str:
    facts = node.facts(
        **{name: value for name, value in changed.items() if name not in ("urls", "plugin", "size_bytes")}
    )
    options = {name: changed[name] for name in ("plugin", "size_bytes") if name in changed}
    answer = node.offer(facts, changed.get("urls", ["copy://h/ok/a"]), **options)
    return answer.reason if isinstance(answer, Refusal) else ""


def test_every_refusal_has_its_reason(site: Site) -> None:
    site.knobs.update(STAGEOUT_SPOOL_QUOTA_MB="10", STAGEOUT_OWNER_QUOTA_MB="5")

    async def story() -> None:
        async with site.manager(moving=False) as node:
            assert "no stageout agent" in refusal(node, run=replace(node.facts().run, job="other#1.0#1"))
            assert "FILETRANSFER_PLUGINS" in refusal(node, plugin=Path("/bin/sh"))
            assert "no plugin of this node moves ftp" in refusal(node, urls=["copy://h/a", "ftp://h/x"])
            assert "STAGEOUT_SPOOL_QUOTA_MB" in refusal(node, size_bytes=11 << 20)
            assert "STAGEOUT_OWNER_QUOTA_MB" in refusal(node, size_bytes=6 << 20)
            node.pipeline.rules = replace(node.pipeline.rules, require_verified=True)
            assert "STAGEOUT_REQUIRE_VERIFIED" in refusal(node)
            node.pipeline.stop_accepting()
            assert "stopping" in refusal(node)

    run(story())


def test_a_data_slot_has_a_depth(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            for number in (1, 2):
                await node.hand_off({"copy://h/ok/a": b"x"}, node.facts(f"{number}.0"))
            third = node.facts("3.0")
            promise = node.offer(third, ["copy://h/ok/a"])
            assert not isinstance(promise, Refusal)
            assert "is full" in refusal(node, job="4.0")
            assert refusal(node, job="4.0", dslot_id=9) == ""
            assert refusal(node, job="1.0") == ""  # a further hand-off of a run that has its place
            node.pipeline.acceptance.unreserve(promise)
            assert refusal(node, job="4.0") == ""

    run(story())


def test_an_agent_that_falls_silent_counts_as_gone(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            node.agents.timeout_s = -1
            assert f"schedd {SCHEDD}" in refusal(node)

    run(story())


def test_a_run_that_is_confirmed_takes_nothing_more(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            await node.confirm(await node.hand_off({"copy://h/ok/a": b"x"}))
            assert "Confirmed already" in refusal(node)

    run(story())


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_refusal_for_good_fails_with_the_plugin_s_words_and_can_be_repaired(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            await node.confirm(await node.hand_off({"copy://h/refuse/a": b"x", "copy://h/ok/b": b"b"}))
            box = await node.until_state(State.FAILED)
            assert (box.reason, box.error_code) == ("quota exceeded for alice", ErrorClass.PERMISSION_DENIED.code)
            assert (box.files_left, box.bytes_left) == (1, 1)
            assert len(held(site)) == 1
            site.plugin.write_text(site.plugin.read_text().replace('mode == "refuse"', 'mode == "never"'))
            await node.order(Action.RETRY)
            await node.until_state(State.RELEASED)

    run(story())
    assert sorted(site.delivered()) == ["a", "b"]


def test_a_server_that_is_away_costs_no_attempts_and_is_probed_by_one_file(site: Site) -> None:
    async def story() -> None:
        site.flag("down")
        async with site.manager() as node:
            runs = [node.facts(f"{number}.0", dslot_id=number) for number in range(1, 5)]
            for facts in runs:
                files = {f"copy://h/ok/{facts.slot.dslot_id}{part}": b"x" for part in "ab"}
                await node.confirm(await node.hand_off(files, facts), facts=facts)
                if facts is runs[0]:
                    box = await node.until_state(State.RETRY_WAIT, facts)
                    assert "connection refused" in box.reason
                    assert box.error_code == ErrorClass.CONNECT_FAILED.code
            await until(lambda: len(site.calls()) >= 4, "probes")
            assert {len(call["urls"]) for call in site.calls()[1:]} == {1}
            site.flag("down", up=False)
            for facts in runs:
                await node.until_state(State.RELEASED, facts)

    site.knobs["STAGEOUT_ATTEMPTS"], site.wait_s = "2", 0.2
    run(story())
    assert sorted(site.delivered()) == [f"{number}{part}" for number in range(1, 5) for part in "ab"]


def test_while_a_server_is_away_its_data_slots_take_more(site: Site) -> None:
    async def story() -> None:
        site.flag("down")
        async with site.manager() as node:
            for number in range(1, 8):
                facts = node.facts(f"{number}.0")
                await until(lambda facts=facts: not refusal(node, run=facts.run), "a place in the data slot")
                await node.confirm(await node.hand_off({f"copy://h/ok/{number}": b"x"}, facts), facts=facts)
            site.flag("down", up=False)
            for number in range(1, 8):
                await node.until_state(State.RELEASED, node.facts(f"{number}.0"))

    site.wait_s = 0.2
    run(story())


def test_a_server_that_says_nothing_holds_up_only_its_own_output(site: Site) -> None:
    async def story() -> None:
        site.flag("hold")
        async with site.manager() as node:
            stuck, flows = [node.facts(f"{number}.0") for number in range(1, 4)], node.facts("9.0")
            for facts in stuck:
                files = {f"copy://silent/wait/{facts.run.job[3]}": b"x"}
                await node.confirm(await node.hand_off(files, facts), facts=facts)
            await until((site.base / "waiting").exists, "the plugin to wait for the server")
            assert "is full" in refusal(node, run=flows.run)
            node.clock.ahead_s = 31
            assert refusal(node, run=flows.run) == ""
            await node.confirm(await node.hand_off({"copy://good/ok/b": b"x"}, flows), facts=flows)
            await node.until_state(State.RELEASED, flows)
            assert node.state(stuck[0]) is State.MOVING
            site.flag("hold", up=False)
            for facts in stuck:
                await node.until_state(State.RELEASED, facts)

    run(story())


def test_another_destination_is_not_held_up(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            stuck, flows = node.facts("1.0"), node.facts("2.0")
            await node.confirm(await node.hand_off({"copy://bad/busy/a": b"x"}, stuck), facts=stuck)
            box = await node.until_state(State.RETRY_WAIT, stuck)
            assert box.next_attempt_at > time.time() + 3000
            await node.confirm(await node.hand_off({"copy://good/ok/b": b"x"}, flows), facts=flows)
            await node.until_state(State.RELEASED, flows)

    run(story())


def test_attempts_end_in_a_failure_that_says_how_many(site: Site) -> None:
    site.knobs["STAGEOUT_ATTEMPTS"] = "2"

    async def story() -> None:
        async with site.manager() as node:
            await node.confirm(await node.hand_off({"copy://h/claim/a": b"x"}))
            box = await node.until_state(State.FAILED)
            assert "gave up after 2 attempts" in box.reason
            assert box.attempts == 2

    run(story())


@pytest.mark.parametrize("part", ["BatchRun.run", "Delivery._prepared", "Delivery.learn"])
def test_an_error_of_the_manager_is_no_attempt_of_the_owner_s_and_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    site.knobs["STAGEOUT_ATTEMPTS"] = "2"
    monkeypatch.setattr("sandbox_manager.pipeline._AGAIN_S", 0.1)

    def fail(*given: Any) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(f"sandbox_manager.delivery.batch.{part}", fail)

    async def story() -> None:
        async with site.manager() as node:
            await node.confirm(await node.hand_off({"copy://h/ok/a": b"x"}))
            await until(lambda: node.box().attempts > 2, lambda: "the third attempt")
            node.clock.ahead_s = 300_000
            box = await node.until_state(State.FAILED)
            assert "the manager cannot send this file: ValueError('odd') (gave up after 72 hours)" in box.reason
            assert (box.attempts - box.excused, box.error_code) == (0, ErrorClass.UNKNOWN.code)

    run(story())


def test_a_plugin_s_word_is_not_lost_among_failures(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            await node.confirm(await node.hand_off({"copy://h/refuse/a": b"x", "copy://h/plain/b": b"x"}))
            box = await node.until_state(State.FAILED)
            assert (box.files_left, box.files_total) == (1, 2)

    run(story())
    assert [len(call["urls"]) for call in site.calls()] == [2, 1]


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_file_that_the_owner_changes_is_not_delivered(site: Site, when: str) -> None:
    async def story() -> None:
        async with site.manager() as node:
            mode = "edit" if when == "while" else "ok"
            receipt = await node.hand_off({f"copy://h/{mode}/a": b"x"})
            if when == "before":
                (node.spool.root / "sandboxes" / receipt.ticket / "0").write_bytes(b"longer")
            await node.confirm(receipt)
            box = await node.until_state(State.FAILED)
            assert box.error_code == ErrorClass.SOURCE_CHANGED.code

    run(story())


def test_a_ledger_that_cannot_be_written_accepts_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with site.manager() as node:
            monkeypatch.setattr(durable, "_faults", durable.parse_faults("record-accepted=ENOSPC"))
            with pytest.raises(OSError, match="record-accepted"):
                await node.hand_off({"copy://h/ok/a": b"x"})
            assert node.box() is None
            monkeypatch.setattr(durable, "_faults", {})
            await node.hand_off({"copy://h/ok/a": b"x"})

    run(story())


@pytest.mark.parametrize(
    "label", ["record-leased", "record-moving", "record-delivered", "spool-release", "record-released"]
)
def test_a_step_that_fails_is_done_again(site: Site, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    armed = site.flag("armed")
    monkeypatch.setattr("sandbox_manager.pipeline._AGAIN_S", 0.1)
    monkeypatch.setattr("sandbox_manager.custody.ledger._AGAIN_S", 0.1)

    async def story() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/a": b"x"})
            monkeypatch.setattr(durable, "_faults", durable.parse_faults(f"{label}=EIO@{armed}"))
            await node.confirm(receipt)
            await node.until_state(State.RELEASED)
            assert not armed.exists()

    run(story())
    assert (site.base / "dest/a").read_bytes() == b"x"


# ---- restarts -------------------------------------------------------------------------------------------------------


def test_an_accepted_sandbox_outlives_the_manager(site: Site) -> None:
    async def before() -> Any:
        async with site.manager() as node:
            return await node.hand_off({"copy://h/ok/a": b"x"})

    async def after() -> None:
        async with site.manager() as node:
            assert node.state() is State.ACCEPTED
            await node.confirm(receipts[0])
            await node.until_state(State.RELEASED)

    receipts: list[Any] = []

    async def first() -> None:
        receipts.append(await before())

    run(first())
    run(after())
    assert site.delivered() == ["a"]


def test_a_restart_remembers_which_server_is_away_and_why(site: Site) -> None:
    async def before() -> None:
        async with site.manager() as node:
            await node.confirm(await node.hand_off({"copy://h/ok/a": b"x"}))
            await node.until_state(State.RETRY_WAIT)

    async def after() -> None:
        async with site.manager(moving=False) as node:
            (away,) = node.pipeline.scheduler.breakers.troubles()
            assert (away.server, away.circuit, away.reason) == ("copy://h", "open", "connection refused")
            site.flag("down", up=False)
            moving = asyncio.ensure_future(node.pipeline.run())
            await node.until_state(State.RELEASED)
            assert node.pipeline.scheduler.breakers.troubles() == []
            moving.cancel()
        async with site.manager(moving=False) as node:
            assert node.pipeline.scheduler.breakers.troubles() == []

    site.flag("down")
    run(before())
    run(after())


def test_a_file_with_two_destinations_takes_its_space_once_and_after_a_restart_too(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            facts = node.facts()
            reservation = node.offer(facts, ["copy://h/ok/a", "copy://i/ok/a"], 2000)
            place = node.spool.prepare_intake("a" * 32, facts.uid, facts.gid)
            (place / "0").write_bytes(b"x" * 1000)
            os.chown(place / "0", facts.uid, facts.gid)
            os.link(place / "0", place / "1")
            offered = [OfferedFile(f"copy://{host}/ok/a", "a", 1000) for host in "hi"]
            held = node.spool.claim("a" * 32, offered, facts.uid, facts.gid)
            handoff = Handoff("a" * 32, facts, str(site.plugin), held, reservation)
            receipts.append(await node.pipeline.acceptance.accept(handoff))
            assert node.pipeline.admission.space.used_bytes == 1000
        async with site.manager() as node:
            assert dict(node.pipeline.admission.space.by_owner) == {"alice@test": 1000}
            await node.confirm(*receipts)
            await node.until_state(State.RELEASED)
            assert node.pipeline.admission.space.used_bytes == 0

    receipts: list[Any] = []
    run(story())
    assert site.delivered() == ["a", "a"]


def test_a_directory_without_a_record_goes_at_the_second_look_and_no_other(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            receipt = await node.hand_off({"copy://h/ok/a": b"x"})
            sandboxes = node.spool.root / "sandboxes"
            (sandboxes / ("f" * 32)).mkdir()
            await node.pipeline.forget_old_jobs()
            assert sorted(held(site)) == sorted([receipt.ticket, "f" * 32])
            (sandboxes / ("e" * 32)).mkdir()
            await node.pipeline.forget_old_jobs()
            assert sorted(held(site)) == sorted([receipt.ticket, "e" * 32])

    run(story())


def test_a_graceful_stop_lets_a_transfer_end_and_a_fast_one_does_not(site: Site) -> None:
    async def story(grace_s: float, name: str, job: str) -> None:
        site.flag("hold")
        async with site.manager() as node:
            facts = node.facts(job)
            if node.box(facts) is None:
                await node.confirm(await node.hand_off({f"copy://h/wait/{name}": b"x"}, facts), facts=facts)
            await until(lambda: (site.base / "waiting").exists(), "the transfer to run")
            asyncio.get_running_loop().call_later(0.3, site.flag, "hold", False)
            await node.pipeline.stop(grace_s)
            assert (name in site.delivered()) == (grace_s > 0)
            box = node.box(facts)
            assert box.state in ((State.DELIVERED, State.RELEASED) if grace_s else (State.RETRY_WAIT, State.CONFIRMED))
            assert box.attempts == (1 if grace_s else 0)

    run(story(10, "a", "1.0"))
    (site.base / "waiting").unlink()
    run(story(0, "b", "2.0"))

    async def goes_on() -> None:
        async with site.manager() as node:
            await node.until_state(State.RELEASED, node.facts("2.0"))

    site.flag("hold", up=False)
    run(goes_on())
    assert sorted(site.delivered()) == ["a", "b"]


def test_strays_in_the_spool_are_removed_and_missing_directories_are_lost(site: Site) -> None:
    async def before() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/a": b"x"})
            kept.append(node.spool.root / "sandboxes" / receipt.ticket)

    async def after() -> None:
        async with site.manager() as node:
            assert held(site) == []
            assert node.state() is State.LOST

    kept: list[Path] = []
    run(before())
    kept[0].rename(kept[0].with_name("0" * 32))
    run(after())


def test_new_rules_are_followed(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            for number in (1, 2, 3):
                await node.hand_off({"copy://h/ok/a": b"x"}, node.facts(f"{number}.0"))
            assert "is full" in refusal(node, job="4.0")
            node.pipeline.new_rules(read_rules(mapping_settings({**site.knobs, "STAGEOUT_DATA_SLOT_DEPTH": "5"})))
            assert refusal(node, job="4.0") == ""

    run(story())


def test_deadlines_pass_while_it_runs(site: Site) -> None:
    site.knobs.update(STAGEOUT_CONFIRM_TIMEOUT="1000", STAGEOUT_RETENTION="2000")

    async def story() -> None:
        async with site.manager() as node:
            await node.hand_off({"copy://h/ok/a": b"x"})

            async def house_at(passed_s: float) -> None:
                node.clock.ahead_s = passed_s
                await node.pipeline.run_housekeeping()

            await house_at(900)
            assert node.state() is State.ACCEPTED and not (node.box() or site).reason  # type: ignore[union-attr]
            await house_at(1100)
            assert "not confirmed" in (node.box() or site).reason  # type: ignore[union-attr]
            assert node.state() is State.ACCEPTED
            await house_at(2100)
            assert node.state() is State.LOST
            await until(lambda: held(site) == [], "the spool to be empty")
            await house_at(4000)
            assert node.box() is not None
            await house_at(4200)
            await until(lambda: node.box() is None, "the record to go")
            node.pipeline.rules = replace(node.pipeline.rules, retention_s=-10)
            await node.pipeline.forget_old_jobs()
            assert node.pipeline.store.registry.newest_run(node.facts().run.key) == 0

    run(story())


def test_the_time_to_give_up_counts_from_a_retry(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/busy/a": b"x"})
            await node.confirm(receipt)
            await node.until_state(State.RETRY_WAIT)
            for hours in (73, 146):
                node.clock.ahead_s = hours * 3600.0
                await node.until_state(State.FAILED)
                calls = len(site.calls())
                await node.order(Action.RETRY)
                await until(lambda calls=calls: len(site.calls()) > calls, "the next attempt")  # type: ignore[misc]
                await node.until_state(State.RETRY_WAIT)
                await node.pipeline.run_housekeeping()
                assert node.state() is State.RETRY_WAIT

    run(story())


def test_a_report_says_since_when_output_fails(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/busy/a": b"x"})
            await node.confirm(receipt)
            await node.until_state(State.RETRY_WAIT)
            box = node.box()
            assert box is not None
            since, calls = box.failing_since, len(site.calls())
            assert 0 <= node.clock.wall_s() - since < 60
            node.clock.ahead_s = 3600.0
            await until(lambda: len(site.calls()) > calls, "another attempt")
            await until(lambda: (found := node.box()) is not None and found.attempts > 1, "its result")
            box = node.box()
            assert box is not None and box.failing_since == since
            assert sandbox_report(box, 20, ()).trouble_since_at == since
            node.clock.ahead_s = 7200.0
            await node.order(Action.RETRY)
            await until(lambda: (found := node.box()) is not None and found.failing_since > since, "a new count")

    run(story())


def test_output_whose_turn_comes_late_is_sent_all_the_same(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            await node.confirm(await node.hand_off({"copy://h/ok/a": b"x"}))
            node.clock.ahead_s = 80 * 3600.0
            await node.pipeline.run_housekeeping()
            assert node.state() is State.CONFIRMED
            moving = asyncio.ensure_future(node.pipeline.run())
            await node.until_state(State.RELEASED)
            moving.cancel()

    run(story())
    assert site.delivered() == ["a"]


def test_an_end_stops_the_plugin_of_its_own_batch_and_no_other(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            receipt = await node.hand_off({"copy://h/ok/a": b"x"})
            box, stopped = node.box(), list[str]()
            assert box is not None
            for name, sandboxes in (("its own", {box.id}), ("another", {box.id + 1})):
                batch: Any = SimpleNamespace(sandboxes=sandboxes, stop=partial(stopped.append, name))
                node.pipeline.custody.running.add(batch)
            await node.confirm(receipt)
            assert stopped == []
            await node.order(Action.CANCEL)
            assert stopped == ["its own"]

    run(story())


STEPS = ["record-accepted", "record-order", "record-leased", "record-moving", "mover-exec", "record-delivered"]


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ("record-syncing=kill-before", State.ACCEPTED),
        ("record-syncing=kill-after", State.LOST),
        ("spool-sync=kill-before", State.LOST),
        ("spool-sync=kill-after", State.LOST),
        ("record-synced=kill-before", State.LOST),
        ("record-synced=kill-after", State.ACCEPTED),
    ],
)
def test_killed_while_it_syncs_it_believes_only_an_answer_that_it_has_recorded(
    site: Site, fault: str, left: State
) -> None:
    """The kernel tells each failure once, perhaps to the manager that died."""

    async def until_killed() -> None:
        async with site.manager() as node:
            durable._faults.update(durable.parse_faults(fault))
            await node.hand_off({"copy://h/ok/a": b"aaa"})
            await asyncio.sleep(60)

    child = os.fork()
    if child == 0:
        try:
            run(until_killed())
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the step was not come to"

    async def again() -> None:
        async with site.manager() as node:
            assert node.state() is left
            await until(lambda: not node.pipeline.custody.syncs._is_running, "its sync")
            assert node.state() is left

    run(again())


@pytest.mark.parametrize("label", [*STEPS, "spool-release", "record-released"])
@pytest.mark.parametrize("what", ["kill-before", "kill-after"])
def test_killed_at_any_step_it_delivers_once_and_whole(site: Site, label: str, what: str) -> None:
    facts: list[Any] = []

    async def until_killed() -> None:
        async with site.manager() as node:
            durable._faults.update(durable.parse_faults(f"{label}={what}"))
            receipt = await node.hand_off({"copy://h/ok/a": b"aaa", "copy://h/ok/b": b"b"})
            await until(lambda: not node.pipeline.custody.syncs._is_running, "its sync")
            await node.confirm(receipt)
            await node.until_state(State.RELEASED)
            await asyncio.sleep(60)  # it dies sooner

    child = os.fork()
    if child == 0:
        try:
            run(until_killed())
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the step was not come to"

    async def again() -> None:
        async with site.manager() as node:
            facts.append(node.state())
            box = node.box()
            if box is None:
                assert (label, what) == ("record-accepted", "kill-before")
                assert held(site) == []
                return
            if box.state is State.ACCEPTED:
                assert not site.delivered()
                await node.order(Action.CONFIRM, None, box.tickets, box.files_total)
            await node.until_state(State.RELEASED)
            await until(lambda: held(site) == [], "the spool to be empty")
            assert (site.base / "dest/a").read_bytes() == b"aaa"

    run(again())
    if facts[0] in (State.DELIVERED, State.RELEASED):
        assert sorted(site.delivered()) == ["a", "b"]
