"""ADAPT's tables on a shared server: clients that start all their streams at once against clients that adapt.

First testbed: 8 clients, slow and fast increase, on the client side and on the policy side. Second testbed: one client
with all the files, at a quarter of the published numbers of streams.

The server (``sharing/sink.py``) is a process with real connections that reads no faster than a disk server with a
bounded memory would: some 70 streams are best, 256 get half of that. Every setting runs once per round, in turn.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import Figure, main_in_parts
from sharing.quota import before_others

from stageout.core.errors import StageoutError
from stageout.core.streams import Knobs

HERE = Path(__file__).resolve().parent
PICTURES = Path("out/bench")
SERVER = {"disk_mb_s": 16.0, "seek_s": 0.008, "memory_mb": 16.0, "stream_mb_s": 0.15}
FAIR = "fair-share"
CLIENTS, FILE_BYTES = 8, 500_000
MANY, ONE = f"{CLIENTS} clients", "one client"
SLOW = Knobs(initial=1, maximum=8, parallelism=4, delay=4, increment=1, threshold=0.1)
FAST = Knobs(initial=4, maximum=8, parallelism=4, delay=2, increment=1, threshold=0.1)
ALONE = Knobs(initial=5, maximum=32, parallelism=8, delay=2, increment=1, threshold=0.1)
TOKEN = "benchmark-0123456789abcdef"


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    :param policy: settings of the policy service, None without one. :param greedy: as ADAPT's clients, which always ask
        for all that they may have. :param clients: that share the files evenly. :param beside: name of the setting that
        it is compared with; "" for those that others are compared with. :param ours: it has the goal.
    """

    name: str
    controller: str
    knobs: Knobs
    policy: dict[str, object] | None = None
    greedy: bool = True
    clients: int = CLIENTS
    beside: str = f"{MANY}: all streams at once (256)"
    ours: bool = False


def _policy(
    initial: int, increment: int, policy: str = "greedy", pair: int = 128, client: int = 32
) -> dict[str, object]:
    return {"": policy, "_INITIAL": initial, "_INCREMENT": increment, "_MAX_PAIR": pair, "_MAX_CLIENT": client}


AT_ONCE = Setting(f"{MANY}: all streams at once (256)", "fixed", FAST, beside="")
ADAPT = (
    Setting(f"{MANY}: ADAPT, client side, slow increase", "running", SLOW, _policy(32, 4)),
    Setting(f"{MANY}: ADAPT, client side, fast increase", "running", FAST, _policy(32, 4)),
    Setting(f"{MANY}: ADAPT, policy side, slow increase", "fixed", SLOW, _policy(4, 4)),
    Setting(f"{MANY}: ADAPT, policy side, fast increase", "fixed", FAST, _policy(16, 4)),
)
OURS = (
    Setting(f"{MANY}: ours, policy service, slow settings", "crowding", SLOW, _policy(4, 4, FAIR), False, ours=True),
    Setting(f"{MANY}: ours, policy service, fast settings", "crowding", FAST, _policy(16, 4, FAIR), False, ours=True),
    Setting(f"{MANY}: ours, no policy service", "crowding", FAST, ours=True),
)
_ALL = f"{ONE}: all streams at once (256)"
ONE_CLIENT = (
    Setting(_ALL, "fixed", ALONE, clients=1, beside=""),
    Setting(f"{ONE}: ADAPT", "running", ALONE, _policy(256, 8, "greedy", 256, 256), clients=1, beside=_ALL),
    Setting(f"{ONE}: ours", "crowding", ALONE, clients=1, beside=_ALL, ours=True),
)
PARTS = {MANY: (AT_ONCE, *ADAPT, *OURS), ONE: ONE_CLIENT}


@dataclass(frozen=True)
class Result:
    """:param completion_s: until the last client has finished. :param fairness: Jain's index of the mean rates."""

    completion_s: float
    fairness: float
    levels: list[list[tuple[float, int]]]


def measure(parts: Sequence[str], quick: bool) -> list[Figure]:
    """Run it all, or one testbed."""
    files, rounds = (24, 1) if quick else (61, 3)
    settings = [setting for part in parts for setting in PARTS[part]]
    results: dict[str, list[Result]] = {setting.name: [] for setting in settings}
    with before_others(), _sink() as port:
        for _ in range(rounds):
            for setting in settings:
                results[setting.name].append(_run(port, setting, files))
                last = results[setting.name][-1]
                print(f"adapt: {setting.name}: {last.completion_s:.1f} s, {last.fairness:.3f}", flush=True)
    for part in parts:
        mine = {name: runs for name, runs in results.items() if name.startswith(part)}
        if mine:
            _keep_levels(mine, PICTURES / f"adapt-streams-{part.replace(' ', '-')}.png")
    what = f"{CLIENTS * files} files of {FILE_BYTES / 1e6:g} MB"
    return [*_table(settings, results, what), *_gains(settings, results, None if quick else 0.75)]


