"""Texts that leave a plugin: one line, short, without secrets and without HTCondor's own separators."""

from __future__ import annotations

import re

from stageout.core.classads import quote
from stageout.plugin.urls import HIDDEN, host_of, may_split_password, safe_urls_in, split_authority

MESSAGE_CHARS = 500
# "Bearer eyJ0..." and "access_token = x1y2...": a value counts if it has a digit or is long; words do not count.
_SECRET_SHAPES = re.compile(
    r"(?i)\b(?P<key>bearer|basic)\s+(?=\S*\d)[A-Za-z0-9._~+/=-]{8,}"
    r"|\b(?P<name>[\w-]*(?:token|signature|secret|password|passwd|credential|authz|apikey|api_key|sig))"
    r"(?P<mark>[\"']?\s*[=:]\s*[\"']?)(?=[^\s&;,\"']*\d|[^\s&;,\"']{16})[^\s&;,\"']{4,}"
)
# The shadow splits messages at these separators, so that a message with them is cut or garbled.
_SEPARATORS = re.compile(r";(?=\s*(?:SHADOW|STARTER)\b)|\|", re.I)
_SHORTEST_SECRET = 6
_RAW = re.compile(r"[\x00-\x1f\x7f]|\\\Z")


class Scrubber:
    """Filter that removes certain and probable secrets from texts. Thread-safe."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()

    def learn(self, secret: str) -> None:
        """Add a secret text. Ignore very short ones, which would remove ordinary words."""
        if len(secret) >= _SHORTEST_SECRET:
            self._secrets.add(secret)

    def learn_url(self, url: str) -> None:
        """Add userinfo and query of this URL as secrets, and possible parts of a password."""
        rest = url.partition("://")[2]
        query = rest.partition("?")[2]
        if may_split_password(url):
            host = host_of(url)
            self._secrets.update({host, f"port {host.rpartition(':')[2]}"} - {""})
            self.learn(rest.rpartition("@")[0])
        userinfo = split_authority(rest)[0].rpartition("@")[0]
        self.learn(userinfo)
        self.learn(userinfo.partition(":")[2])
        self.learn(query)
        for item in query.split("&"):
            self.learn(item.partition("=")[2])

    def scrub(self, text: str) -> str:
        """Remove secrets from the text."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return _SECRET_SHAPES.sub(_hide, safe_urls_in(text))

    def message(self, text: str, limit: int = MESSAGE_CHARS) -> str:
        """Prepare the text for a result ad: scrubbed, one line, at most ``limit`` characters, never empty."""
        return one_line(self.scrub(text), limit)


def recordable(text: str) -> str:
    """Encode those characters of an ad's text that HTCondor would write raw: control characters, and a final backslash.

    A line end in a string splits the access point's records. A backslash before the closing quote breaks the ad that
    the starter sends. File names may contain both.
    """
    return _RAW.sub(lambda found: f"%{ord(found[0]):02X}", text)


def recorded(text: str) -> str:
    """Write the literal of a text in a result ad, after :func:`recordable`."""
    return quote(text if text.isprintable() and "\\" not in text else recordable(text))


def _hide(found: re.Match[str]) -> str:
    if found["key"]:
        return f"{found['key']} {HIDDEN}"
    return f"{found['name']}{found['mark']}{HIDDEN}"


def one_line(text: str, limit: int = MESSAGE_CHARS) -> str:
    """Make one printable line without the separators at which the shadow splits messages."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    text = " ".join(_SEPARATORS.sub(",", text).split())
    if len(text) > limit:
        text = text[: limit - 4].rstrip() + " ..."
    return text or "no reason was given"
