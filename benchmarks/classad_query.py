"""Processor time of what every job waits for: a plugin's answer to ``-classad``, and a hand-off.

All run in turn, as pip installs them, in a virtual environment without other packages: those of a developer make each
start dearer. Beside them stand a stock Python plugin, HTCondor's ``curl_plugin``, an interpreter and a shell that do
nothing. The hand-off is that of one small file to a sandbox manager.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from common import Figure, main

from stageout.core import stored_answer
from stageout.core.errors import StageoutError
from stageout.testing.starter import PluginError, installed, query
from tests.harness.pool.image import cache_root

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit"))
from handoff_site import Site  # noqa: E402 - a node with a manager, also for the tests of hand-offs

CLASSAD_MS, HANDOFF_MS = 3.0, 40.0
STOCK, CURL = "usr/libexec/condor/box_plugin.py", "usr/libexec/condor/curl_plugin"
Command = Sequence["str | Path"]


def _found(path: str, command: Command) -> list[str | Path] | None:
    """The command with HTCondor's file of this machine, or of a cached pool image; None where it does not run."""
    for root in [Path("/"), *sorted(cache_root().glob("*/root-*"), reverse=True)]:
        inside = ["chroot", root, f"/{path}"] if root != Path("/") and path == CURL else [root / path]
        if (root / path).is_file() and not subprocess.run(
            [*command, *inside, "-classad"], capture_output=True
        ).returncode:
            return [*command, *inside, "-classad"]
    return None


def cpu_ms(command: Command, environment: Mapping[str, str], folder: Path) -> float:
    """Run a command; its processor time, and that of what it waits for, in milliseconds."""
    null = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    os.chdir(folder)
    words = [str(word) for word in command]
    pid = os.posix_spawn(shutil.which(words[0]) or words[0], words, environment, file_actions=[null])
    _, status, used = os.wait4(pid, 0)
    if status:
        raise StageoutError(f"{' '.join(words)} ended with status {status}")
    return (used.ru_utime + used.ru_stime) * 1000


@contextmanager
def handing_off(plugin: Path) -> Iterator[tuple[Command, dict[str, str], Path]]:
    """A hand-off that can be repeated: command, environment and directory."""
    site = Site(one_user=os.geteuid() != 0)
    try:
        site.start()
        scratch = site.scratch(uid=os.geteuid())
        (scratch / "file").write_bytes(b"x")
        (scratch / "in").write_text(f'[ LocalFileName = "{scratch}/file"; Url = "http://store.invalid/file" ]')
        (scratch / "out").write_text(" " * 19_264)
        for name in ("job", "machine"):
            (scratch / f".{name}.ad").write_text('Name = "value"\n')
        ads = {f"_CONDOR_{name.upper()}_AD": f"{scratch}/.{name}.ad" for name in ("job", "machine")}
        command = [plugin, "-infile", scratch / "in", "-outfile", scratch / "out", "-upload"]
        yield command, {**os.environ, **ads}, scratch
        if "StageOutReceipt" not in (scratch / "out").read_text():
            raise StageoutError("the manager did not take the file: a synchronous transfer was measured")
    finally:
        site.close()


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        python = _environment(folder)
        plugin, asked = _stored(folder, python), installed(ROOT / "plugins" / "gsiftp_plugin", folder, python)
        example = installed(ROOT / "examples" / "mounted_plugin", folder, python)
        environment = dict(os.environ)
        with handing_off(plugin) as handoff:
            runs: dict[str, tuple[Command, dict[str, str], Path]] = {
                "stored": ([plugin, "-classad"], environment, folder),
                "python": ([asked, "-classad"], environment, folder),
                "example": ([example, "-classad"], environment, folder),
                "shell": (["sh", "-c", ":"], environment, folder),
                "bare": ([python, "-S", "-c", ""], environment, folder),
                "interpreter": ([python, "-c", ""], environment, folder),
                "handoff": handoff,
            }
            for title, command in (
                ("box_plugin.py", _found(STOCK, [sys.executable])),
                ("curl_plugin", _found(CURL, [])),
            ):
                if command:
                    runs[title] = (command, environment, folder)
            times_ms: dict[str, list[float]] = {title: [] for title in runs}
            for _ in range((15 if quick else 61) + 1):
                for title, run in runs.items():
                    times_ms[title].append(cpu_ms(*run))
            os.chdir(ROOT)
    median_ms = {title: statistics.median(values[1:]) for title, values in times_ms.items()}
    curl_ms, box_ms = median_ms.get("curl_plugin"), median_ms.get("box_plugin.py")
    return [
        Figure("stored answer to -classad", median_ms["stored"], "ms", "HTCondor's curl_plugin", curl_ms, CLASSAD_MS),
        Figure("Python's answer to -classad", median_ms["python"], "ms", "stock box_plugin.py", box_ms),
        Figure("single-file example plugin -classad", median_ms["example"], "ms", "stock box_plugin.py", box_ms),
        Figure(
            "hand-off of a small file",
            median_ms["handoff"],
            "ms",
            "the interpreter",
            median_ms["interpreter"],
            HANDOFF_MS,
        ),
        Figure("sh -c :", median_ms["shell"], "ms"),
        Figure("python3 -S -c ''", median_ms["bare"], "ms"),
    ]


def _environment(folder: Path) -> str:
    """Make a virtual environment with nothing but the product; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (packages,) = folder.glob("env/lib/python3*/site-packages")
    (packages / "product.pth").write_text(f"{ROOT}\n")
    return str(folder / "env" / "bin" / "python")


def _stored(folder: Path, python: str) -> Path:
    """Install the plugin with a stored answer, which it must print."""
    plugin = Path(shutil.copy(ROOT / "plugins" / "stageout_curl_plugin", folder))
    (folder / "stageout").write_text(f"#!{python}\n")

    def ask(path: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
        return subprocess.run([path, *arguments], env=environment, capture_output=True, text=True, check=True).stdout

    try:
        query(plugin)
        stored_answer.write(plugin, os.environ, ask)
    except (PluginError, stored_answer.CannotStore) as problem:
        raise StageoutError(str(problem)) from None
    return plugin


if __name__ == "__main__":
    sys.exit(main("classad_query", measure))
