"""``stageout profile`` against real servers, and what is made of its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stageout.core.profiles import load
from stageout.testing.starter import installed
from tests.harness.destination import Destination
from tests.harness.router import RouterProcess
from tests.sampling.test_estimate import ad, estimate, nginx  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[2]


def profile(folder: Path, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    plugin = installed(ROOT / "plugins" / "stageout_curl_plugin", folder)
    command = [sys.executable, "-m", "stageout.cli.main", "profile", url, "--plugin", str(plugin)]
    where = ["--profiles", str(folder / "profiles")]
    return subprocess.run([*command, *where, *options], capture_output=True, text=True, check=False)


def test_a_web_server(tmp_path: Path, nginx: Destination) -> None:  # noqa: F811
    url = nginx.url("profiled/")
    plot = tmp_path / "page.html"
    done = profile(tmp_path, url, "--max-time", "15", "--max-bytes", "300M", "--json", "--plot", str(plot))
    assert (done.returncode, done.stderr[-500:]) == (0, done.stderr[-500:])
    told = json.loads(done.stdout)
    ways = {run["direction"] for run in told["runs"]}
    assert ways == {"upload", "download"} == set(told["best"])
    assert {run["streams"] for run in told["runs"] if run["direction"] == "upload"} == {1}
    assert {1, 2} <= {run["streams"] for run in told["runs"] if run["direction"] == "download"}
    assert sum(run["moved_bytes"] for run in told["runs"]) <= 300 << 20
    for run in told["runs"]:
        assert run["rate_bytes_per_s"] > 0
        assert run["client_cpu_s"] > 0
        assert run["client_rss_bytes"] > 1 << 20
        assert run["server_cpu_s"] is not None  # nginx is on this machine
        assert run["server_rss_bytes"] > 1 << 20
    assert b"data:image/png;base64," in plot.read_bytes()
    assert "files at once" in plot.read_text()
    left = list(nginx.file("profiled").iterdir())
    assert left
    assert sum(path.stat().st_size for path in left) == 0, (done.stderr, [(p.name, p.stat().st_size) for p in left])
    kept = load(tmp_path / "profiles", f"127.0.0.1:{nginx.port}")
    assert kept is not None
    assert kept.as_json() == json.loads(json.dumps(told)) or kept.at == told["at"]
    _the_estimator_uses_it(tmp_path, url)


def _the_estimator_uses_it(folder: Path, url: str) -> None:
    status, (answer,), problems = estimate(folder, ad(f"file://{folder}/x", f"{url}x"))
    assert status == 0, problems
    assert answer["from_profile"] is True
    assert answer["sampled_bytes"] == 0
    assert answer["max_throughput"] > 0
    status, (answer,), _ = estimate(folder, ad(f"file://{folder}/x", f"{url}x", 'filesize = "40M"'), "--fresh")
    assert status == 0
    assert answer["from_profile"] is False
    assert 0 < answer["sampled_bytes"] <= 2 << 20


def test_our_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = installed(ROOT / "plugins" / "overlay_router_plugin", tmp_path)
    with RouterProcess(tmp_path / "router") as router:
        monkeypatch.setenv("STAGEOUT_OVERLAY_KEY", str(router.key_file("site")))
        url = f"overlay://127.0.0.1:{router.port}/profiled/"
        options = ("--plugin", str(plugin), "--max-time", "60", "--max-bytes", "200M", "--json")
        done = profile(tmp_path, url, *options)
        assert (done.returncode, done.stderr[-500:]) == (0, done.stderr[-500:])
        told = json.loads(done.stdout)
        left = list((router.root / "profiled").iterdir())
        assert left
        assert sum(path.stat().st_size for path in left) == 0
    assert (told["scheme"], told["server"]) == ("overlay", f"127.0.0.1:{router.port}")
    assert {run["direction"] for run in told["runs"]} == {"upload", "download"} == set(told["best"])
    assert {1, 2} <= {run["streams"] for run in told["runs"] if run["direction"] == "upload"}
    for run in told["runs"]:
        assert 0 < run["rate_bytes_per_s"] < 50e9  # however short a sample was
        assert run["server_cpu_s"] is not None


def test_a_directory_with_and_without_reservation(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    done = profile(tmp_path, f"file://{place}/", "--max-time", "60", "--max-bytes", "500M", "--write-only")
    assert (done.returncode, done.stderr[-500:]) == (0, done.stderr[-500:])
    assert "space reserved" in done.stdout
    assert "reserving the space before writing" in done.stdout
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("place", ["/some/where/else", ""])
def test_the_place_of_profiles_is_the_configured_one(place: str) -> None:
    """In a process of its own: the bindings read the configuration once."""
    script = "from stageout.condor.plugins import profiles_folder; print(profiles_folder())"
    environment = {**os.environ, "CONDOR_CONFIG": "ONLY_ENV", "_CONDOR_STAGEOUT_PROFILES": place}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (place or "/var/lib/stageout/profiles")


@pytest.mark.parametrize(
    ("url", "options", "status", "words"),
    [
        ("nothing", (), 64, "not a URL"),
        ("http://127.0.0.1:1/file", (), 1, "must name a directory"),
        ("http://127.0.0.1:1/dir/", (), 1, "stageout_curl_plugin:"),
        ("carrier://h/dir/", (), 1, "no transfer plugin"),
        ("http://127.0.0.1:1/dir/", ("--max-bytes", "plenty"), 64, "size such as 500M"),
        ("http://127.0.0.1:1/dir/", ("--local", "/no/such/place"), 64, "no such directory"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, url: str, options: tuple[str, ...], status: int, words: str) -> None:
    done = profile(tmp_path, url, *options)
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr
    assert not (tmp_path / "profiles").exists()
