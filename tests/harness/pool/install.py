"""The installation of the product into a virtual environment that the nodes of a pool see at ``/opt/stageout``.

Two layers, both cached by a hash and never changed once they are there: the dependencies (hash of the list in
setup.cfg), and on hard links of it the product (hash of its source files). So starting a pool with unchanged
sources costs nothing, and changed sources cost one pip call without network.
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.harness.pool.errors import PoolError, PoolUnavailable
from tests.harness.pool.image import CA_BUNDLE, PREFIX, Image, built_aside, locked, run_host

DISTRIBUTION = "stageout"
_LAYOUT_VERSION = "1"
_KEEP_VENVS = 6
_IN_USE = ".in-use"
_SKIPPED = {"tests", "benchmarks", "docs", "examples"}
_DATA = {"plugins", "condor_config.d"}
_METADATA = {"setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md"}
_EXTRAS = ("policy", "globus", "overlay")
_BUILD_TOOLS = ["setuptools >= 64", "wheel"]


def find_checkout(start: Path | None = None) -> Path | None:
    """Root of the product's source tree: given, else that of this module or of the working directory, else None."""
    candidates = [start] if start else [Path(__file__).resolve().parents[3], *[Path.cwd(), *Path.cwd().parents]]
    for root in candidates:
        if root is not None and (root / "setup.cfg").is_file() and (root / "stageout" / "__init__.py").is_file():
            return root
    if start:
        raise PoolUnavailable(f"{start} is not a source tree of {DISTRIBUTION}: it has no setup.cfg.")
    return None


def _is_packaged(image: Image, checkout: Path | None) -> bool:
    """Return whether a package of the system's has put the product, which runs here, into PREFIX."""
    return checkout is None and image.is_host and sys.prefix == PREFIX


def dependencies_venv(image: Image, checkout: Path | None) -> Path:
    """Directory of a virtual environment with the product's dependencies, made (by network) when missing."""
    if _is_packaged(image, checkout):
        return Path(PREFIX)
    wanted = sorted(_requirements(checkout))
    final = image.cache / f"deps-{_hash([_LAYOUT_VERSION, image.root.name, *wanted])}"
    with locked(image.cache / "venv.lock"):
        if not final.exists():
            _make_dependencies(image, final, wanted)
    return final


def product_venv(image: Image, checkout: Path | None) -> Path:
    """Directory of a virtual environment with the product in it, made when missing.

    A package of the system's has put it into PREFIX already: the nodes see that as it is.
    """
    if _is_packaged(image, checkout):
        return Path(PREFIX)
    base = dependencies_venv(image, checkout)
    with locked(image.cache / "venv.lock"), _source_copy(image, checkout) as source:
        final = image.cache / f"venv-{_hash([base.name, *_fingerprint(source)])}"
        if not final.exists():
            with built_aside(final) as aside:
                aside.rmdir()
                run_host(["cp", "-al", str(base), str(aside)])
                _install(image, aside, source)
                # A file of its own to lock: all others are links to the dependencies' files.
                (aside / _IN_USE).unlink(missing_ok=True)
                (aside / _IN_USE).touch()
        os.utime(final)
        _prune(image.cache, final)
    return final


