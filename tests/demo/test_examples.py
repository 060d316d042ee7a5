"""The submit files in examples/ are understood by the real condor_submit and take part in stage-out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.narrow_destination import NarrowDestination
from tests.harness.pool import Pool

pytestmark = pytest.mark.pool
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = {path.name: path.read_bytes() for path in EXAMPLES.glob("*.sh")}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(stageout=False) as running:
        yield running


# overlay.sub needs a router: tests/pool/test_overlay_pool.py runs it.
@pytest.mark.parametrize(
    "path", sorted(set(EXAMPLES.glob("*.sub")) - {EXAMPLES / "overlay.sub"}), ids=lambda path: path.name
)
def test_the_example_runs_as_it_is(pool: Pool, path: Path, tmp_path: Path) -> None:
    with NarrowDestination(tmp_path / "store", rate_mb_s=0) as store:
        (store.root / "part-1").mkdir()
        for name in ("events.dat", "part-1/summary.txt"):
            (store.root / name).write_bytes(b"event\n" * 200_000)
        options = ["-append", f"DESTINATION = {store.url}", "-append", "PART = 1"]
        job = pool.submit("alice", path.read_text(), files=SCRIPTS, options=options)
        pool.wait(lambda: all(pool.history(one) for one in job.ids), 30, f"the end of {path.name}")
        assert {(pool.history(one) or {}).get("ExitCode") for one in job.ids} == {0}
        outputs = [part.path for part in store.transfers() if part.method == "PUT"]
        files = {"merge.sub": 0, "remaps.sub": 2}.get(path.name, 3)
        assert len(outputs) == len(set(outputs)) == files * len(job.ids)
