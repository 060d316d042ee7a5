"""The project's metadata: setup.cfg has it, and nothing else does."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

#: End of the host in setup.cfg until the project has an address. A release has one.
_NOWHERE = ".invalid"
_LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\](?:\([^)]*\))?)*)\]\((?![a-z]+:|#)([^)\s]+)\)")
_IMAGE = re.compile(r'((?:src|srcset)=")(?![a-z]+:)([^"]+)"')


def metadata_of(source: Path) -> configparser.SectionProxy:
    """Return the section of setup.cfg: ``url``, ``author`` and so on."""
    setup = configparser.ConfigParser()
    setup.read(source / "setup.cfg")
    return setup["metadata"]


def unset(*addresses: str) -> bool:
    """Tell whether one of these addresses is nowhere."""
    return any(address.rstrip("/").endswith(_NOWHERE) for address in addresses)


def describe(source: Path, version: str, address: str) -> None:
    """Put the project's address into a copy of the sources, and make the links of its README absolute.

    The README is the long description on a package index, which has none of the files that it links to.

    :param address: "" keeps that of setup.cfg.
    """
    setup = source / "setup.cfg"
    if address:
        setup.write_text(setup.read_text().replace(metadata_of(source)["url"], address.rstrip("/")))
    readme = source / "README.md"
    readme.write_text(absolute_links(readme.read_text(), metadata_of(source)["url"], version))


def absolute_links(text: str, address: str, version: str) -> str:
    """Return a page with links to the files of a version. Images are linked raw."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        words = _LINK.sub(link, match[2])
        return f"{match[1]}[{words}]({address}/{kind}/v{version}/{match[3]})"

    return _IMAGE.sub(rf'\g<1>{address}/raw/v{version}/\g<2>"', _LINK.sub(link, text))
