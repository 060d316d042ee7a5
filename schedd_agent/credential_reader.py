"""Readers of users' credentials on the access point.

The files of a credmon belong to root, and a proxy belongs to its owner. An agent that condor_master starts as root
first becomes the user condor. A child process stays root and only reads: tokens below SEC_CREDENTIAL_DIRECTORY_OAUTH,
and proxies with the rights of the job's owner.
"""

from __future__ import annotations

import base64
import json
import os
import pwd
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from stageout.core.config import Settings, condor_ids
from stageout.wire.handoff import MAX_CREDENTIAL_BYTES, is_service


class NoCredential(Exception):
    """No credential can be given. The text tells its owner why."""


class CredentialReader(Protocol):
    """Reader of credentials. Calls block; make one at a time."""

    def read(self, kind: str, user: str, name: str) -> bytes:
        """Return the token of a service, or the proxy at a path.

        :param user: the job's owner. :param name: service, or absolute path. :raises NoCredential: with the reason.
        """


class LocalCredentialReader:
    """Reader with the rights of this process.

    :param tokens: SEC_CREDENTIAL_DIRECTORY_OAUTH, None where there is none.
    """

    def __init__(self, tokens: Path | None) -> None:
        self._tokens = tokens

    def read(self, kind: str, user: str, name: str) -> bytes:
        """See :class:`CredentialReader`."""
        return self._token(user, name) if kind == "token" else _proxy(user, name)

    def _token(self, user: str, service: str) -> bytes:
        if self._tokens is None:
            raise NoCredential("the access point has no SEC_CREDENTIAL_DIRECTORY_OAUTH")
        if not is_service(service) or not user or "/" in user or user.startswith("."):
            raise NoCredential("this is no service")
        return _content(self._tokens / user / f"{service}.use", f"the token of {service}", None)


def _proxy(user: str, path: str) -> bytes:
    """Return the file that the job's ad names, if it is the owner's and a certificate: the job chose the path."""
    what = "the X.509 proxy"
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise NoCredential("the job's owner has no account on the access point") from None
    if not path.startswith("/") or account.pw_uid == 0:
        raise NoCredential("the job names no x509userproxy with an absolute path")
    with _as_user(account):
        content = _content(Path(path), what, account.pw_uid)
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise NoCredential(f"{what} on the access point holds no certificate")
    return content


@contextmanager
def _as_user(account: pwd.struct_passwd) -> Iterator[None]:
    """Open files with this user's rights, if this process is root."""
    if os.geteuid() != 0:
        yield
        return
    os.setgroups([account.pw_gid])
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def _content(path: Path, what: str, uid: int | None) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NoCredential(f"{what} is no more on the access point") from None
    except OSError as problem:
        text = f"the agent on the access point cannot read {what} ({problem.strerror}; docs/user/credentials.md)"
        raise NoCredential(text) from None
    with open(handle, "rb") as stream:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or (uid is not None and found.st_uid != uid):
            raise NoCredential(f"{what} on the access point is not a file of the job's owner")
        content = stream.read(MAX_CREDENTIAL_BYTES + 1)
    if not 0 < len(content) <= MAX_CREDENTIAL_BYTES:
        raise NoCredential(f"{what} on the access point is empty or too large")
    return content


class ChildCredentialReader:
    """Reader that asks a child process."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = sock.makefile("rwb")

    def read(self, kind: str, user: str, name: str) -> bytes:
        """See :class:`CredentialReader`."""
        try:
            self._stream.write(json.dumps([kind, user, name]).encode() + b"\n")
            self._stream.flush()
            answer = json.loads(self._stream.readline())
        except (OSError, ValueError):
            raise NoCredential("the agent's reader on the access point has ended; restart the agent") from None
        if "no" in answer:
            raise NoCredential(str(answer["no"]))
        return base64.b64decode(answer["content"])


def open_reader(settings: Settings) -> CredentialReader:
    """Return a reader. A root process becomes the user condor, and its reader is a child that stays root.

    Call it before threads are started. :raises ConfigError: the user condor is unknown.
    """
    told = settings.condor("SEC_CREDENTIAL_DIRECTORY_OAUTH")
    direct = LocalCredentialReader(Path(told) if told else None)
    if os.geteuid() != 0:
        return direct
    uid, gid = condor_ids(settings)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _serve(theirs, direct)
    theirs.close()
    os.setgroups([gid])
    os.setgid(gid)
    os.setuid(uid)
    return ChildCredentialReader(ours)


def _serve(sock: socket.socket, reader: LocalCredentialReader) -> None:
    """Answer as the child process until the agent ends."""
    try:
        stream: Any = sock.makefile("rwb")
        for line in stream:
            stream.write(json.dumps(_answer(reader, line)).encode() + b"\n")
            stream.flush()
    except BaseException:
        with suppress(Exception):
            print(f"stageout-schedd-agent: reader: {sys.exc_info()[0]}", file=sys.stderr)
    finally:
        os._exit(0)


def _answer(reader: LocalCredentialReader, line: bytes) -> dict[str, str]:
    try:
        kind, user, name = map(str, json.loads(line))
        return {"content": base64.b64encode(reader.read(kind, user, name)).decode()}
    except NoCredential as no:
        return {"no": str(no)}
    except (ValueError, OSError) as problem:
        return {"no": f"the access point cannot read it ({type(problem).__name__})"}
