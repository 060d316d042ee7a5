"""The child process that queries a daemon of HTCondor: answers, failures, and questions that are given up."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stageout.condor.query_child import QueryChild

#: Answers like a child of the product. The question names what it does.
_PROGRAM = """
import os, time
from stageout.core.children import answer_lines

def answer(question):
    print("words of the bindings", flush=True)
    if question["op"] == "end":
        os._exit(3)
    if question["op"] == "fail":
        raise RuntimeError("no such ad")
    if question["op"] == "sleep":
        time.sleep(60)
    return {"op": question["op"], "pid": os.getpid(), "text": "x" * question.get("characters", 0)}

answer_lines(answer)
"""


class NoAnswerError(Exception):
    """The error of this child."""


def run(work: Callable[[QueryChild], Awaitable[None]], timeout_s: float = 30.0) -> None:
    """Run a story with a child, and end it."""

    async def story() -> None:
        child = QueryChild([sys.executable, "-c", _PROGRAM], "schedd", NoAnswerError, timeout_s, 10_000)
        try:
            await work(child)
        finally:
            await child.close()

    asyncio.run(story())


def test_words_of_the_bindings_are_no_answer() -> None:
    async def work(child: QueryChild) -> None:
        first, second = await child._ask({"op": "one"}), await child._ask({"op": "two"})
        assert (first["op"], second["op"]) == ("one", "two")
        assert first["pid"] == second["pid"]

    run(work)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"op": "fail"}, "^no such ad$"), ({"op": "end"}, "cannot ask the schedd: the process that asks ended"),
        ({"op": "long", "characters": 20_000}, "cannot ask the schedd"),
    ],
    ids=["fail", "end", "long"],
)  # fmt: skip
def test_a_question_without_an_answer_does_not_spoil_the_next(question: dict[str, Any], words: str) -> None:
    async def work(child: QueryChild) -> None:
        with pytest.raises(NoAnswerError, match=words):
            await child._ask(question)
        assert (await child._ask({"op": "next"}))["op"] == "next"

    run(work)


def test_a_child_that_hangs_is_replaced() -> None:
    async def work(child: QueryChild) -> None:
        with pytest.raises(NoAnswerError, match="the schedd did not answer within 2 s"):
            await child._ask({"op": "sleep"})
        assert (await child._ask({"op": "next"}))["op"] == "next"

    run(work, timeout_s=2.0)


def test_the_answer_to_a_question_that_was_given_up_is_not_taken_for_the_next() -> None:
    async def work(child: QueryChild) -> None:
        await child._ask({"op": "one"})
        question = asyncio.ensure_future(child._ask({"op": "sleep"}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        question.cancel()
        with pytest.raises(asyncio.CancelledError):
            await question
        assert (await child._ask({"op": "next"}))["op"] == "next"

    run(work)
