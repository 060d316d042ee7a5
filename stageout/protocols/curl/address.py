"""The target of a URL: the URL for requests, the owner of the credential, and related paths."""

from __future__ import annotations

import time
from calendar import timegm
from dataclasses import dataclass, replace
from functools import cached_property
from urllib.parse import parse_qsl, quote, unquote, urljoin, urlsplit, urlunsplit

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.urls import as_written, bare_url, safe_url, split_authority, split_scheme

_WIRE_SCHEMES = {"dav": "http", "davs": "https"}
_DEFAULT_PORTS = {"http": 80, "https": 443, "ftp": 21}
# Query keys of a signature for one method. Servers refuse other methods with it.
_SIGNED = {"x-amz-signature", "x-goog-signature", "x-oss-signature", "signature", "sig"}
_SAFE_IN_NAME = "-._~!$&'()*+,=:@"


@dataclass(frozen=True)
class Address:
    """A URL of a server, split into its parts.

    :param url: for requests, without userinfo and fragment.
    :param method: as HTCondor sees it (``davs``).
    :param service: service of the credential, "" for none. :param handle: handle of the credential, "" for none.
    :param user: from the URL, decoded. :param password: from the URL, decoded.
    """

    url: str
    method: str
    service: str = ""
    handle: str = ""
    user: str = ""
    password: str = ""

    @cached_property
    def host(self) -> str:
        """Return host and port, for messages."""
        return urlsplit(self.url).netloc

    @property
    def shown(self) -> str:
        """Return the URL without its query, for messages."""
        return safe_url(self.url)

    @cached_property
    def origin(self) -> tuple[str, str, int]:
        """Return scheme, host and port. A credential is valid for one origin."""
        return origin_of(self.url)

    @cached_property
    def signed(self) -> bool:
        """Tell whether the query is a signature that allows one method only."""
        return any(key.lower() in _SIGNED for key, _ in parse_qsl(urlsplit(self.url).query, keep_blank_values=True))

    @cached_property
    def signed_for_amazon(self) -> bool:
        """Tell whether the signature has S3's form."""
        return any(key.lower() == "x-amz-signature" for key, _ in parse_qsl(urlsplit(self.url).query))

    @property
    def path(self) -> str:
        """Return the path, decoded as the server decodes it."""
        return unquote(urlsplit(self.url).path, errors="surrogateescape")

    @property
    def signature_expired(self) -> bool:
        """Tell whether the signature has expired, as Amazon's and Google's forms show."""
        query = {key.lower(): value for key, value in parse_qsl(urlsplit(self.url).query)}
        for vendor in ("amz", "goog"):
            try:
                start_s = timegm(time.strptime(query[f"x-{vendor}-date"], "%Y%m%dT%H%M%SZ"))
                return time.time() > start_s + int(query[f"x-{vendor}-expires"])
            except (KeyError, ValueError):
                continue
        return False

    @property
    def name(self) -> str:
        """Return the last part of the path, decoded as the server decodes it."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2], errors="surrogateescape")

    def beside(self, name: str) -> Address:
        """Replace the name of the destination by another one in the same collection, and keep the query."""
        parts = urlsplit(self.url)
        path = parts.path.rpartition("/")[0] + "/" + quote(name, safe=_SAFE_IN_NAME, errors="surrogateescape")
        return replace(self, url=urlunsplit(parts._replace(path=path)))

    def parent(self) -> Address | None:
        """Return the collection around the destination, with ``/`` at its end; None for the root."""
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/").rpartition("/")[0] + "/"
        return (
            None
            if path == parts.path or not parts.path.strip("/")
            else replace(self, url=urlunsplit(parts._replace(path=path)))
        )

    def redirected(self, location: str) -> Address:
        """Return the target of a redirect. Keep the credential only if host, port and scheme are the same.

        :raises TransferFailure: BAD_URL when this protocol does not support the target.
        """
        try:
            url, user, password = _apart(urljoin(self.url, as_written(location)))
            origin = origin_of(url)
        except ValueError:
            text = f"{self.host} redirects to a place that is not a URL"
            raise TransferFailure(ErrorClass.BAD_URL, text, server=self.host) from None
        if origin[0] not in ("http", "https") or not origin[1]:
            text = f"{self.host} redirects to {safe_url(url)}, which is not an http or https URL"
            raise TransferFailure(ErrorClass.BAD_URL, text, server=self.host)
        if origin == self.origin:
            return replace(self, url=url)
        return Address(url, self.method, user=user, password=password)


def origin_of(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def address_of(url: str) -> Address:
    """Parse the URL of a request.

    :raises TransferFailure: BAD_REQUEST when it is malformed or names no host. The message contains no part of it that
        may belong to a password.
    """
    scheme = split_scheme(url)
    bare = as_written(bare_url(url))
    rest = bare.partition("://")[2]
    try:
        wire, user, password = _apart(f"{_WIRE_SCHEMES.get(scheme.method, scheme.method)}://{rest}")
        origin_of(wire)
        named = bool(urlsplit(wire).hostname) or scheme.method == "file"
    except ValueError:
        advice = "a port is a number, and a password has %2F for /, %3F for ? and %23 for #"
        text = f"{safe_url(url)} is malformed: {advice}"
        raise TransferFailure(ErrorClass.BAD_REQUEST, text) from None
    if not named:
        raise TransferFailure(ErrorClass.BAD_REQUEST, f"{safe_url(url)} names no host")
    return Address(wire, scheme.method, scheme.service, scheme.handle, user, password)


def _apart(url: str) -> tuple[str, str, str]:
    """Split a URL into the URL without userinfo and fragment, user, and password. :raises ValueError: it is
    malformed.
    """
    scheme, mark, rest = url.partition("://")
    authority, tail = split_authority(rest)
    userinfo, _, host = authority.rpartition("@")  # before parsing the rest, because a password may contain a bracket
    user, _, password = userinfo.partition(":")
    parts = urlsplit(f"{scheme}{mark}{host}{tail}")
    bare = urlunsplit(parts._replace(path=parts.path or "/", fragment=""))
    return bare, unquote(user), unquote(password)
