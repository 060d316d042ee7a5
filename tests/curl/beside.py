"""HTCondor's own curl_plugin and ours on the same input, one after the other: what differs, and is ours worse."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote_to_bytes

import trustme

from stageout.core.classads import ClassAd
from stageout.testing.starter import EmbeddedStarter, PluginRun, PluginTable, Wanted
from tests.curl.interposer import Asked, Interposer, Reply
from tests.curl.servers import Apache, Ftp, WebDav
from tests.harness.pool.image import find_image

RELEASE = "25.14"
_PLUGIN = "usr/libexec/condor/curl_plugin"
_HIDDEN = ("STAGEOUT_", "SSL_", "CURL_", "X509_", "_CONDOR", "CONDOR_")
_OLD_S = time.time() - 86400


def stock_plugin(folder: Path) -> Path:
    """Return an executable ``curl_plugin`` in ``folder`` that is HTCondor's, run by its own loader and libraries.

    :raises PoolUnavailable: there is no HTCondor and no root can be built.
    """
    image = find_image(RELEASE)
    if image.is_host:
        return Path("/") / _PLUGIN
    root = image.root
    loader = next(iter(sorted([*root.glob("lib64/ld-linux-*"), *root.glob("lib/ld-linux-*")])))
    folders = [*sorted(root.glob("usr/lib/*-linux-gnu")), root / "usr/lib", root / "usr/lib/condor"]
    libraries = ":".join(map(str, folders))
    wrapper = folder / "curl_plugin"
    wrapper.write_text(f'#!/bin/sh\nexec {loader} --library-path {libraries} {root / _PLUGIN} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


class Store(Interposer):
    """An HTTP server with files in memory, to which all faults of :mod:`tests.curl.interposer` can be added.

    :ivar files: decoded path without the first slash -> content.
    :ivar ranges: whether it answers a Range request with 206.
    :ivar headers: what every answer about a file says; None for what it does not say.
    """

    def __init__(self) -> None:
        super().__init__(upstream_port=0)
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.headers: dict[str, str | None] = {"ETag": '"version-1"', "Last-Modified": formatdate(_OLD_S, usegmt=True)}

    def forward(self, asked: Asked) -> Reply:
        """Do what is asked."""
        path = _decoded(asked.path.partition("?")[0]).lstrip("/")
        if asked.method == "PUT":
            self.files[path] = asked.body
            return Reply(201)
        if asked.method not in ("GET", "HEAD"):
            return Reply(405, {"Allow": "GET, HEAD, PUT"})
        if path not in self.files:
            return Reply(404, {"Content-Type": "text/plain"}, b"no such file")
        data = self.files[path]
        headers = {name: value for name, value in self.headers.items() if value is not None}
        start = self._start(asked, len(data))
        if start is not None:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return Reply(206, headers, data[start:])
        if asked.method == "HEAD":
            return Reply(200, {**headers, "Content-Length": str(len(data))})
        return Reply(200, headers, data)

    def _start(self, asked: Asked, size_bytes: int) -> int | None:
        """First byte of the open range that is asked for; None for the whole file."""
        first = asked.headers.get("range", "").partition("=")[2].partition("-")[0]
        condition = asked.headers.get("if-range")
        if not self.ranges or not first.isdigit() or int(first) >= size_bytes:
            return None
        return int(first) if condition is None or condition in self.headers.values() else None


def _decoded(path: str) -> str:
    """Path of a request line, whose bytes http.server takes for ISO 8859-1."""
    return unquote_to_bytes(path.encode("latin-1")).decode("utf-8", "replace")


@dataclass(frozen=True)
class File:
    """One file to move.

    :param data: its right content. :param arrived: reads what came to the destination; None when nothing did.
    """

    url: str
    name: str
    data: bytes
    arrived: Callable[[], bytes | None]


@dataclass(frozen=True)
class Ask:
    """One call of a plugin.

    :param env: of the starter. :param job_env: of the job. :param job: attributes of its ad.
    :param tokens: name of a credential -> content of its file.
    """

    files: Sequence[File]
    upload: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    job_env: Mapping[str, str] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)


class Stage:
    """Servers and directories for one run of one plugin; none outlives it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.home = Path(tempfile.mkdtemp(prefix="stageout-beside-"))
        self._stack.callback(shutil.rmtree, self.home, ignore_errors=True)
        self.scratch = self.folder("scratch")
        self.roles: dict[str, str] = {str(self.home): "HOME"}

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def on_exit(self, end: Callable[[], None]) -> None:
        """Call this when the plugin has ended."""
        self._stack.callback(end)

    def folder(self, name: str) -> Path:
        """A new directory."""
        path = self.home / name
        path.mkdir()
        return path

    @functools.cached_property
    def store(self) -> Store:
        """An HTTP server with files in memory."""
        store = Store()
        self._stack.callback(store.close)
        self.name_port(store.port, "STORE")
        return store

    def proxy(self, store: Store) -> Interposer:
        """A proxy in front of a store: takes the absolute form of requests."""

        class Proxy(Interposer):
            def forward(self, asked: Asked) -> Reply:
                asked.path = "/" + asked.path.split("/", 3)[3]
                return store.forward(asked)

        proxy = Proxy(upstream_port=0)
        self._stack.callback(proxy.close)
        self.name_port(proxy.port, "PROXY")
        return proxy

    def webdav(self, certificate: Path | None = None) -> WebDav:
        """WsgiDAV, with TLS when a certificate is given."""
        server = WebDav(self.folder("webdav"), certificate)
        self._stack.callback(server.close)
        self.name_port(server.port, "WEBDAV")
        return server

    def apache(self) -> Apache:
        """Apache with WebDAV."""
        home = Path(tempfile.mkdtemp(prefix="stageout-beside-apache-"))  # its user could not enter our own
        self._stack.callback(shutil.rmtree, home, ignore_errors=True)
        server = Apache(home)
        self._stack.callback(server.close)
        self.name_port(server.port, "APACHE")
        return server

    def name_port(self, port: int, role: str) -> None:
        """Let values of both runs be compared although ports differ."""
        self.roles[f":{port}"] = f":{role}"

    def certificate(self, *names: str, authority: trustme.CA, valid: tuple[datetime, datetime] | None = None) -> Path:
        """Key and chain for a server with these names. :param valid: from when to when."""
        path = self.home / f"{'-'.join(names)}.pem"
        start, end = valid or (None, None)
        authority.issue_cert(*names, not_before=start, not_after=end).private_key_and_cert_chain_pem.write_to_path(path)
        return path

    def ftp(self) -> tuple[str, Path]:
        """URL and path of a new directory on an FTP server, which all stages share."""
        with _FTP_LOCK:
            server = _ftp_server()
        folder = Path(tempfile.mkdtemp(dir=server.root))
        self.on_exit(lambda: shutil.rmtree(folder, ignore_errors=True))
        self.roles[f"/{folder.name}/"] = "/FOLDER/"
        return f"ftp://127.0.0.1:{server.port}/{folder.name}", folder

    def get(self, url: str, data: bytes, name: str = "file", **more: Any) -> Ask:
        """Download one file."""
        return Ask([self.wanted(url, data, name)], **more)

    def wanted(self, url: str, data: bytes, name: str) -> File:
        """A file to download."""
        return File(url, name, data, lambda: _content(self.scratch / name))

    def put(self, url: str, data: bytes, arrived: Callable[[], bytes | None], name: str = "file", **more: Any) -> Ask:
        """Upload one file."""
        return Ask([self.offered(url, data, arrived, name)], upload=True, **more)

    def offered(self, url: str, data: bytes, arrived: Callable[[], bytes | None], name: str) -> File:
        """A file to upload."""
        (self.scratch / name).write_bytes(data)
        return File(url, name, data, arrived)

    def put_to_store(self, data: bytes, name: str = "file", **more: Any) -> Ask:
        """Upload one file to the store."""
        return self.put(self.store.url(name), data, lambda: self.store.files.get(name), name, **more)

    def get_from_store(self, data: bytes, name: str = "file", **more: Any) -> Ask:
        """Download one file from the store."""
        self.store.files[name] = data
        return self.get(self.store.url(name), data, name, **more)


