"""Transfers to and from real servers, HTCondor's own plugin beside ours."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stageout.core.classads import ClassAd
from stageout.testing.starter import EmbeddedStarter, PluginTable, Wanted
from tests.curl.beside import clean_environment
from tests.curl.real_servers import SERVERS, House, Running

#: Compresses well: servers that pack what they send have something to pack.
DATA = b"".join(b"line %06d of a file that compresses well\n" % number for number in range(40_000))
OLDER = b"an older version\n" * 100
_SLACK_S = 10.0
_LIFETIME_S = 60.0
_AGE_S = 3600


@dataclass(frozen=True)
class Transfer:
    """One transfer. ``stored``: what the server has before."""

    name: str
    upload: bool
    path: str
    stored: bytes | None = None
    local: bytes = DATA


TRANSFERS = (
    Transfer("upload", True, "dir/new file"),
    Transfer("upload over a file", True, "dir/older", OLDER),
    Transfer("upload of the same file again", True, "dir/same", DATA),
    Transfer("upload of an empty file", True, "dir/empty", local=b""),
    Transfer("upload into a new directory", True, "dir/new/deep/file"),
    Transfer("download", False, "dir/there", DATA),
    Transfer("download of an empty file", False, "dir/nothing", b"", local=b""),
    Transfer("download of a missing file", False, "dir/missing"),
)


@dataclass
class Done:
    """The end of a transfer with one plugin."""

    arrived: bool
    claimed: bool
    left: frozenset[str]
    seconds: float
    verified: str
    message: str


@dataclass
class Row:
    """Both plugins at one server."""

    server: str
    transfer: str
    stock: Done
    ours: Done

    @property
    def worse(self) -> list[str]:
        """Say in which respects ours is worse."""
        found = []
        if self.stock.arrived and not self.ours.arrived:
            found.append(f"does not arrive: {self.ours.message or 'success without the file'}")
        if self.ours.claimed and not self.ours.arrived:
            found.append("reports success for a file that is not there")
        if self.ours.left - self.stock.left:
            found.append(f"leaves {sorted(self.ours.left - self.stock.left)}")
        if self.ours.seconds > self.stock.seconds + _SLACK_S and self.stock.arrived:
            found.append(f"takes {self.ours.seconds:.0f} s, the other {self.stock.seconds:.0f} s")
        return found


def compare(server: str, stock: Path, ours: Path) -> list[Row]:
    """Run all transfers at one kind of server, which is started anew for each plugin.

    :raises NotInstalled: the server's program is missing.
    """
    results = []
    for plugin in (stock, ours):
        with House() as house:
            running = SERVERS[server](house)
            table = PluginTable([plugin])
            results.append([_move(running, transfer, plugin, table) for transfer in TRANSFERS])
    return [Row(server, transfer.name, *both) for transfer, *both in zip(TRANSFERS, *results)]


def _move(running: Running, transfer: Transfer, plugin: Path, table: PluginTable) -> Done:
    before = _given(running, transfer)
    url = f"{running.base}/{transfer.path.replace(' ', '%20')}"
    if running.caches and transfer.stored is not None:
        urllib.request.urlopen(url).read()  # from now on the older file is what it has in its cache
    home = Path(tempfile.mkdtemp(prefix="stageout-real-job-"))
    try:
        if transfer.upload:
            (home / "file").write_bytes(transfer.local)
        environment = {**clean_environment(), **running.env}
        starter = EmbeddedStarter(home, table, environment=environment, lifetime_s=_LIFETIME_S)
        run = starter.run(plugin, starter.input_text(plugin, [Wanted(url, "file")]), transfer.upload)
        files = running.files()
        here = home / "file"
        found = files.get(transfer.path) if transfer.upload else here.read_bytes() if here.exists() else None
        left = frozenset(_neutral(path) for path in set(files) - before - {transfer.path})
    finally:
        shutil.rmtree(home)
    ad = run.ads[0] if run.ads else ClassAd()
    facts = ad.get("DeveloperData")
    verified = str(facts.get("StageOutVerified", "")) if isinstance(facts, ClassAd) else ""
    good = run.succeeded and found == transfer.local
    return Done(good, run.succeeded, left, run.duration_s, verified, str(ad.get("TransferError", run.printed)))


def _given(running: Running, transfer: Transfer) -> set[str]:
    """Put the file there that the server has before. Returns all paths."""
    if transfer.stored is not None:
        path = running.root / transfer.path
        path.write_bytes(transfer.stored)
        path.chmod(0o666)
        owner = path.parent.stat()
        shutil.chown(path, owner.st_uid, owner.st_gid)
        os.utime(path, (time.time() - _AGE_S,) * 2)
    return set(running.files())


def _neutral(path: str) -> str:
    """A temporary name has random digits."""
    folder, _, name = path.rpartition("/")
    return f"{folder}/(hidden file)" if name.startswith(".") else path


HEADER = """\
| server | transfer | HTCondor's | ours | verified by | worse |
|---|---|---|---|---|---|"""


def line(row: Row) -> str:
    """One line of the table."""
    ends = ["arrives" if done.arrived else "fails" for done in (row.stock, row.ours)]
    cells = [row.server, row.transfer, *ends, row.ours.verified, "; ".join(row.worse) or "no"]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def show(stock: Path, ours: Path, note: Callable[[str], None]) -> int:
    """Print the lines of the table. Returns in how many ours is worse."""
    worse = 0
    for server in SERVERS:
        for row in compare(server, stock, ours):
            note(line(row))
            worse += bool(row.worse)
    return worse