def hold(venv: Path) -> int:
    """Return a descriptor whose being open keeps others from pruning this environment; children may inherit it."""
    handle = os.open(venv / _IN_USE, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def fragments(checkout: Path | None, role: str) -> list[Path]:
    """The product's configuration fragments for a role, in their order.

    :param role: "ap", "ep", "pilot", "policy", "globus", "router" or "web". A fragment with ``-ROLE`` of one in its
        name is for that role, any other for all; a pilot is an execute point too.
    """
    directory = checkout / "condor_config.d" if checkout else _installed_share() / "condor_config.d"
    roles = {"-ap", "-ep", "-pilot", "-policy", "-globus", "-router", "-web"}
    others = roles - {f"-{role}", "-ep" if role == "pilot" else ""}
    found = sorted(path for path in directory.glob("*") if path.is_file() and path.suffix in ("", ".conf", ".config"))
    found = [path for path in found if not path.name.startswith(("README", "."))]
    return [path for path in found if not any(other in path.stem for other in others)]


def _installed_share() -> Path:
    for entry in importlib.metadata.distribution(DISTRIBUTION).files or []:
        if entry.parts[-2:-1] == ("condor_config.d",):
            return Path(str(entry.locate())).resolve().parent.parent
    return Path(os.devnull)


def _requirements(checkout: Path | None) -> list[str]:
    """List the packages that pip installs beside the product, for all its daemons."""
    if checkout is None:
        required = [text.replace("'", '"') for text in importlib.metadata.requires(DISTRIBUTION) or []]
        ours = [text for text in required if "extra ==" not in text]
        ours += [text.partition(";")[0] for text in required if any(f'extra == "{one}"' in text for one in _EXTRAS)]
        return ours + _BUILD_TOOLS
    parser = configparser.ConfigParser()
    parser.read(checkout / "setup.cfg")
    lines = parser.get("options", "install_requires", fallback="").splitlines()
    for extra in _EXTRAS:
        lines += parser.get("options.extras_require", extra, fallback="").splitlines()
    return [line.strip() for line in lines if line.strip()] + _BUILD_TOOLS


def _make_dependencies(image: Image, final: Path, wanted: list[str]) -> None:
    # In a root of our own PREFIX exists; on a machine with HTCondor this makes an empty directory to mount on.
    (image.root / PREFIX.lstrip("/")).mkdir(parents=True, exist_ok=True)
    try:
        with built_aside(final) as aside:
            binds = {aside: PREFIX, **pip_files(image)}
            # The bindings come with HTCondor itself where the system's Python has them: same version as the daemons.
            image.run(["python3", "-m", "venv", "--system-site-packages", PREFIX], binds=binds)
            image.run([f"{PREFIX}/bin/pip", "install", "-q", *wanted, *_bindings(image, aside)], binds=binds)
            image.run([f"{PREFIX}/bin/python", "-c", "import htcondor2, classad2"], binds=binds)
    except PoolError as failed:
        raise PoolUnavailable(
            f"pip could not install {', '.join(wanted)}; is its index reachable?\n{failed}"
        ) from failed


def _bindings(image: Image, venv: Path) -> list[str]:
    try:
        image.run([f"{PREFIX}/bin/python", "-c", "import htcondor2, classad2"], binds={venv: PREFIX})
    except PoolError:
        return ["htcondor >= 24.0"]
    return []


def pip_files(image: Image) -> dict[Path, str]:
    """Files of this machine that its pip uses to reach an index, for use inside the root."""
    if image.is_host:
        return {}
    binds: dict[Path, str] = {}
    if CA_BUNDLE.exists() and (image.root / str(CA_BUNDLE).lstrip("/")).exists():
        binds[CA_BUNDLE] = str(CA_BUNDLE)
    user = (Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf", Path("/etc/pip.conf"))
    for path in [found for found in user if found.is_file()][:1]:
        (image.root / "etc/pip.conf").touch()
        binds[path] = "/etc/pip.conf"
    for name in filter(os.path.isdir, os.environ.get("PIP_FIND_LINKS", "").split()):
        (image.root / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
        binds[Path(name)] = name
    return binds


def _install(image: Image, venv: Path, source: Path | None) -> None:
    if source is None:
        _copy_installed(venv)
        return
    pip = f"{PREFIX}/bin/python -m pip install -q --no-deps --no-build-isolation --no-index /mnt"
    try:
        image.run(pip.split(), binds={venv: PREFIX, source: "/mnt"})
    except PoolError as failed:
        raise PoolError(f"The product could not be installed from its sources:\n{failed}") from failed


@contextlib.contextmanager
def _source_copy(image: Image, checkout: Path | None) -> Iterator[Path | None]:
    """Copy of the sources: a build leaves nothing in the checkout, and edits meanwhile do not matter."""
    if checkout is None:
        yield None
        return
    target = image.cache / f".source.{os.getpid()}"
    try:
        for path in _sources(checkout):
            copy = target / path.relative_to(checkout)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _sources(checkout: Path) -> Iterator[Path]:
    """Files that the installed product is made of: packages, plugins, configuration and metadata."""
    for top in sorted(checkout.iterdir()):
        if top.name in _METADATA:
            yield top
        elif top.name in _DATA or (top.name not in _SKIPPED and (top / "__init__.py").is_file()):
            yield from (path for path in sorted(top.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)


def _fingerprint(source: Path | None) -> Iterator[str]:
    """Names and contents' hashes of everything that is installed."""
    if source is None:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
        paths = [Path(str(entry.locate())) for entry in distribution.files or []]
    else:
        paths = sorted(source.rglob("*"))
    for path in paths:
        if path.is_file() and path.suffix != ".pyc":
            name = path.relative_to(source) if source else path
            yield f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mode & 0o111}"


def _copy_installed(venv: Path) -> None:
    """Copy an installed distribution file by file: only the interpreter in scripts changes."""
    packages = next(iter(venv.glob("lib/python3*/site-packages")))
    distribution = importlib.metadata.distribution(DISTRIBUTION)
    for entry in distribution.files or []:
        source = Path(str(entry.locate()))
        # Entries outside site-packages look like ../../../bin/name; the depth differs between Pythons.
        outside = [part for part in entry.parts if part != ".."]
        target = venv.joinpath(*outside) if entry.parts[0] == ".." else packages / entry
        if not source.is_file() or source.suffix == ".pyc":
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        data = source.read_bytes()
        if entry.parts[0] == ".." and data.startswith(b"#!") and b"python" in data.split(b"\n", 1)[0]:
            target.write_bytes(f"#!{PREFIX}/bin/python\n".encode() + data.split(b"\n", 1)[1])


def _prune(cache: Path, current: Path) -> None:
    """Remove the oldest environments that no pool holds; a developer makes a new one with every change."""
    venvs = sorted(cache.glob("venv-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in [path for path in venvs[_KEEP_VENVS:] if path != current]:
        with contextlib.suppress(OSError), open(old / _IN_USE) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
