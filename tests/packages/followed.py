"""A page of the documents, followed to the letter in a clean root that is started like a machine."""

from __future__ import annotations

import re
import subprocess
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.pool import namespace
from tests.harness.pool.image import Image, run_host

ROOT = Path(__file__).resolve().parents[2]
USER = "alice"
_HOME = Path("/home") / USER
#: Daemons need some seconds before a command finds them, and a page does not say so each time.
_PATIENCE_S = 120.0
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)
#: The text before a block names the file that the block is the content of.
_FILE = re.compile(r"[Ww]rite [^`]*`([\w.-]+)`[^`]*$")


@dataclass(frozen=True)
class Command:
    """A command of a page.

    :param as_root: its prompt is ``#``. :param prints: what the page shows of its output; "" where it shows nothing.
    """

    text: str
    as_root: bool
    prints: str


@dataclass(frozen=True)
class File:
    """A file that the reader writes, in his home."""

    name: str
    content: str


def steps(page: str, heading: str) -> list[Command | File]:
    """Return what a reader does in a section, in its order.

    :param page: name of the page. :param heading: of the section, without its marks.
    """
    text = (ROOT / page).read_text()
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found: list[Command | File] = []
    for block in _FENCE.finditer(section):
        content = textwrap.dedent(block[3])
        if block[2] == "console":
            found += _commands(content)
        elif named := _FILE.search(section[: block.start()].rsplit("\n\n", 2)[-2]):
            found.append(File(named[1], content))
    return found


def _commands(block: str) -> Iterator[Command]:
    prompt, *rest = re.split(r"^([#$]) ", block, flags=re.M)
    assert not prompt, block
    for mark, lines in zip(rest[::2], rest[1::2]):
        text, _, prints = lines.partition("\n")
        yield Command(text, mark == "#", prints.strip())


class Machine:
    """A root with a host name, processes and a loopback device of its own. Its changes go with its folder."""

    def __init__(self, image: Image, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o755)
        hosts = "127.0.0.1 localhost trial.example.org trial\n"
        layout = namespace.Layout("trial", folder, folder, hosts, own_network=True)
        self.pid = namespace.boot(image, layout)
        self._born = namespace.start_time(self.pid)
        run_host(["nsenter", "-t", str(self.pid), "-n", "ip", "link", "set", "lo", "up"])

    def start_htcondor(self) -> None:
        """Start condor_master, as systemd does after the installation of the package."""
        begin = (
            "mkdir -p /run/condor /run/lock/condor; chown condor: /run/condor /run/lock/condor; exec condor_master -f"
        )
        command = namespace.enter(self.pid, ["sh", "-c", begin])
        environment = namespace.environment("root", "/root")
        with open(self._folder / "master.out", "ab") as out:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)

    def follow(self, given: Sequence[Command | File]) -> None:
        """Do what a page says. :raises AssertionError: a command fails, or prints something else than the page."""
        for step in given:
            began = time.monotonic()
            if isinstance(step, File):
                self.run(f"cat >{step.name} <<'END'\n{step.content}END", as_root=False)
            else:
                self._until_it_works(step)
                print(f"  {time.monotonic() - began:6.1f} s  {step.text}")

    def _until_it_works(self, command: Command) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            done = self.run(command.text, command.as_root)
            if not done.returncode and command.prints in ("", done.stdout.strip()):
                return
            assert time.monotonic() < deadline, f"{command.text}\n{done.stdout}{done.stderr}\n{self.logs()}"
            time.sleep(1)

    def run(self, script: str, as_root: bool) -> subprocess.CompletedProcess[str]:
        """Run a command as root, or as the page's ordinary user, in the home of either."""
        user, home = ("root", "/root") if as_root else (USER, str(_HOME))
        uid, gid, _ = namespace.account(self.pid, user)
        command = namespace.enter(self.pid, ["sh", "-c", script], uid=uid, gid=gid, cwd=home)
        environment = {**namespace.environment(user, home), "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    def logs(self) -> str:
        """The ends of HTCondor's logs."""
        folder = Path(f"/proc/{self.pid}/root/var/log/condor")
        return "".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}\n" for log in folder.glob("*Log"))

    def end(self) -> None:
        """End all its processes."""
        namespace.kill_namespace(self.pid, self._born)
