"""Try mutations of the product one by one: each must make a test near it fail. ``make mutants``.

Each mutation of ``mutations.txt`` is made in a copy of the checkout, where the tests named with it run.
The exit status is 0 when at least all but ``ALLOWED_SURVIVORS`` are caught.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.mutants.mutations import Mutation, read_mutations

ROOT = Path(__file__).resolve().parents[2]
ALLOWED_SURVIVORS = 2
_TIMEOUT_S = 600
HUNG = "not over in time"
#: Exit statuses of pytest: all tests passed, a test failed, and a file of tests cannot be imported.
_PASSED, _FAILED, _INTERRUPTED = 0, 1, 2


def copy_checkout(place: Path) -> None:
    """Copy the work tree, without files that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name, follow_symlinks=False)


def try_mutation(place: Path, mutation: Mutation) -> str:
    """Make a mutation in a copy, run its tests, and take it back. Returns "caught", "survived" or what went wrong."""
    count = (place / mutation.file).read_text().count(mutation.before)
    if count != 1:
        return f"{mutation.file} has {count} places for it"
    with made(place, mutation):
        word = run_tests(place, mutation.tests, _TIMEOUT_S).word
        return "caught" if word == HUNG else word


@contextmanager
def made(place: Path, mutation: Mutation) -> Iterator[None]:
    """Make a mutation in a copy, and take it back, with the time of the file: by that Python knows what it compiled."""
    path = place / mutation.file
    text, times = path.read_text(), path.stat()
    path.write_text(text.replace(mutation.before, mutation.after))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


class Verdict(NamedTuple):
    """The outcome of tests.

    :param word: "caught", "survived", :data:`HUNG` or what went wrong. :param failed: the tests that failed.
    """

    word: str
    failed: tuple[str, ...] = ()


def run_tests(place: Path, tests: Sequence[str], timeout_s: float) -> Verdict:
    """Run tests in a copy, up to the first that fails."""
    with tempfile.TemporaryDirectory(prefix="stageout-verdict-") as directory:
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-o", f"cache_dir={directory}", *tests]
        output = Path(directory, "output")
        # No pipe: a program that a test left behind would hold it open.
        with output.open("wb") as file:
            running = subprocess.Popen(
                command,
                cwd=place,
                env={**os.environ, "PYTHONPATH": str(place)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = running.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return Verdict(HUNG)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        if status == _PASSED:
            return Verdict("survived")
        failed = Path(directory, "v/cache/lastfailed")
        if status in (_FAILED, _INTERRUPTED) and failed.exists():
            return Verdict("caught", tuple(json.loads(failed.read_text())))
        return Verdict(f"pytest ended with status {status}: {output.read_text(errors='replace')[-300:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all mutations, or those whose names contain one of the given words."""
    parser = argparse.ArgumentParser(description="Try mutations of the product; each must make a test fail.")
    parser.add_argument("words", nargs="*", help="only mutations whose names contain one of these words")
    parser.add_argument("--drawn", type=int, default=0, help="draw as many new mutations, and try those")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0: today's date)")
    parser.add_argument("--since", default="", help="draw from lines that differ from this commit only")
    parser.add_argument("--minutes", type=float, default=0.0, help="draw no more after this time (0: no limit)")
    options = parser.parse_args(arguments)
    words = options.words
    if options.drawn:
        from tests.mutants.draw import try_drawn  # it imports this module

        seed = options.seed or int(time.strftime("%Y%m%d"))
        return try_drawn(options.drawn, seed, options.since, options.minutes, words)
    chosen = [one for one in read_mutations() if not words or any(word in one.name for word in words)]
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="stageout-mutants-") as directory:
        copy_checkout(Path(directory))
        for mutation in chosen:
            begin_s = time.monotonic()
            outcomes[mutation.name] = try_mutation(Path(directory), mutation)
            print(f"{mutation.name}: {outcomes[mutation.name]} ({time.monotonic() - begin_s:.0f} s)", flush=True)
    survivors = [name for name, outcome in outcomes.items() if outcome != "caught"]
    print(f"mutants: {len(chosen) - len(survivors)} of {len(chosen)} caught; not caught: {', '.join(survivors) or '-'}")
    return int(len(survivors) > ALLOWED_SURVIVORS)


if __name__ == "__main__":
    sys.exit(main())
