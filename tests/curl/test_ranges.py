"""Downloads over several connections: STAGEOUT_PARALLELISM."""

import hashlib
import os
import threading

import pytest

from stageout.core.errors import ErrorClass as K
from tests.curl.interposer import Reply, changed, cut, status
from tests.curl.plugin import NO_RETRY

DATA = os.urandom(1_000_003)
SPLIT = {"STAGEOUT_PARALLELISM": "4", "STAGEOUT_SPLIT_BYTES": "100000"}


@pytest.fixture
def url(nginx, door):
    nginx.file("ranges").write_bytes(DATA)
    return door.url("ranges")


def ranges(door):
    return [asked.headers.get("range", "") for asked in door.asked if asked.method == "GET"]


def covered(asked):
    """Whether these ranges are the whole file, each byte once."""
    spans = sorted(tuple(map(int, text.partition("=")[2].split("-"))) for text in asked)
    return [start for start, _ in spans] == [0, *(end + 1 for _, end in spans[:-1])] and spans[-1][1] >= len(DATA) - 1


def test_every_range_once_over_several_connections(plugin, door, url):
    meeting = threading.Barrier(3)

    def together(asked, forward):  # answered only when three are open at once
        meeting.wait(30)
        return forward()

    door.next("GET", changed(), together, together, together)
    result = plugin.get(url, env=SPLIT)
    assert result.ok
    assert plugin.got() == DATA
    assert covered(ranges(door))
    assert not meeting.broken
    assert result.failures == []
    assert all("if-range" in asked.headers for asked in door.asked[1:] if asked.method == "GET")
    assert result.ad["TransferTotalBytes"] == len(DATA)
    assert result.ad["DeveloperData"]["Streams"] == 4
    assert plugin.leftovers() == ["file"]


def test_a_small_file_needs_one_request(plugin, door, url):
    assert plugin.get(url, env={"STAGEOUT_PARALLELISM": "4"}).ok
    assert plugin.got() == DATA
    assert door.methods().count("GET") == 1


@pytest.mark.parametrize("code", [400, 403, 404, 416, 500, 503])
@pytest.mark.parametrize("env", [SPLIT, {}], ids=["in parts", "resumed"])
def test_ranges_that_are_refused(plugin, door, url, code, env):
    """A range is more than the download needs: the whole file is given, and it arrives."""

    def whole_only(asked, forward):
        return Reply(code) if "range" in asked.headers else forward()

    door.next("GET", *([] if env else [cut(40_000)]))
    door.always("GET", whole_only)
    result = plugin.get(url, env=env)
    assert result.ok, result.everything
    assert plugin.got() == DATA
    assert len(ranges(door)) <= 10


def test_a_later_range_that_is_refused(plugin, door, url):
    """The first one was given: what is here of the file is not mixed with the whole."""

    def first_only(asked, forward):
        span = asked.headers.get("range", "")
        return Reply(403) if span and not span.startswith("bytes=0-") else forward()

    door.always("GET", first_only)
    result = plugin.get(url, env=SPLIT)
    assert result.ok, result.everything
    assert plugin.got() == DATA


def test_an_empty_file(plugin, door, nginx):
    nginx.file("empty").write_bytes(b"")
    assert plugin.get(door.url("empty"), env=SPLIT).ok
    assert plugin.got() == b""


def test_only_what_broke_is_fetched_again(plugin, door, url):
    door.next("GET", changed(), cut(40_000))
    result = plugin.get(url, env=SPLIT)
    assert result.ok
    assert plugin.got() == DATA
    assert result.failures == [K.CONNECTION_LOST]
    assert result.ad["TransferTotalBytes"] < len(DATA) * 1.5


def test_the_first_request_breaks(plugin, door, url):
    door.next("GET", cut(40_000))
    result = plugin.get(url, env=SPLIT)
    assert result.ok
    assert plugin.got() == DATA
    assert ranges(door).count("bytes=0-99999") == 1


def test_another_version_in_between_is_not_mixed_in(plugin, door, nginx, url):
    other = os.urandom(len(DATA))

    def replaced(asked, forward):
        nginx.file("ranges").write_bytes(other)
        os.utime(nginx.file("ranges"), (1, 1))
        return forward()

    door.next("GET", changed(), replaced)
    result = plugin.get(url, env=SPLIT)
    assert result.ok
    assert plugin.got() == other
    assert result.failures == [K.CONTENT_MISMATCH]


def test_a_wrong_byte_is_seen(plugin, door, url):
    stated = {"PluginData": {"checksum": "sha256:" + hashlib.sha256(DATA).hexdigest()}}
    door.next("GET", changed(), changed(body=lambda data: b"x" + data[1:]))
    result = plugin.get(url, env={**SPLIT, **NO_RETRY}, job=stated)
    assert result.kind is K.CONTENT_MISMATCH
    assert plugin.leftovers() == []
    assert plugin.get(url, env=SPLIT, job=stated).verified == "sha256"


@pytest.mark.parametrize(
    "fault",
    [
        lambda asked, forward: _without_range(asked, forward),
        changed(ETag='W/"weak"', Last_Modified=None),
    ],
    ids=["whole file instead of a range", "version without a name"],
)
def test_servers_whose_ranges_are_of_no_use(plugin, door, url, fault):
    door.next("GET", fault)
    assert plugin.get(url, env=SPLIT).ok
    assert plugin.got() == DATA
    assert door.methods().count("GET") <= 2


def _without_range(asked, forward):
    reply = changed(Content_Range=None)(asked, forward)
    reply.status, reply.body = 200, DATA
    reply.headers["Content-Length"] = str(len(DATA))
    return reply


def test_refusals_keep_their_class(plugin, door, url, nginx):
    assert plugin.get(door.url("nothing"), env=SPLIT).kind is K.NOT_FOUND
    door.next("GET", changed())
    door.always("GET", status(403, "not for you"))
    result = plugin.get(url, env={**SPLIT, **NO_RETRY})
    assert result.kind is K.PERMISSION_DENIED
    assert plugin.leftovers() == []


def test_a_sample_is_the_beginning_of_a_file(plugin, door, url):
    result = plugin.get(url, env=SPLIT, job={"PluginData": {"sample_bytes": 250_000}})
    assert result.ok
    assert plugin.got() == DATA[:250_000]
    assert result.ad["TransferTotalBytes"] == 250_000
    door.next("GET", _without_range)
    assert plugin.get(url, job={"PluginData": {"sample_bytes": 250_000}}).kind is K.NOT_SUPPORTED
