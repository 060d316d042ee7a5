"""An interrupted download goes on where it stopped, but only with surely the same file; otherwise it begins anew."""

from __future__ import annotations

import hashlib
import os
import time

import pytest

from stageout.core.errors import ErrorClass as K
from tests.curl.interposer import Reply, changed, cut, status
from tests.curl.plugin import NO_RETRY

DATA = os.urandom(400_000)
OTHER = os.urandom(400_000)


@pytest.fixture
def url(nginx, door):
    nginx.file("resume").write_bytes(DATA)
    return door.url("resume")


def ranges(door):
    return [asked.headers.get("range", "") for asked in door.asked if asked.method == "GET"]


@pytest.mark.parametrize("how", ["reset", "stall", "end"])
def test_same_version(plugin, door, url, how):
    door.next("GET", cut(100_000, how))
    result = plugin.get(url)
    assert result.ok
    assert plugin.got() == DATA
    assert result.failures == [K.STALLED if how == "stall" else K.CONNECTION_LOST]
    assert ranges(door) == ["", "bytes=100000-"]
    assert door.asked[1].headers["if-range"].startswith('"')
    assert result.ad["TransferTotalBytes"] == len(DATA)
    assert result.verified == "size"
    assert plugin.leftovers() == ["file"]


def test_digests_run_on(plugin, door, url):
    """The digest is of the whole file, not of what the last request brought."""
    door.next("GET", cut(100_000), cut(50_000))
    result = plugin.get(url, job={"PluginData": {"checksum": "sha256:" + hashlib.sha256(DATA).hexdigest()}})
    assert result.ok
    assert result.verified == "sha256"
    assert f"sha256:{hashlib.sha256(DATA).hexdigest()}" in result.ad["DeveloperData"]["StageOutDigests"]
    assert ranges(door) == ["", "bytes=100000-", "bytes=150000-"]


def test_another_version(plugin, door, nginx, url):
    """The server sends the whole new file, and none of the old bytes stays."""
    door.next("GET", cut(100_000), _replaced(nginx))
    assert plugin.get(url).ok
    assert plugin.got() == OTHER


def _replaced(nginx):
    def fault(asked, forward):
        nginx.file("resume").write_bytes(OTHER)
        os.utime(nginx.file("resume"), (1, 1))
        return forward()

    return fault


@pytest.mark.parametrize("etag", ['W/"weak"', None, "", '""', "unquoted"])
@pytest.mark.parametrize("age_s", [0, 3600])
def test_no_strong_tag(plugin, door, nginx, url, etag, age_s):
    """Size and date agree: that is enough to go on. A date that may change within its second is no condition."""
    modified_s = time.time() - age_s
    os.utime(nginx.file("resume"), (modified_s, modified_s))
    door.always("GET", changed(ETag=etag))
    door.next("GET", cut(100_000, ETag=etag))
    result = plugin.get(url)
    assert result.ok
    assert plugin.got() == DATA
    assert ranges(door) == ["", "bytes=100000-"]
    assert ("if-range" in door.asked[1].headers) == bool(age_s)
    assert result.ad["TransferTotalBytes"] == len(DATA)


def test_flaky_line(plugin, door, url):
    door.always("GET", changed(ETag='W/"weak"'))
    door.next("GET", *[cut(60_000, ETag='W/"weak"')] * 6)
    result = plugin.get(url, env={"STAGEOUT_RETRY_BUDGET_S": "3"})
    assert result.ok
    assert plugin.got() == DATA
    assert result.ad["TransferTotalBytes"] == len(DATA)


@pytest.mark.parametrize("known", [True, False])
def test_nothing_names_the_version(plugin, door, url, known):
    """A digest decides at the end; without one such bytes are not put together."""
    nameless = {"ETag": None, "Last_Modified": None}
    door.always("GET", changed(**nameless))
    door.next("GET", cut(100_000, **nameless))
    job = {"PluginData": {"checksum": "sha256:" + hashlib.sha256(DATA).hexdigest()}} if known else {}
    result = plugin.get(url, job=job)
    assert result.ok
    assert plugin.got() == DATA
    assert ranges(door) == ["", "bytes=100000-" if known else ""]


