"""State that plugins keep for their next call: theirs alone, counted, and gone with the last output of its user."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from handoff_site import Child, needs_root
from manager_site import PYTHON, UID, Site, made, run

from stageout.core.states import State
from stageout.model.sandbox import NAME_BYTES
from stageout.wire.custody import Action
from tests.polling import until

_KB = 1024

#: Keeps 300 KB for its next call, in which it says whether they are there.
_KEEPER = """#!{} -I
import os, re, sys
if sys.argv[1:] == ["-classad"]:
    print('MultipleFileSupport = true\\nProtocolVersion = 4\\nPluginVersion = "1"')
    print('PluginType = "FileTransfer"\\nSupportedMethods = "keep"')
    sys.exit(0)
home = os.environ["STAGEOUT_STATE_DIR"] + "/mine"
known = os.path.exists(home + "/task")
os.makedirs(home, exist_ok=True)
open(home + "/task", "w").write("x" * 300 * 1024)
with open(sys.argv[4], "w") as out:
    for url, name in re.findall(r'Url = "([^"]*)"; LocalFileName = "([^"]*)"', open(sys.argv[2]).read()):
        done = known or "/first/" not in url
        out.write('[ TransferSuccess = %s; TransferUrl = "%s"; TransferFileName = "%s"; TransferFileBytes = %d; '
                  'TransferError = "not yet"; TransferErrorData = {{ [ ErrorType = "Transfer"; Retryable = 1 ] }} ]'
                  % (str(done).lower(), url, os.path.basename(name), os.path.getsize(name)))
sys.exit(0 if done else 1)
""".replace("{{", "{").replace("}}", "}")


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        found.plugins.append(found.write_script("keep_plugin", _KEEPER.replace("{}", PYTHON, 1)))
        yield found


def as_a_later_job(work: Any) -> Any:
    """Run by another process of the same user, which has the user's groups only."""

    def become() -> Any:
        os.setgroups([])
        os.setgid(UID)
        os.setuid(UID)
        try:
            return work()
        except PermissionError:
            return "denied"

    return Child(become, 0).result()


async def _deliver(site: Site, node: Any, url: str, job: str = "1.0") -> None:
    facts = node.facts(job)
    receipt = await node.hand_off({url: b"output"}, facts, plugin=site.plugins[1])
    await node.confirm(receipt, facts=facts)
    await node.until_state(State.RELEASED, facts)


@needs_root
def test_the_next_call_finds_it_and_a_job_of_the_same_user_does_not(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            await _deliver(site, node, "keep://h/first/a")
            place = node.spool.root / "state" / str(UID)
            assert (place / "mine" / "task").stat().st_uid == UID
            assert as_a_later_job(lambda: list(place.iterdir())) == "denied"
            assert as_a_later_job(lambda: (place / "forged").write_text("x")) == "denied"
            assert as_a_later_job(lambda: (place / "mine" / "task").read_text()) == "denied"

    run(story())


@needs_root
def test_an_earlier_manager_s_directory_is_taken_from_the_user(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            place = node.spool.root / "state" / str(UID)
            place.mkdir(mode=0o700)
            os.chown(place, UID, UID)
            await _deliver(site, node, "keep://h/ok/a")
            found = place.stat()
            assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o770)

    run(story())


def test_it_counts_and_goes_with_the_last_output_of_its_user(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            failing = node.facts("2.0")
            receipt = await node.hand_off({"copy://h/refuse/b": b"12345"}, failing)
            await node.confirm(receipt, facts=failing)
            await node.until_state(State.FAILED, failing)
            await _deliver(site, node, "keep://h/ok/a")
            kept = node.spool.state.size_bytes(UID)
            assert 300 * _KB <= kept < 340 * _KB
            rest = node.pipeline.admission.used_bytes - kept
            assert rest == 5 + 2 * NAME_BYTES
            place = Path(node.spool.root / "state" / str(UID))
            await node.pipeline.forget_old_jobs()
            assert place.exists(), "output of this user waits"
        async with site.manager() as node:
            assert node.pipeline.admission.used_bytes == rest + kept, "and after a restart"
            await node.order(Action.CANCEL, failing)
            await until(lambda: node.box(failing).freed, lambda: node.box(failing))
            await node.pipeline.forget_old_jobs()
            assert not place.exists()
            assert node.pipeline.admission.used_bytes == 2 * NAME_BYTES

    run(story())


def test_a_tree_without_end_is_counted_up_to_a_bound(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            place = node.spool.state_of(UID, UID)
            for number in range(30):
                place = place / str(number)
                place.mkdir()
            (place / "link").symlink_to("/")
            assert 31 * NAME_BYTES <= node.spool.state.size_bytes(UID) < 70 * NAME_BYTES

    run(story())
