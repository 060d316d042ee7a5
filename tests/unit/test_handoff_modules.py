"""The modules of a hand-off are a closed list: each job waits while they are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from handoff_site import ROOT, Site

REPOSITORY = Path(__file__).resolve().parents[2]
#: An addition has to be worth its time, which each job waits. ``benchmarks/classad_query.py`` measures it.
OURS = """
    stageout stageout.core stageout.core.classad_parser stageout.core.classads stageout.core.errors
    stageout.handoff stageout.handoff.client stageout.handoff.connection stageout.handoff.links stageout.handoff.place
    stageout.plugin stageout.plugin.abilities stageout.plugin.api stageout.plugin.context stageout.plugin.outfile
    stageout.plugin.pace stageout.plugin.proxy stageout.plugin.quiet stageout.plugin.requests stageout.plugin.results
    stageout.plugin.session stageout.plugin.text stageout.plugin.urls
    stageout.protocols stageout.protocols.curl stageout.protocols.curl.abilities
    stageout.wire stageout.wire.handoff
"""
#: Of the standard library of all versions, without the parts of packages.
STANDARD = """
    __future__ _bootlocale _collections _collections_abc _functools _heapq _json _locale _operator _sha2 _sha256
    _socket _sre _stat _struct _typing _weakrefset collections contextlib copyreg enum errno functools gc
    genericpath heapq itertools json keyword math operator os posixpath re reprlib sre_compile sre_constants
    sre_parse stat struct threading types typing warnings
"""
_PLUGIN = REPOSITORY / "plugins" / "stageout_curl_plugin"
_CODE = """
import os, sys
sys.path.insert(0, {repository!r})
os._exit = lambda status: (print(*sys.modules, file=open("modules", "w")), sys.exit(status))
sys.argv = [{plugin!r}, "-infile", "in", "-outfile", "out", "-upload"]
exec(compile(open({plugin!r}).read(), {plugin!r}, "exec"))
"""


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site(one_user=not ROOT)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_a_hand_off_loads_a_closed_list_of_modules(site: Site) -> None:
    scratch = site.scratch(uid=os.geteuid())
    (scratch / "result").write_bytes(b"x")
    (scratch / ".job.ad").write_text("ClusterId = 1\n")
    (scratch / ".machine.ad").write_text('Machine = "node"\n')
    (scratch / "in").write_text(f'[ LocalFileName = "{scratch}/result"; Url = "https://h.test/d/result" ]')
    (scratch / "out").write_text(" " * 19_264)
    ads = {"_CONDOR_JOB_AD": f"{scratch}/.job.ad", "_CONDOR_MACHINE_AD": f"{scratch}/.machine.ad"}
    environment = {**{name: text for name, text in os.environ.items() if name[:6] != "PYTHON"}, **ads}
    code = _CODE.format(repository=str(REPOSITORY), plugin=str(_PLUGIN))
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=scratch, env=environment, check=True, timeout=60)
    assert "StageOutReceipt" in (scratch / "out").read_text(), "it was no hand-off"
    bare = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True
    )
    loaded = set((scratch / "modules").read_text().split()) - set(bare.stdout.split())
    assert {name for name in loaded if name.startswith("stageout")} == set(OURS.split())
    standard = {name.partition(".")[0] for name in loaded if not name.startswith("stageout")}
    assert standard <= set(STANDARD.split()), sorted(standard - set(STANDARD.split()))
