"""The durable steps of a batch: one function names them, in the order of docs/developer/durable-steps.md."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from manager_site import made, run

from sandbox_manager.pipeline import Pipeline
from stageout.core import durable
from stageout.core.states import State

ROOT = Path(__file__).resolve().parents[2]
#: Rows of "Moving" that are no steps of a batch: what happens beside it, before it or after it.
_OTHERS = {
    "spool-state", "credential-replace", "record-renewed", "report-last", "spool-release", "record-released",
    "record-recovered",
}  # fmt: skip


def _moving() -> list[str]:
    """Return the labels of the page's section about batches, in its order."""
    text = (ROOT / "docs/developer/durable-steps.md").read_text()
    section = text.partition("\n## Moving\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([a-z-]+)` \|", section, re.M)


def _delivered() -> list[str]:
    """Return the labels that the function names, in the order of their first mention."""
    named = re.findall(r'"([a-z-]+)"', inspect.getsource(Pipeline.deliver))
    return [label for label in dict.fromkeys(named) if label in _moving()]


def test_one_function_names_the_steps_of_a_batch_in_the_order_of_the_page() -> None:
    assert _delivered() == [label for label in _moving() if label not in _OTHERS]
    assert set(_moving()) >= _OTHERS


def test_the_function_is_read_at_a_glance() -> None:
    assert 40 <= len(inspect.getsource(Pipeline.deliver).splitlines()) <= 90


def test_a_batch_takes_these_steps_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    real = durable.step
    monkeypatch.setattr(durable, "step", lambda label: (taken.append(label), real(label))[1])

    async def story() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/a": b"a", "copy://h/refuse/b": b"b", "copy://h/busy/c": b"c"})
            await node.confirm(receipt)
            await node.until_state(State.RETRY_WAIT)

    with made() as site:
        run(story())
    steps = [label for label in taken if label in _delivered()]
    assert steps[:3] == ["record-leased", "record-moving", "mover-exec"]
    # One transaction for all outcomes.
    assert sorted(steps[3:]) == ["record-delivered", "record-failed", "record-retry"]
