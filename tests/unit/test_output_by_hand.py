"""The program of docs/administrator/matters.md that lists output to save by hand, beside a running manager."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.manager_site import PYTHON, Site, made, run

PAGE = Path(__file__).resolve().parents[2] / "docs/administrator/matters.md"


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


def test_the_page_lists_each_file_that_is_there_with_its_owner_and_url(site: Site) -> None:
    (program,) = re.findall(r"<<'END'\n(.*?)^END$", PAGE.read_text(), re.MULTILINE | re.DOTALL)

    printed: list[str] = []

    async def story() -> None:
        async with site.manager(moving=False) as node:
            gone = await node.hand_off({"copy://h/ok/gone.dat": b"old"}, node.facts("1.0"))
            await node.hand_off({"copy://h/ok/kept.dat": b"bytes"}, node.facts("2.0"))
            (site.base / "spool/sandboxes" / gone.ticket / "0").unlink()
            asked = [PYTHON, "-c", program]
            done = subprocess.run(asked, cwd=site.base / "spool", check=True, capture_output=True, text=True)
            printed.append(done.stdout)

    run(story())
    (line,) = printed[0].splitlines()
    owner, job, path, name, url = line.split(" ")
    assert (owner, job, url) == ("alice", "ap#2.0#1700000000", "copy://h/ok/kept.dat")
    assert name.endswith("kept.dat")
    assert (site.base / "spool" / path).read_bytes() == b"bytes"
