"""Removal of credentials from a plugin's messages and output."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stageout.movers.schemes import userinfo

_LEAST_SECRET_CHARS = 12
_WORD = re.compile(r"[^\s\"',;:{}\[\]]+")


class Secrets:
    """Filter that removes credentials from texts, and user information from URLs.

    :param contents: contents of credentials. :param urls: URLs that may contain ``USER:PASSWORD@``.
    """

    def __init__(self, contents: Iterable[bytes], urls: Iterable[str] = ()) -> None:
        words: set[str] = set()
        self._before_hosts = sorted({userinfo(url) for url in urls} - {""}, key=len, reverse=True)
        for content in contents:
            words.update(_WORD.findall(content.decode("utf-8", "replace")))
        # The longest first, because a token may be part of another one.
        self._words = sorted((word for word in words if len(word) >= _LEAST_SECRET_CHARS), key=len, reverse=True)

    def scrub(self, text: str) -> str:
        """Replace each word of a credential in the text by ``***``."""
        for word in self._before_hosts:
            text = text.replace(f"{word}@", "***@")
        for word in self._words:
            text = text.replace(word, "***")
        return text
