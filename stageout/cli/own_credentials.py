"""Credentials of the user who runs a command, as a job of this user would get them."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from stageout.cli.exits import CommandError
from stageout.core.config import Settings
from stageout.core.credentials import BadCredential, end_of, shown
from stageout.core.errors import ErrorClass
from stageout.core.units import duration
from stageout.wire.handoff import MAX_CREDENTIAL_BYTES, OfferedCredential

_TOKEN_END = ".use"


class OwnCredentials(NamedTuple):
    """Credentials for a plugin.

    :param contents: by file name, as plugins get them. :param name: the one for the URL, "" for none.
    :param source: its file or environment variable. :param expires_at: its end, wall clock, seconds; 0: unknown.
    :param left_out: the reason why a proxy is not used.
    """

    contents: Mapping[str, bytes]
    name: str = ""
    source: str = ""
    expires_at: int = 0
    left_out: str = ""

    def sentence(self, now: float) -> str:
        """Describe the credential for a person. :param now: wall clock, seconds."""
        if not self.name:
            return "no credential"
        end = f"ends in {duration(self.expires_at - now)}" if self.expires_at else "its end is not known"
        if 0 < self.expires_at <= now:
            end = f"ended {duration(now - self.expires_at)} ago: renew it"
        return f"{self.name} from {self.source}, {end}"


def service_of(url: str) -> str:
    """Return the name of the token that a URL names (``service.handle+https``), "" when it names none."""
    return url.partition("://")[0].rpartition("+")[0].replace(".", "_")


def own_credentials(url: str, settings: Settings, token_file: str = "") -> OwnCredentials:
    """Find the credentials for a URL.

    The command searches for tokens in this order: ``--token``, the job in which it runs (_CONDOR_CREDS), the access
    point's SEC_CREDENTIAL_DIRECTORY_OAUTH, and WLCG's bearer token discovery. The proxy is that of X509_USER_PROXY, or
    the one in /tmp. An unusable proxy is left out, because no URL names a proxy.

    :raises CommandError: the URL names a token, and no usable one exists.
    """
    service, contents = service_of(url), dict(_job_tokens(settings))
    source = "the job's credentials"
    if service and (token_file or service + _TOKEN_END not in contents):
        source, contents[service + _TOKEN_END] = _token(service, token_file)
    try:
        proxy = _own_proxy()
    except CommandError as problem:
        proxy, left_out = None, f"the X.509 proxy is left out: {problem}"
    else:
        left_out = ""
    contents.update(proxy.contents if proxy else {})
    if service:
        found = _checked(OwnCredentials(contents, shown("token", service), source), "token", service)
    else:
        found = (proxy or OwnCredentials({}))._replace(contents=contents)
    return found._replace(left_out=left_out)


def _own_proxy() -> OwnCredentials | None:
    """Return the user's proxy; None without one. :raises CommandError: it cannot be used."""
    path = _proxy()
    if path is None:
        return None
    contents = {OfferedCredential("proxy", "", 0).file_name: _read(path)}
    return _checked(OwnCredentials(contents, shown("proxy", ""), str(path)), "proxy", "")


def _checked(found: OwnCredentials, kind: str, service: str) -> OwnCredentials:
    """Return the credential with its expiration time. :raises CommandError: its content is invalid."""
    try:
        end = end_of(kind, service, found.contents[OfferedCredential(kind, service, 0).file_name])
    except BadCredential as problem:
        raise CommandError(f"{problem} ({found.source}); renew it", ErrorClass.CREDENTIAL_REFUSED) from None
    return found._replace(expires_at=end)


def kept_token(service: str, settings: Settings) -> OwnCredentials | None:
    """Return the token that the access point would give a job of this user; None if this user cannot read it.

    :raises CommandError: the file has no token.
    """
    contents = dict(_job_tokens(settings))
    if service + _TOKEN_END not in contents:
        return None
    return _checked(OwnCredentials(contents, shown("token", service), "the access point"), "token", service)


def _job_tokens(settings: Settings) -> Iterator[tuple[str, bytes]]:
    """Return the tokens of the job in which this command runs, or else those that the access point keeps for this
    user.
    """
    folder = os.environ.get("_CONDOR_CREDS", "")
    kept = settings.condor("SEC_CREDENTIAL_DIRECTORY_OAUTH")
    place = Path(folder) if folder else Path(kept) / _user() if kept else None
    try:
        paths = sorted(place.glob(f"*{_TOKEN_END}")) if place else []
        yield from [(path.name, _read(path)) for path in paths]
    except OSError:
        return  # the credmon's directory belongs to root


def _token(service: str, token_file: str) -> tuple[str, bytes]:
    """Return the token's source and content. :raises CommandError: no token exists."""
    if token_file:
        return token_file, _read(Path(token_file))
    if os.environ.get("BEARER_TOKEN"):
        return "BEARER_TOKEN", os.environ["BEARER_TOKEN"].encode()
    named, run = os.environ.get("BEARER_TOKEN_FILE"), os.environ.get("XDG_RUNTIME_DIR")
    name = f"bt_u{os.geteuid()}"
    for path in [Path(named)] if named else [*([Path(run) / name] if run else []), Path("/tmp") / name]:
        if _is_own(path):
            return str(path), _read(path)
    text = f"there is no token of {service}: name its file with --token FILE, or set BEARER_TOKEN_FILE"
    raise CommandError(text, ErrorClass.CREDENTIAL_MISSING)


def _proxy() -> Path | None:
    named = os.environ.get("X509_USER_PROXY")
    path = Path(named) if named else Path(f"/tmp/x509up_u{os.geteuid()}")
    return path if named or _is_own(path) else None


def _is_own(path: Path) -> bool:
    """Tell whether a file exists and belongs to this user, because anybody can write into /tmp."""
    try:
        return path.lstat().st_uid == os.geteuid() and path.is_file()
    except OSError:
        return False


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_CREDENTIAL_BYTES)
    except OSError as problem:
        text = f"cannot read the credential {path}: {problem.strerror}"
        raise CommandError(text, ErrorClass.CREDENTIAL_MISSING) from None


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
