"""Programs that serve files, as sites run them, each with a directory of its own on the loopback interface."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.curl.servers import Apache, WebDav
from tests.harness.destination import Destination
from tests.harness.ports import free_ports
from tests.polling import wait_for

_UNPACKED = Path(sys.prefix) / "servers"
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:{_UNPACKED}/usr/sbin"


class NotInstalled(Exception):
    """A program is missing; the text says how to install it."""


def program(name: str, package: str) -> str:
    """Return the path of a program. :raises NotInstalled:"""
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise NotInstalled(f"{name} is not installed; tools/install does it (as root), or: apt-get install {package}")
    return found


@dataclass
class Running:
    """A server that runs.

    :param base: URL of its top directory, without a slash behind it; ``dir`` exists there. :param root: that directory.
    :param env: variables with which both plugins trust it. :param caches: it may answer from what it answered before.
    """

    base: str
    root: Path
    env: dict[str, str] = field(default_factory=dict)
    caches: bool = False

    def files(self) -> dict[str, bytes]:
        """All files below the top, by path."""
        return {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


class House:
    """Directories and processes of the servers of one run; all end with it."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def __enter__(self) -> House:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def home(self) -> Path:
        """Return a new directory that every user can enter."""
        home = Path(tempfile.mkdtemp(prefix="stageout-real-"))
        home.chmod(0o755)
        self.stack.callback(shutil.rmtree, home, ignore_errors=True)
        return home

    def root(self, home: Path, user: str = "nobody", mode: int = 0o777) -> Path:
        """Return a directory to serve, with a directory in it."""
        root = home / "files"
        (root / "dir").mkdir(parents=True)
        if os.getuid() == 0:
            for path in (home, root, root / "dir"):
                shutil.chown(path, user)
        (root / "dir").chmod(mode)
        return root

    def start(self, command: Sequence[str | Path], port: int, log: Path, **more: str) -> None:
        """Start a server and wait until it takes connections."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **more},
            )

        def end() -> None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        self.stack.callback(end)
        wait_for(lambda: _listens(port), lambda: f"{command[0]}: {log.read_text()[-2000:]}")


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def nginx(house: House) -> Running:
    """nginx with its own PUT."""
    server = house.stack.enter_context(Destination(house.home()))
    _make_folder(server.file("dir"))
    return Running(f"http://127.0.0.1:{server.port}", server.file(""))


def _make_folder(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def apache(house: House) -> Running:
    """Apache with mod_dav."""
    server = Apache(house.home())
    house.stack.callback(server.close)
    _make_folder(server.root / "dir")
    return Running(f"dav://127.0.0.1:{server.port}", server.root)


def wsgidav(house: House) -> Running:
    """WsgiDAV."""
    root = house.root(house.home())
    server = WebDav(root)
    house.stack.callback(server.close)
    return Running(f"dav://127.0.0.1:{server.port}", root)


def lighttpd(house: House) -> Running:
    """lighttpd with mod_webdav."""
    home = house.home()
    root, (port,) = house.root(home, "www-data"), free_ports(1)
    config = home / "lighttpd.conf"
    user = 'server.username = "www-data"\nserver.groupname = "www-data"\n' if os.getuid() == 0 else ""
    config.write_text(
        f'server.modules = ("mod_webdav")\nserver.document-root = "{root}"\nserver.bind = "127.0.0.1"\n'
        f'server.port = {port}\n{user}server.upload-dirs = ("{home}")\n'
        '$HTTP["url"] =~ "^/" { webdav.activate = "enable"\nwebdav.is-readonly = "disable" }\n'
    )
    house.start([program("lighttpd", "lighttpd lighttpd-mod-webdav"), "-D", "-f", config], port, home / "log")
    return Running(f"dav://127.0.0.1:{port}", root)


def rclone_webdav(house: House) -> Running:
    """rclone serve webdav: the WebDAV of Go's own library."""
    home = house.home()
    root, (port,) = house.root(home), free_ports(1)
    command = [program("rclone", "rclone"), "serve", "webdav", str(root), "--addr", f"127.0.0.1:{port}"]
    house.start(
        [*command, "--config", home / "none.conf", "--dir-cache-time", "0s"], port, home / "log", HOME=str(home)
    )
    return Running(f"dav://127.0.0.1:{port}", root)


