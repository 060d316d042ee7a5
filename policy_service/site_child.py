"""The process in which a site's own policy runs: one question per line in, one answer per line out."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from stageout.tuning.policies import Grant, Limits


class _SourceOnlyLoader(SourceFileLoader):
    """Loader that reads the source, because cached code counts as current for any file of the same size and second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _load(path: str) -> Callable[[Grant, list[Grant], Limits], object]:
    if not path.endswith(".py"):
        raise ImportError(f"{path} is not a Python file (its name must end in .py)")
    loader = _SourceOnlyLoader("site_policy_module", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    function = getattr(module, "grant", None)
    if not callable(function):
        raise ImportError("it has no function grant(asker, grants, limits)")
    return function  # type: ignore[no-any-return]


def _decide(function: Callable[[Grant, list[Grant], Limits], object], question: dict[str, Any]) -> object:
    grants = [Grant(**grant) for grant in question["grants"]]
    return function(grants[question["asker"]], grants, Limits(**question["limits"]))


def _attempt(work: Callable[[], object]) -> dict[str, object]:
    try:
        streams = work()
    except (Exception, SystemExit) as problem:
        return {"problem": f"{type(problem).__name__}: {problem}"[:500]}
    # Only whole numbers are answers. Other types may not fit into JSON.
    return {"streams": streams if type(streams) is int else repr(streams)[:100]}


def main() -> None:
    """Load the module named on the command line, and answer questions until the service ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the module must not look like an answer
    functions: list[Callable[[Grant, list[Grant], Limits], object]] = []

    def load() -> int:
        functions.append(_load(sys.argv[1]))
        return 0

    answer = _attempt(load)
    print(json.dumps(answer), file=answers, flush=True)
    if "problem" in answer:
        return
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(_attempt(lambda: _decide(functions[0], question))), file=answers, flush=True)  # noqa: B023


if __name__ == "__main__":
    main()
