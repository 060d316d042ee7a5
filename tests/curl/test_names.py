"""HTCondor appends file names raw to output_destination: each must arrive as exactly that name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stageout.core.errors import ErrorClass
from stageout.testing.starter import Wanted
from tests.curl.servers import WebDav

ODD = [
    "plain",
    "two words",
    " lead",
    "trail ",
    "a#b",
    "a?b",
    "a?b=c&d",
    "100%",
    "%41",
    "%2e%2e",
    "%zz",
    "ü",
    "日本",
    "e\u0301",
    "é",
    "a+b",
    "a;b",
    "a:b",
    "a@b",
    "a\\b",
    'quo"te',
    "quo'te",
    "[1]",
    "{1}",
    "<1>",
    "`1`",
    "$(HOME)",
    "$$(x)",
    "~",
    "^",
    "|",
    "a=b",
    "..a",
    "a..",
    "\u202e",
    "😀",
    "a\u00a0b",
    "http:",
    "null",
    "x" * 200,
]

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=40).filter(
    lambda name: name not in (".", "..") and not name.startswith(".") and len(os.fsencode(name)) < 200
)


@pytest.fixture(scope="module")
def shared_dav():
    with tempfile.TemporaryDirectory() as folder:
        server = WebDav(Path(folder))
        yield server
        server.close()


def send(plugin, names, destination):
    plugin.new_scratch()
    for name in names:
        (plugin.scratch / name).write_bytes(os.fsencode(name))
    wanted = [Wanted(f"{destination}/{name}", name) for name in names]
    return plugin.call(wanted, upload=True, job={"OutputDestination": destination})


def arrived(folder):
    found = {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}
    assert found == {name: os.fsencode(name) for name in found}
    return set(found)


def test_odd_names(plugin, shared_dav, nginx):
    for scheme, port, root in (
        ("dav", shared_dav.port, shared_dav.root),
        ("http", nginx.port, nginx.home / "files"),
    ):
        assert send(plugin, ODD, f"{scheme}://127.0.0.1:{port}/odd").ok
        assert arrived(root / "odd") == set(ODD)


def test_destination_with_odd_characters(plugin, shared_dav):
    """A person has written the URL in the submit file: escapes in it count, blanks are repaired."""
    assert send(plugin, ["a#b", "50%"], f"dav://127.0.0.1:{shared_dav.port}/run%207/new").ok
    assert arrived(shared_dav.root / "run 7" / "new") == {"a#b", "50%"}


def test_bytes_that_are_no_text(plugin, nginx):
    """A server that takes names as bytes gets exactly those bytes."""
    names = [os.fsdecode(raw) for raw in (b"\xff", b"a\xfe\xffb", b"\xc3", b"caf\xe9.txt")]
    assert send(plugin, names, nginx.url("bytes")).ok
    assert arrived(nginx.file("bytes")) == set(names)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(NAMES, min_size=8, max_size=20, unique=True))
def test_any_name(plugin, shared_dav, names):
    folder = f"any{len(list(shared_dav.root.iterdir()))}"
    assert send(plugin, names, f"dav://127.0.0.1:{shared_dav.port}/{folder}").ok
    assert arrived(shared_dav.root / folder) == set(names)


CHECKPOINTED = [*ODD, "c", "sub/two words#1", "sub/%41"]
GLOBAL_ID = "submit.example.org#12.0#1700000000"


@pytest.mark.parametrize("server", ["shared_dav", "nginx"])
@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("output", ["", "run%207", "run%207/checkpoints"])
def test_checkpoints(plugin, request, server, output, slash):
    """HTCondor asks at a restart for the names that it stored: every character of a name counts in both directions."""
    port = request.getfixturevalue(server).port
    base = f"dav://127.0.0.1:{port}"
    destination = f"{base}/run%207/checkpoints"
    job = {"CheckpointDestination": destination + slash, "GlobalJobId": GLOBAL_ID}
    job.update({"OutputDestination": f"{base}/{output}"} if output else {})
    below = f"{GLOBAL_ID.replace('#', '_')}/0003"
    plugin.new_scratch()
    for name in CHECKPOINTED:
        (plugin.scratch / name).parent.mkdir(exist_ok=True)
        (plugin.scratch / name).write_bytes(os.fsencode(name))
    stored = [Wanted(f"{destination}/{below}/{name}", name) for name in CHECKPOINTED]
    assert plugin.call(stored, upload=True, job=job).ok
    plugin.new_scratch()
    (plugin.scratch / "sub").mkdir()
    fetched = [Wanted(f"{destination}{slash}/{below}/{name}", name) for name in CHECKPOINTED]
    assert plugin.call(fetched, upload=False, job=job).ok
    assert [(plugin.scratch / name).read_bytes() for name in CHECKPOINTED] == [*map(os.fsencode, CHECKPOINTED)]


@pytest.mark.parametrize("written", ["two%20words", "two words", "100%", "a%23b", "a%3Fb", "a#b", "%C3%BC", "ü", "%41"])
def test_urls_of_persons(plugin, shared_dav, written):
    """A remap and a URL of the input, written in the same way, are the same place, also below the destinations."""
    base = f"dav://127.0.0.1:{shared_dav.port}/persons"
    url = f"{base}/{written}"
    job = {"CheckpointDestination": base, "GlobalJobId": GLOBAL_ID, "OriginalOut": url, "OutputDestination": base}
    for ad in ({}, {"CheckpointDestination": base, "GlobalJobId": GLOBAL_ID}, job):
        content = os.urandom(20)
        assert plugin.put(url, content, job=ad).ok
        assert plugin.get(url, job=ad).ok
        assert plugin.got() == content


def test_a_fragment_in_the_destination_is_refused(plugin, shared_dav):
    """Servers never see a fragment, so every file would replace the one before."""
    kept = shared_dav.root / "kept"
    kept.write_bytes(b"before")
    done = send(plugin, ["a", "b"], f"dav://127.0.0.1:{shared_dav.port}/kept#x")
    assert (done.kind, "write %23 for #" in str(done.ad["TransferError"])) == (ErrorClass.BAD_URL, True)
    assert kept.read_bytes() == b"before"
