"""The HTCondor of a pool: this machine's own, or a cached root filesystem built with debootstrap.

A finished root is never changed: its directory is named after a hash of its recipe and the month of its build, and
appears by one rename. So a broken build is never used, a changed recipe builds anew, security updates arrive once a
month, and a running pool keeps the root it started with.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.pool.errors import PoolError, PoolUnavailable

USERS = {"alice": 2001, "bob": 2002, "carol": 2003, "pilot": 2010}
"""Users of every pool and their uids (gid is the same number)."""

PREFIX = "/opt/stageout"
"""Where the product's virtual environment is seen inside a node."""

DEFAULT_RELEASE = "25.14"
_RECIPE_VERSION = "1"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_HOST_TOOLS = {"debootstrap": "debootstrap", "unshare": "util-linux", "nsenter": "util-linux"}


@dataclass(frozen=True)
class Recipe:
    """The recipe for one release's root."""

    suite: str
    packages: tuple[str, ...]
    # debootstrap of an older host has no script for a newer suite; the one of sid serves.
    scripts: tuple[str, ...] = ("sid",)

    @property
    def key(self) -> str:
        """Hash over everything that shapes the root."""
        text = repr((_RECIPE_VERSION, self.suite, self.packages, sorted(USERS.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


_TOOLS = ("python3", "python3-venv", "procps", "curl")
RECIPES = {
    "25.14": Recipe("forky", ("minicondor", "condor", *_TOOLS)),
    "23.9": Recipe("trixie", ("minihtcondor", "htcondor", *_TOOLS)),
}


@dataclass(frozen=True)
class Image:
    """A root filesystem with HTCondor in it.

    :param release: name of the release, "host" for this machine's own installation.
    :param root: directory that becomes ``/`` of a node.
    :param cache: directory for everything derived from this root.
    """

    release: str
    root: Path
    cache: Path
    is_host: bool = field(default=False)

    def run(
        self, argv: Sequence[str], *, binds: Mapping[Path, str] | None = None, timeout_s: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside the root, with proc, dev and the given directories mounted, for building.

        :param binds: host path to path inside; both must exist.
        :param timeout_s: seconds until the command is given up.
        :raises PoolError: when it exits with another status than 0.
        """
        script = _enter_script(self, binds or {})
        command = ["unshare", "-m", "--propagation", "private", "sh", "-ec", script, "sh", *argv]
        return run_host(command, env=_build_environment(), timeout_s=timeout_s)


def find_image(release: str | None = None) -> Image:
    """Return the image for a release, built when it is not there yet.

    :param release: "25.14", "23.9", or None for this machine's own HTCondor when it has one, else the newest.
        A release that this machine's own HTCondor happens to be is taken from there.
    :raises PoolUnavailable: not root, unknown release, or the build failed (no network, no space).
    """
    require_root()
    _ensure_tools(("unshare", "nsenter"))
    release = release or os.environ.get("STAGEOUT_POOL_VERSION") or None
    host = host_version()
    if host and (release is None or f"{host}.".startswith(f"{release}.")):
        return Image("host", Path("/"), cache_root() / f"host-{host}", is_host=True)
    release = release or DEFAULT_RELEASE
    if release not in RECIPES:
        raise PoolUnavailable(f"There is no recipe for HTCondor {release}; known are {', '.join(sorted(RECIPES))}.")
    recipe = RECIPES[release]
    cache = cache_root() / release
    image = Image(release, cache / f"root-{recipe.key}-{time.strftime('%Y%m', time.gmtime())}", cache)
    if not image.root.exists():
        return _renewed(image, recipe)
    return image


def require_root() -> None:
    """Raise PoolUnavailable unless this process may make namespaces and mounts."""
    if os.geteuid() != 0:
        raise PoolUnavailable("A pool needs root (mount, UTS and PID namespaces). Run it with sudo, or in a container.")
    if not sys.platform.startswith("linux"):
        raise PoolUnavailable("A pool needs Linux.")


def host_version() -> str | None:
    """Version of the HTCondor installed on this machine (like "25.14.1"), None when there is none."""
    if not shutil.which("condor_master"):
        return None
    tool = shutil.which("condor_version")
    text = subprocess.run([tool], capture_output=True, text=True, check=False).stdout if tool else ""
    return _version_in(text)


def cache_root() -> Path:
    """Directory of all cached images: ``pool`` in ``$STAGEOUT_POOL_CACHE``, else in the user's cache of stageout."""
    given = os.environ.get("STAGEOUT_POOL_CACHE")
    if given:
        return Path(given) / "pool"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stageout" / "pool"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a lock file, so that two processes never build the same thing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def built_aside(final: Path) -> Iterator[Path]:
    """Give a temporary directory beside `final` that becomes `final` by one rename, or is removed after an error."""
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    aside.chmod(0o755)
    try:
        yield aside
        aside.rename(final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def run_host(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run a command on this machine and return its output; PoolError with the end of its output when it fails."""
    try:
        done = subprocess.run(
            list(argv),
            env={**(os.environ if env is None else env), "PATH": _host_path()},
            text=True,
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as late:
        raise PoolError(f"{argv[0]} was given up after {timeout_s:.0f} s: {' '.join(argv)[:300]}") from late
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-25:])
        raise PoolError(f"{' '.join(argv)[-300:]} ended with status {done.returncode}:\n{tail}")
    return done


def _renewed(image: Image, recipe: Recipe) -> Image:
    """Build this month's root; where that fails, return the newest earlier root of the same recipe."""
    earlier = sorted(image.cache.glob(f"root-{recipe.key}*"))
    try:
        _build_locked(image, recipe)
    except PoolUnavailable as problem:
        if not earlier:
            raise
        _say(f"using the root of an earlier month, {earlier[-1].name}: {problem}")
        return Image(image.release, earlier[-1], image.cache)
    for root in earlier[:-1]:  # a running pool may still use the newest of them
        shutil.rmtree(root, ignore_errors=True)
    return image


def _build_locked(image: Image, recipe: Recipe) -> None:
    with locked(cache_root() / f"{image.release}.lock"):
        if image.root.exists():
            return
        try:
            with built_aside(image.root) as aside:
                _build(Image(image.release, aside, image.cache), recipe)
        except PoolError as failed:
            raise PoolUnavailable(
                f"HTCondor {image.release} could not be installed into {image.root.parent}; is the Debian mirror "
                f"reachable and is there 1 GB of space?\n{failed}"
            ) from failed


def _build(image: Image, recipe: Recipe) -> None:
    """Install Debian, HTCondor and the users into an empty directory."""
    _ensure_tools(tuple(_HOST_TOOLS))
    settings = _apt_settings()
    mirror = debian_mirror()
    _say(f"building a root with HTCondor {image.release} from Debian {recipe.suite}; about a minute, once")
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", recipe.suite, str(image.root), mirror]
    run_host([*command, *_debootstrap_script(recipe)], env=_debootstrap_environment(settings))
    (image.root / "etc/apt/apt.conf.d/99host").write_text(settings)
    # Nothing may start daemons while packages are installed.
    policy = image.root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    image.run(["apt-get", "update"])
    image.run(["apt-get", "install", "-y", "--no-install-recommends", *recipe.packages])
    image.run(["sh", "-c", "apt-get clean; rm -rf /var/lib/apt/lists/*"])
    add_users(image)
    (image.root / PREFIX.lstrip("/")).mkdir(parents=True)
    _check_release(image.release, image.run(["condor_version"]).stdout)


def _check_release(release: str, condor_version: str) -> None:
    """Compare what was installed with the release that was asked for. :raises PoolError: it is another release."""
    found = _version_in(condor_version) or "no HTCondor"
    if not f"{found}.".startswith(f"{release}."):
        raise PoolError(
            f"Debian's packages for HTCondor {release} now install {found}. Add a recipe for that release to RECIPES, "
            f"or choose another one with --pool-version or STAGEOUT_POOL_VERSION."
        )


def _version_in(condor_version: str) -> str | None:
    found = re.search(r"\$CondorVersion: (\S+)", condor_version)
    return found.group(1) if found else None


def add_users(image: Image) -> None:
    """Make the pool's users, with the same uids in every image."""
    lines = [
        f"groupadd -g {uid} {name}; useradd -m -s /bin/bash -u {uid} -g {uid} {name}" for name, uid in USERS.items()
    ]
    image.run(["sh", "-ec", "\n".join(lines)])


def _debootstrap_script(recipe: Recipe) -> list[str]:
    scripts = Path("/usr/share/debootstrap/scripts")
    if (scripts / recipe.suite).exists():
        return []
    return [str(scripts / name) for name in recipe.scripts if (scripts / name).exists()][:1]


def _debootstrap_environment(apt_settings: str) -> dict[str, str]:
    """debootstrap does not read apt's settings: give it apt's proxy by environment."""
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive", LC_ALL="C.UTF-8")
    found = re.search(r'^Acquire::http::Proxy "([^"]+)"', apt_settings, re.MULTILINE)
    if found:
        env.setdefault("http_proxy", found.group(1))
    return env


def debian_mirror() -> str:
    """Debian mirror that this machine's own apt uses, or ``$STAGEOUT_POOL_MIRROR``."""
    given = os.environ.get("STAGEOUT_POOL_MIRROR")
    if given:
        return given
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Created-By: Packages"]
    targets = run_host(command).stdout.splitlines() if shutil.which("apt-get") else []
    for line in targets:
        origin, label, uri = [*line.split("|", 2), "", ""][:3]
        if origin == "Debian" and label == "Debian":
            return uri.rstrip("/")
    raise PoolUnavailable(
        "This machine has no HTCondor, and its apt knows no Debian mirror to take one from. "
        "Install HTCondor, run apt-get update, or set STAGEOUT_POOL_MIRROR to the URL of a Debian mirror."
    )


def _apt_settings() -> str:
    """Settings of this machine's apt that decide how files are fetched (proxies, retries, time limits)."""
    if not shutil.which("apt-config"):
        return ""
    lines = run_host(["apt-config", "dump"]).stdout.splitlines()
    wanted = re.compile(
        r"^Acquire::(http|https|ftp|Retries|Check-Valid-Until|ForceIPv4|ForceIPv6)\b.*;$", re.IGNORECASE
    )
    return "".join(f"{line}\n" for line in lines if wanted.match(line) and not line.endswith('"";'))


def _ensure_tools(names: Sequence[str]) -> None:
    """Install what is missing of the host's tools; sbin counts even when it is not on PATH."""
    missing = sorted({_HOST_TOOLS[name] for name in names if not shutil.which(name, path=_host_path())})
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise PoolUnavailable(f"Please install {', '.join(missing)}, or HTCondor itself: this machine has no apt-get.")
    try:
        env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        run_host(["apt-get", "update"], env=env)
        run_host(["apt-get", "install", "-y", "--no-install-recommends", *missing], env=env)
    except PoolError as failed:
        raise PoolUnavailable(f"Could not install {', '.join(missing)}; please install by hand.\n{failed}") from failed


def _enter_script(image: Image, binds: Mapping[Path, str]) -> str:
    """Shell lines that mount what a build needs and enter the root; the namespace's end unmounts it all."""
    root = str(image.root).rstrip("/")
    lines = []
    if not image.is_host:
        lines += [f"mount -t proc proc '{root}/proc'", f"mount --rbind /dev '{root}/dev'"]
        for name in ("/etc/resolv.conf", "/etc/hosts"):
            lines.append(f"[ -e '{root}{name}' ] || : >'{root}{name}'; mount --bind '{name}' '{root}{name}'")
    lines += [f"mount --bind '{source}' '{root}{inside}'" for source, inside in binds.items()]
    return "\n".join([*lines, f"exec chroot '{image.root}' \"$@\""])


def _build_environment() -> dict[str, str]:
    """Environment of build commands: nothing of the caller's but proxies and pip's settings."""
    keep = re.compile(r"^(PIP_.*|SSL_CERT_FILE|REQUESTSCA_BUNDLE|(http|https|ftp|no|all)_proxy)$", re.IGNORECASE)
    env = {name: value for name, value in os.environ.items() if keep.match(name)}
    env.update(PATH=PATH, HOME="/root", LC_ALL="C.UTF-8", DEBIAN_FRONTEND="noninteractive")
    return env


def _host_path() -> str:
    """PATH of this process and, for tools in sbin, the usual directories."""
    return f"{os.environ.get('PATH', '')}:{PATH}"


def _say(text: str) -> None:
    print(f"stageout pool: {text}", file=sys.stderr, flush=True)


def image_account(image: Image, user: str) -> tuple[int, int]:
    """Uid and gid of a user in an image; the pool's own users have fixed ones."""
    if user in USERS:
        return USERS[user], USERS[user]
    for line in (image.root / "etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == user:
            return int(fields[2]), int(fields[3])
    raise PoolUnavailable(f"There is no user {user} in {image.root}; an HTCondor installation makes it.")