_VSFTPD = """\
listen=YES
background=NO
listen_address=127.0.0.1
listen_port={port}
anonymous_enable=YES
no_anon_password=YES
anon_root={root}
ftp_username=daemon
write_enable=YES
anon_upload_enable=YES
anon_umask=022
anon_world_readable_only=NO
secure_chroot_dir={empty}
seccomp_sandbox=NO
xferlog_enable=NO
connect_from_port_20=NO
"""


def vsftpd(house: House, rules: str = "anon_mkdir_write_enable=YES\nanon_other_write_enable=YES\n") -> Running:
    """vsftpd; anonymous users may do all."""
    if os.getuid():
        raise NotInstalled("vsftpd has to be started by root")
    home = house.home()
    root, (port,) = house.root(home, "root"), free_ports(1)
    (home / "empty").mkdir(mode=0o755)
    home.chmod(0o755)
    config = home / "vsftpd.conf"
    config.write_text(_VSFTPD.format(port=port, root=root, empty=home / "empty") + rules)
    libraries = ":".join(str(folder) for folder in sorted(_UNPACKED.glob("usr/lib/*-linux-gnu")))
    house.start([program("vsftpd", "vsftpd"), config], port, home / "log", LD_LIBRARY_PATH=libraries)
    return Running(f"ftp://127.0.0.1:{port}", root)


def vsftpd_drop_box(house: House) -> Running:
    """vsftpd as a drop box: what is written can be neither seen, renamed nor deleted."""
    return vsftpd(house, "download_enable=NO\ndirlist_enable=NO\ncmds_denied=SIZE,DELE,RNFR,RNTO,MDTM,MLST,RETR\n")


_PROFTPD = """\
ServerType standalone
DefaultAddress 127.0.0.1
Port {port}
{user}
PidFile {home}/pid
ScoreboardFile {home}/scoreboard
DelayEngine off
UseReverseDNS off
WtmpLog off
TransferLog none
SystemLog {home}/system.log
RequireValidShell off
UseFtpUsers off
AuthOrder mod_auth_unix.c
<Anonymous {root}>
  User nobody
  Group nogroup
  UserAlias anonymous nobody
  RequireValidShell off
  AllowOverwrite on
  {rules}
</Anonymous>
"""


def proftpd(house: House, rules: str = "") -> Running:
    """ProFTPD; anonymous users may do all."""
    if os.getuid():
        raise NotInstalled("ProFTPD has to be started by root")
    home = house.home()
    root, (port,) = house.root(home), free_ports(1)
    config = home / "proftpd.conf"
    config.write_text(_PROFTPD.format(port=port, home=home, root=root, rules=rules, user="User nobody\nGroup nogroup"))
    house.start([program("proftpd", "proftpd-core"), "-n", "-c", config], port, home / "log")
    return Running(f"ftp://127.0.0.1:{port}", root)


def proftpd_drop_box(house: House) -> Running:
    """ProFTPD as a drop box."""
    denied = "READ DELE RNFR RNTO SIZE MDTM MLST MLSD LIST NLST RMD"
    return proftpd(house, f"<Limit {denied}>\n    DenyAll\n  </Limit>")


_XROOTD = """\
all.export /dir
all.export /new
oss.localroot {root}
all.adminpath {home}/admin
all.pidpath {home}/admin
xrd.port {native}
xrd.protocol http:{port} libXrdHttp.so
{more}
"""


def xrootd(house: House, more: str = "") -> Running:
    """XRootD by HTTP, without checksums."""
    home = house.home()
    root, (port, native) = house.root(home), free_ports(2)
    (home / "admin").mkdir()
    if os.getuid() == 0:
        shutil.chown(home / "admin", "nobody")
    config = home / "xrootd.cf"
    config.write_text(_XROOTD.format(root=root, home=home, port=port, native=native, more=more))
    user = ["-R", "nobody"] if os.getuid() == 0 else []
    command = [program("xrootd", "xrootd-server"), "-c", config, "-n", f"t{port}", "-l", home / "xrootd.log", *user]
    house.start(command, port, home / "log")
    return Running(f"http://127.0.0.1:{port}", root)


def xrootd_checksums(house: House) -> Running:
    """XRootD by HTTP, with checksums."""
    return xrootd(house, "xrootd.chksum max 2 adler32 crc32c md5")


