"""Try mutations of the product one by one: each must make a test near it fail. ``make mutants``.

Each mutation of ``mutations.txt`` is made in a copy of the checkout, where the tests named with it run.
The exit status is 0 when at least all but ``ALLOWED_SURVIVORS`` are caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.mutations import Mutation, read_mutations

ROOT = Path(__file__).resolve().parents[2]
ALLOWED_SURVIVORS = 2
_TIMEOUT_S = 600
#: Exit statuses of pytest: all tests passed, and a test failed.
_PASSED, _FAILED = 0, 1


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
    path = place / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        return f"{mutation.file} has {text.count(mutation.before)} places for it"
    path.write_text(text.replace(mutation.before, mutation.after))
    try:
        return _verdict(place, mutation.tests)
    finally:
        path.write_text(text)


def _verdict(place: Path, tests: Sequence[str]) -> str:
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    try:
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "caught"  # a hang is noticed too
    if done.returncode in (_PASSED, _FAILED):
        return "survived" if done.returncode == _PASSED else "caught"
    return f"pytest ended with status {done.returncode}: {done.stdout[-300:]}"


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
