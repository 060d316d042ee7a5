"""Commands that pages show."""

from __future__ import annotations

import re
from collections.abc import Iterator


def shown_calls(text: str) -> Iterator[str]:
    """Calls of ``stageout`` in console blocks, without the program's name."""
    for block in re.findall(r"^ *```console\n(.*?)^ *```$", text, re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*[$#] (?:/\S*/)?stageout ([a-z].*)", line)
            if found:
                yield found[1].split(" | ")[0].split(" && ")[0]
