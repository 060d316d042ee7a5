"""``stageout estimate`` with real transfers through a link."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.core.classad_parser import parse_ads
from stageout.core.classads import ClassAd
from stageout.testing.starter import installed
from tests.harness.destination import Destination
from tests.sampling.link import Link

ROOT = Path(__file__).resolve().parents[2]
MB = 1_000_000


@pytest.fixture(scope="module")
def nginx() -> Iterator[Destination]:
    # Not below pytest's own directory: nginx has a user of its own, who could not enter it.
    with tempfile.TemporaryDirectory(prefix="stageout-nginx-") as home, Destination(Path(home)) as server:
        server.file("big").write_bytes(os.urandom(8 * MB) * 8)
        os.utime(server.file("big"), (1, 1))
        yield server


@pytest.fixture
def link(nginx: Destination) -> Iterator[Link]:
    """2 MB/s for each connection, 6 for all."""
    made = Link(nginx.port, 2 * MB, 6 * MB)
    yield made
    made.close()


def estimate(folder: Path, text: str, *options: str) -> tuple[int, list[ClassAd], str]:
    plugin = folder / "stageout_curl_plugin"
    if not plugin.exists():
        installed(ROOT / "plugins" / "stageout_curl_plugin", folder)
    (folder / "ads").write_text(text)
    command = [sys.executable, "-m", "stageout.cli.main", "estimate", "ads", "--plugin", str(plugin)]
    profiles = ["--profiles", str(folder / "profiles")]
    done = subprocess.run([*command, *profiles, *options], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, list(parse_ads(done.stdout)), done.stderr


def ad(source: str, target: str, more: str = 'filesize = "600M"') -> str:
    return f'[ dap_type = "Estimation"; src_url = "{source}"; dest_url = "{target}"; {more} ]'


def test_a_download_needs_as_many_streams_as_fill_the_link(tmp_path: Path, link: Link) -> None:
    status, (answer,), _ = estimate(
        tmp_path, ad(f"http://127.0.0.1:{link.port}/big", f"file://{tmp_path}/x", 'filesize = "600M"; dap_id = 17')
    )
    assert status == 0
    assert answer["status"] == "request_completed"
    assert answer["dap_id"] == 17
    assert answer["file_size_in_bytes"] == 600 * 10**6
    assert 2 <= answer["optimal_streams"] <= 16  # 3 on a quiet machine
    assert 48 * 0.3 < answer["max_throughput"] < 48 * 1.5
    assert answer["sampled_bytes"] <= 0.05 * (600 * 10**6)
    assert answer["sampled_share"] <= 0.05
    assert answer["optimization_cost"] > 1
    assert [sample["streams"] for sample in answer["samples"]][:2] == [1, 2]
    hours, minutes, seconds = (int(part.split()[0]) for part in answer["est_time"].split(", "))
    expected_s = (600 * 10**6) * 8 / answer["max_throughput"] / 1e6
    assert hours * 3600 + minutes * 60 + seconds == pytest.approx(expected_s, abs=1)
    assert link.most_at_once >= 2


def test_uploads_that_cannot_be_split_are_files_at_once(tmp_path: Path, link: Link, nginx: Destination) -> None:
    status, (answer,), problems = estimate(
        tmp_path,
        ad(f"file://{tmp_path}/x", f"http://127.0.0.1:{link.port}/in/x", 'filesize = "400M"; arguments = "-s 2M"'),
        "--most-streams", "4",
    )  # fmt: skip
    assert status == 0, problems
    assert answer["streams_are"] == "files at once"
    assert answer["optimal_streams"] in (2, 3, 4)
    left = list(nginx.file("in").iterdir())
    assert {path.name.rpartition("-")[0] for path in left} == {".stageout-sample"}
    assert sum(path.stat().st_size for path in left) == 0


def test_between_two_servers_the_slower_leg_answers(tmp_path: Path, link: Link, nginx: Destination) -> None:
    status, (answer,), _ = estimate(
        tmp_path,
        ad(nginx.url("big"), f"http://127.0.0.1:{link.port}/in/", 'filesize = "200M"; nic = 10000; nodes = 2'),
        "--most-streams", "4",
    )  # fmt: skip
    assert status == 0
    assert {sample["leg"] for sample in answer["samples"]} == {"src", "dest"}
    assert answer["max_throughput"] < 80
    assert ("optimal_nodes" in answer) != ("plan_problem" in answer)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[ dap_type = "transfer"; src_url = "http://h/x" ]', 'only "Estimation"'),
        (ad("h/x", "file:///tmp/x"), "src_url"),
        (ad("http://h/x", "file:///tmp/x", ""), "filesize is missing"),
        (ad("http://h/x", "file:///tmp/x", 'filesize = "plenty"'), "write a size"),
        (ad("http://h/x", "file:///tmp/x", 'filesize = "2GB"; arguments = "-x 5"'), "-s SIZE"),
        (ad("http://h/x", "file:///tmp/x", 'filesize = "2GB"; disk_transfer = "perhaps"'), "yes"),
        (ad("http://h/x", "file:///tmp/x", 'filesize = "2GB"; speed = 1'), "not known"),
        (ad("http://h/x", "file:///no/such/place/x", 'filesize = "2GB"; disk_transfer = "yes"'), "may write"),
        (ad("carrier://h/x", "file:///tmp/x"), "no transfer plugin for carrier"),
        (ad("ftp://h/x", "file:///tmp/x"), "part of a ftp"),
        (ad("http://127.0.0.1:1/x", "file:///tmp/x"), "stageout_curl_plugin"),
    ],
)
def test_a_bad_ad_gets_a_clear_answer_and_the_next_one_too(tmp_path: Path, text: str, words: str) -> None:
    status, answers, problems = estimate(tmp_path, text + ad("http://h/x", "x", "dap_id = 4"))
    assert status == 1
    assert [answer["status"] for answer in answers] == ["request_failed"] * 2
    assert words in answers[0]["error"]
    assert words in problems
    assert answers[1]["dap_id"] == 4


def test_what_is_no_ad_at_all(tmp_path: Path) -> None:
    for text in ("", "[ dap_type = ", "hello"):
        status, answers, problems = estimate(tmp_path, text)
        assert (status, answers) == (64, [])
        assert problems.startswith("stageout: ")