@pytest.mark.parametrize("other", [{"Last_Modified": "Tue, 01 Jan 2019 00:00:00 GMT"}, {"ETag": 'W/"other"'}])
def test_another_version_without_a_strong_tag(plugin, door, nginx, url, other):
    """Of the same size, and sent although nothing says that it is the same: begun anew."""
    door.next("GET", cut(100_000, ETag='W/"weak"'))

    def replaced(asked, forward):
        nginx.file("resume").write_bytes(OTHER)
        return changed(**{"ETag": 'W/"weak"', **other})(asked, forward)

    door.next("GET", replaced)
    result = plugin.get(url)
    assert result.ok
    assert plugin.got() == OTHER
    assert result.failures == [K.CONNECTION_LOST, K.CONTENT_MISMATCH]


def test_server_ignores_if_range(plugin, door, url):
    """206 with the tag of another version: those bytes are not glued on."""

    def wrong(asked, forward):
        return Reply(206, {"ETag": '"other"', "Content-Range": f"bytes 100000-399999/{len(DATA)}"}, OTHER[100_000:])

    door.next("GET", cut(100_000), wrong)
    assert plugin.get(url).ok
    assert plugin.got() == DATA
    assert ranges(door) == ["", "bytes=100000-", ""]


@pytest.mark.parametrize("content_range", ["bytes 0-399999/400000", "bytes 100000-399999/500000", "garbage", ""])
def test_wrong_part(plugin, door, url, content_range):
    def wrong(asked, forward):
        tag = forward().headers["ETag"]
        return Reply(206, {"ETag": tag, "Content-Range": content_range}, OTHER[100_000:])

    door.next("GET", cut(100_000), wrong)
    assert plugin.get(url).ok
    assert plugin.got() == DATA


def test_range_refused(plugin, door, url):
    """416: the file has become shorter, or the server is confused; begin anew."""
    door.next("GET", cut(100_000), status(416))
    assert plugin.get(url).ok
    assert plugin.got() == DATA
    assert ranges(door)[-1] == ""


def test_lost_at_the_very_end(plugin, door, url):
    """All bytes of the body are there, but not the end of the chunked form: nothing is asked beyond the file."""
    door.next("GET", cut(len(DATA) - 1))
    result = plugin.get(url)
    assert result.ok
    assert plugin.got() == DATA


def test_progress_renews_the_budget(plugin, door, url):
    """A long file over a bad line: every attempt that brings something counts as a beginning."""
    door.next("GET", *[cut(60_000)] * 5)
    result = plugin.get(url, env={"STAGEOUT_RETRY_BUDGET_S": "3"})
    assert result.ok
    assert plugin.got() == DATA
    assert len(ranges(door)) == 6


def test_nothing_stays_after_a_failure(plugin, door, url):
    door.always("GET", cut(100_000))
    assert plugin.get(url, env=NO_RETRY).failures == [K.CONNECTION_LOST]
    assert plugin.leftovers() == []


def test_resumed_bytes_are_damaged(plugin, door, nginx, url):
    """The owner's digest tells; nothing of the damaged bytes is used for the next attempt."""
    door.next("GET", _damaged_and_cut(bytes(100_000)))
    result = plugin.get(url, job={"PluginData": {"checksum": "md5:" + hashlib.md5(DATA).hexdigest()}})
    assert result.ok
    assert result.failures == [K.CONNECTION_LOST, K.CONTENT_MISMATCH]
    assert plugin.got() == DATA


def _damaged_and_cut(damaged):
    def fault(asked, forward):
        reply = forward()
        reply.body = damaged + reply.body[len(damaged) :]
        reply.cut_after = len(damaged)
        return reply

    return fault