_PROXY = """\
worker_processes 1;
daemon off;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/unused;
    uwsgi_temp_path {home}/unused; scgi_temp_path {home}/unused;
    client_max_body_size 0;
    {cache}
    server {{
        listen 127.0.0.1:{port} {tls};
        {certificate}
        location {place} {{ proxy_pass {upstream}; proxy_http_version 1.1; proxy_set_header Host $host; {inside} }}
    }}
}}
"""


def _proxy(
    house: House, upstream: str, certificate: Path | None = None, cache: str = "", inside: str = "", place: str = "/"
) -> int:
    home, (port,) = house.home(), free_ports(1)
    for name in ("body", "proxy", "unused", "cache"):
        (home / name).mkdir()
        if os.getuid() == 0:
            shutil.chown(home / name, "nobody")
    config = home / "nginx.conf"
    lines = f"ssl_certificate {certificate}; ssl_certificate_key {certificate};" if certificate else ""
    config.write_text(
        _PROXY.format(
            home=home,
            port=port,
            upstream=upstream,
            tls="ssl" if certificate else "",
            certificate=lines,
            cache=cache.format(home=home),
            inside=inside,
            place=place,
        )
    )
    user = ["-g", "user nobody nogroup;"] if os.getuid() == 0 else []
    nginx_path = program("nginx", "nginx-light")
    command = [nginx_path, "-p", home, "-e", home / "error.log", "-c", config, *user]
    house.start(command, port, home / "log")
    return port


@dataclass
class Trusted:
    """A certificate authority. ``env``: where both plugins find it."""

    env: dict[str, str]
    certificate: Path


def trusted(house: House) -> Trusted:
    """Make an authority and a certificate for 127.0.0.1."""
    import trustme

    home, authority = house.home(), trustme.CA()
    folder = home / "authorities"
    folder.mkdir()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    hashed = ["openssl", "x509", "-hash", "-noout", "-in", str(folder / "ca.pem")]
    name = subprocess.run(hashed, check=True, capture_output=True, text=True).stdout.strip()
    shutil.copy(folder / "ca.pem", folder / f"{name}.0")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(home / "server.pem")
    return Trusted({"X509_CERT_DIR": str(folder)}, home / "server.pem")


def apache_behind_tls(house: House) -> Running:
    """Apache behind an nginx that ends TLS."""
    inner = apache(house)
    authority = trusted(house)
    port = _proxy(house, inner.base.replace("dav:", "http:"), authority.certificate)
    return Running(f"davs://127.0.0.1:{port}", inner.root, env=authority.env)


def apache_behind_a_path(house: House) -> Running:
    """Apache behind an nginx that ends TLS and strips the first part of the path."""
    inner = apache(house)
    authority = trusted(house)
    port = _proxy(house, f"{inner.base.replace('dav:', 'http:')}/", authority.certificate, place="/storage/")
    return Running(f"davs://127.0.0.1:{port}/storage", inner.root, env=authority.env)


def nginx_behind_a_cache(house: House) -> Running:
    """nginx with PUT behind one that keeps answers for a minute."""
    inner = nginx(house)
    cache = "proxy_cache_path {home}/cache keys_zone=all:1m; proxy_cache all; proxy_cache_valid any 1m;"
    port = _proxy(house, inner.base, cache=cache, inside="proxy_cache_methods GET HEAD;")
    return Running(f"http://127.0.0.1:{port}", inner.root, caches=True)


#: Name in the table -> how to start it.
SERVERS: dict[str, Callable[[House], Running]] = {
    "nginx": nginx,
    "Apache, mod_dav": apache,
    "Apache behind TLS": apache_behind_tls,
    "Apache behind TLS and another path": apache_behind_a_path,
    "nginx behind a cache": nginx_behind_a_cache,
    "WsgiDAV": wsgidav,
    "lighttpd, mod_webdav": lighttpd,
    "rclone serve webdav (Go)": rclone_webdav,
    "vsftpd": vsftpd,
    "vsftpd, drop box": vsftpd_drop_box,
    "ProFTPD": proftpd,
    "ProFTPD, drop box": proftpd_drop_box,
    "XRootD": xrootd,
    "XRootD with checksums": xrootd_checksums,
}