_FTP_LOCK = threading.Lock()


@functools.cache
def _ftp_server() -> Ftp:
    """One for all: pyftpdlib has one loop in a process."""
    root = Path(tempfile.mkdtemp(prefix="stageout-beside-ftp-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Ftp(root)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


@dataclass(frozen=True)
class Case:
    """One row of the table.

    :param arrange: prepares servers and says what to move; called once for each plugin.
    :param slow: takes too long for the suite; the program shows it.
    :param better: why ours may fail where the other succeeds.
    :param other: attributes that may differ or be missing, because the other's value is wrong here.
    :param ratio: a success may take so many times as long as the other's, and ``slack_s`` more.
    :param failure_slack_s: a failure may take so much longer than the other's.
    """

    name: str
    arrange: Callable[[Stage], Ask]
    slow: bool = False
    better: str = ""
    other: frozenset[str] = frozenset()
    ratio: float = 3.0
    slack_s: float = 5.0
    failure_slack_s: float = 20.0


@dataclass
class Seen:
    """The result of one plugin in a case.

    :param arrived: for each file, whether its right content is at the destination.
    :param asked: requests that reached the store.
    :param roles: texts that differ between runs -> what they stand for.
    """

    run: PluginRun
    arrived: list[bool]
    asked: int
    roles: dict[str, str]

    @property
    def ok(self) -> bool:
        """All files arrived, and the plugin says so."""
        return self.run.succeeded and all(self.arrived)

    def attributes(self) -> list[dict[str, Any]]:
        """For each result ad its attributes; inner ones (DeveloperData, the newest error) have dotted names."""
        return [{name: self._neutral(value) for name, value in _flat(ad).items()} for ad in self.run.ads]

    def _neutral(self, value: Any) -> Any:
        for text, role in self.roles.items():
            value = value.replace(text, role) if isinstance(value, str) else value
        return value


def run(case: Case, table: PluginTable, plugin: Path) -> Seen:
    """Run one plugin on a case, as condor_starter does, with the settings that it has by default."""
    with Stage() as stage:
        ask = case.arrange(stage)
        credentials = stage.folder("creds") if ask.tokens else None
        for name, content in ask.tokens.items():
            (stage.home / "creds" / f"{name}.use").write_text(content)
        starter = EmbeddedStarter(
            stage.scratch,
            table,
            job_ad=ask.job,
            machine_ad=ask.machine,
            credentials=credentials,
            environment={**clean_environment(), **ask.env},
            job_environment=ask.job_env,
            lifetime_s=900,
        )
        text = starter.input_text(plugin, [Wanted(file.url, file.name) for file in ask.files])
        done = starter.run(plugin, text, ask.upload)
        arrived = [file.arrived() == file.data for file in ask.files]
        return Seen(done, arrived, len(stage.store.asked), stage.roles)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what either plugin reads."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_HIDDEN) and not name.lower().endswith("_proxy")
    }


#: Attributes whose values must agree where both plugins come to the same end.
EQUAL = frozenset(
    {
        "TransferSuccess",
        "TransferFileName",
        "TransferType",
        "TransferProtocol",
        "TransferFileBytes",
        "DeveloperData.TransferHTTPStatusCode",
        "DeveloperData.LibcurlReturnCode",
        "DeveloperData.TransferHostName",
        "DeveloperData.HttpCacheHitOrMiss",
        "DeveloperData.HttpCacheHost",
        "TransferErrorData.ErrorType",
        "TransferErrorData.FailedServer",
        "TransferErrorData.FailedName",
        "TransferErrorData.FailureType",
    }
)
_UNKNOWN = "Unknown"


def worse(case: Case, stock: Seen, ours: Seen) -> list[str]:
    """Say in which respects our outcome is worse; an empty list when it is not."""
    found: list[str] = []
    if len(ours.run.ads) != len(ours.arrived):
        found.append(f"{len(ours.run.ads)} result ads for {len(ours.arrived)} files")
    if stock.ok and not ours.ok and not case.better:
        found.append(f"fails where the other succeeds: {_reasons(ours)}")
    if ours.run.succeeded and not all(ours.arrived):
        found.append("reports success for a file that is not there")
    if ours.run.exit_code not in ((0,) if ours.run.succeeded else (1, 11)):
        found.append(f"exit status {ours.run.exit_code}, signal {ours.run.exit_signal}")
    limit_s = case.ratio * stock.run.duration_s + case.slack_s
    if not ours.ok:
        limit_s = stock.run.duration_s + case.failure_slack_s
    better = ours.ok and not stock.ok  # what arrives may take its time
    if ours.run.duration_s > limit_s and not better:
        found.append(f"takes {ours.run.duration_s:.1f} s, the other {stock.run.duration_s:.1f} s")
    return found


def _reasons(seen: Seen) -> str:
    return "; ".join(str(ad.get("TransferError")) for ad in seen.run.ads if not ad.get("TransferSuccess"))


def lacking(case: Case, stock: Seen, ours: Seen) -> list[str]:
    """Say which attributes of the other's ads ours lack, or have with another type or meaning."""
    return [text for pair in zip(stock.attributes(), ours.attributes()) for text in _lacking(case, *pair)]


def _lacking(case: Case, theirs: dict[str, Any], own: dict[str, Any]) -> list[str]:
    same_end = theirs.get("TransferSuccess") == own.get("TransferSuccess")
    found = []
    for name, value in theirs.items():
        if name in case.other or (name.startswith("TransferError") and own.get("TransferSuccess")):
            continue
        if name not in own:
            found.append(f"{name} is missing, the other has {value!r}")
        elif type(value) is not type(own[name]):
            found.append(f"{name} = {own[name]!r} has another type than {value!r}")
        elif same_end and name in EQUAL and value not in (own[name], _UNKNOWN):
            found.append(f"{name} = {own[name]!r}, the other has {value!r}")
    if theirs["ConnectionTimeSeconds"] and not own["ConnectionTimeSeconds"]:
        found.append("ConnectionTimeSeconds is 0")
    return found


def _flat(ad: ClassAd) -> dict[str, Any]:
    flat = {name: value for name, value in ad.items() if not isinstance(value, (ClassAd, list))}
    inner = {"DeveloperData": ad.get("DeveloperData")}
    errors = ad.get("TransferErrorData")
    if isinstance(errors, list) and errors:
        inner["TransferErrorData"] = errors[-1]
    for head, nested in inner.items():
        if isinstance(nested, ClassAd):
            flat.update({f"{head}.{name}": value for name, value in nested.items()})
    return flat