def _table(settings: Sequence[Setting], results: dict[str, list[Result]], what: str) -> list[Figure]:
    found = []
    for setting in settings:
        runs = results[setting.name]
        found.append(Figure(f"{setting.name}, {what}", statistics.median(run.completion_s for run in runs), "s"))
    for setting in [one for one in settings if one.clients > 1]:
        index = statistics.median(run.fairness for run in results[setting.name])
        found.append(Figure(f"{setting.name}, fairness (Jain)", index, "index"))
    return found


def _gains(settings: Sequence[Setting], results: dict[str, list[Result]], goal: float | None) -> list[Figure]:
    """Completion time over that of all at once in the same round: ADAPT reports 0.8. :param goal: for ours."""
    found = []
    for setting in [one for one in settings if one.beside]:
        pairs = zip(results[setting.name], results[setting.beside])
        ratio = statistics.median(run.completion_s / peer.completion_s for run, peer in pairs)
        found.append(
            Figure(
                f"{setting.name} over all at once",
                ratio,
                "",
                "ADAPT's own figure",
                0.8,
                goal if setting.ours else None,
            )
        )
    return found


def _run(port: int, setting: Setting, files: int) -> Result:
    plan: dict[str, Any] = {
        "port": port, "clients": setting.clients, "files": files * CLIENTS // setting.clients, "file_bytes": FILE_BYTES,
        "controller": setting.controller, "knobs": asdict(setting.knobs), "greedy": setting.greedy,
    }  # fmt: skip
    with _service(setting.policy) as access:
        command = [sys.executable, str(HERE / "sharing" / "clients.py")]
        done = subprocess.run(
            command, input=json.dumps({**plan, **access}), capture_output=True, text=True, check=False, timeout=1200
        )
    if done.returncode != 0:
        raise StageoutError(f"the clients of '{setting.name}' failed: {done.stderr[-800:]}")
    answer = json.loads(done.stdout)
    times = answer["times_s"]
    rates = [1 / time_s for time_s in times]
    index = sum(rates) ** 2 / (len(rates) * sum(rate**2 for rate in rates))
    return Result(max(times), index, answer["levels"])


@contextmanager
def _sink() -> Iterator[int]:
    """The server; gives its port."""
    command = [sys.executable, str(HERE / "sharing" / "sink.py"), json.dumps(SERVER), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sink:
        assert sink.stdout is not None
        yield int(sink.stdout.readline())
        sink.kill()


@contextmanager
def _service(policy: dict[str, object] | None) -> Iterator[dict[str, str]]:
    """A policy service, new for each run. Gives what the clients must know."""
    if policy is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="stageout-bench-") as name:
        place = Path(name)
        (place / "tokens").write_text(f"bench {TOKEN}\n")
        (place / "tokens").chmod(0o600)
        (place / "token").write_text(TOKEN)
        knobs = {"_DIR": place / "db", "_TOKENS": place / "tokens", "_PORT": 0, **policy}
        values = {f"_CONDOR_STAGEOUT_POLICY{name}": str(value) for name, value in knobs.items()}
        command = [sys.executable, "-m", "policy_service.daemon", "--alone"]
        with subprocess.Popen(command, env={**os.environ, **values}, stderr=subprocess.PIPE, text=True) as service:
            assert service.stderr is not None
            url = next(
                found[1] for line in service.stderr if (found := re.search(r" daemon-started .*url=(\S+)", line))
            )
            yield {"service": url, "token": str(place / "token")}
            service.kill()


def _keep_levels(results: dict[str, list[Result]], path: Path) -> None:
    """Draw the streams of each client over time, of the last run of each setting."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, panels = plt.subplots(len(results), 1, figsize=(10, 1.6 * len(results)), layout="constrained")
    for panel, (name, runs) in zip(panels, results.items()):
        for levels in runs[-1].levels:
            panel.step([at for at, _ in levels], [streams for _, streams in levels], where="post", linewidth=1)
        panel.set_title(f"{name}: {runs[-1].completion_s:.0f} s", fontsize=8, loc="left")
        panel.set_xlim(0, max(run.completion_s for every in results.values() for run in every[-1:]))
        panel.set_ylabel("streams", fontsize=7)
    panels[-1].set_xlabel("seconds; one line per client", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    plt.close(picture)


if __name__ == "__main__":
    sys.exit(main_in_parts("adapt", tuple(PARTS), measure))
