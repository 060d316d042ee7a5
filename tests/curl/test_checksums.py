"""Digests of servers, of owners and of nobody, under the three policies."""

from __future__ import annotations

import base64
import hashlib
import os
import zlib

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.protocols.curl.digests import Digests
from tests.curl.interposer import changed, status
from tests.curl.plugin import NO_RETRY

DATA = os.urandom(50_000)
SHA256 = hashlib.sha256(DATA)
MD5 = hashlib.md5(DATA)
BAD = hashlib.sha256(b"else")


def b64(digest):
    return base64.b64encode(digest.digest()).decode()


OFFERS = [
    ({"Repr-Digest": f"sha-256=:{b64(SHA256)}:"}, {"Repr-Digest": f"sha-256=:{b64(BAD)}:"}, "sha256"),
    ({"Digest": f"SHA-256={b64(SHA256)}"}, {"Digest": f"SHA-256={b64(BAD)}"}, "sha256"),
    ({"Digest": f"adler32={zlib.adler32(DATA):08x}"}, {"Digest": "adler32=00000001"}, "adler32"),
    ({"Content-MD5": b64(MD5)}, {"Content-MD5": b64(hashlib.md5(b"else"))}, "md5"),
    ({"OC-Checksum": f"SHA1:{hashlib.sha1(DATA).hexdigest()}"}, {"OC-Checksum": "SHA1:" + "0" * 40}, "sha1"),
    (
        {"x-amz-server-side-encryption": "AES256", "ETag": f'"{MD5.hexdigest()}"'},
        {"x-amz-server-side-encryption": "AES256", "ETag": '"' + "0" * 32 + '"'},
        "md5",
    ),
]


@pytest.fixture
def url(nginx, door):
    nginx.file("sums").write_bytes(DATA)
    return door.url("sums")


@pytest.mark.parametrize(("right", "wrong", "name"), OFFERS, ids=[",".join(right) for right, _, _ in OFFERS])
def test_download(plugin, door, url, right, wrong, name):
    door.always("GET", changed(**right))
    result = plugin.get(url)
    assert result.ok
    assert result.verified == name
    door.always("GET", changed(**wrong))
    result = plugin.get(url, env=NO_RETRY)
    assert result.failures == [K.CONTENT_MISMATCH]
    assert plugin.leftovers() == []
    assert plugin.get(url, env={"STAGEOUT_CHECKSUM_POLICY": "off"}).ok


@pytest.mark.parametrize(("right", "wrong", "name"), OFFERS, ids=[",".join(right) for right, _, _ in OFFERS])
def test_upload(plugin, door, right, wrong, name):
    door.always("HEAD", changed(**right))
    result = plugin.put(door.url("sums-up"), DATA)
    assert result.ok
    assert result.verified == name
    door.always("HEAD", changed(**wrong))
    result = plugin.put(door.url("sums-up"), DATA, env=NO_RETRY)
    assert result.failures == [K.CONTENT_MISMATCH]
    result = plugin.put(door.url("sums-up"), DATA, env={"STAGEOUT_CHECKSUM_POLICY": "off"})
    assert result.ok
    assert result.verified == "size"


OTHER_FORM = [
    {"x-goog-hash": f"md5={b64(hashlib.md5(b'packed'))}", "x-goog-stored-content-encoding": "gzip"},
    {"Content-MD5": b64(hashlib.md5(b"unpacked")), "Content-Encoding": "gzip"},
    {"Digest": f"SHA-256={b64(BAD)}", "Content-Encoding": "br"},
    {"x-amz-request-id": "1", "ETag": '"' + "0" * 32 + '"'},
    {"x-amz-server-side-encryption": "aws:kms", "ETag": '"' + "0" * 32 + '"'},
    {"x-amz-server-side-encryption-customer-algorithm": "AES256", "ETag": '"' + "0" * 32 + '"'},
]


@pytest.mark.parametrize("headers", OTHER_FORM, ids=lambda headers: ",".join(headers))
def test_digest_of_another_form_says_nothing(plugin, door, url, headers):
    """Of the packed form, of another coding, of the encrypted object: it may agree, and a difference is none."""
    door.always("GET", changed(**headers))
    assert plugin.get(url).verified == "size"
    door.always("GET", None)
    door.always("HEAD", changed(**headers))
    result = plugin.put(door.url("form-up"), DATA)
    assert result.ok
    assert result.failures == []
    assert door.methods().count("PUT") == 1


def test_digest_of_another_form_may_agree(plugin, door, url):
    door.always("GET", changed(**{"x-amz-request-id": "1", "ETag": f'"{MD5.hexdigest()}"'}))
    assert plugin.get(url).verified == "md5"


@pytest.mark.parametrize("code", [400, 403, 405, 500])
def test_server_that_refuses_the_wish_for_digests(plugin, door, url, code):
    """XRootD without checksums answers 405 to it: the file is fetched without, and a missing one is missing."""

    def refusing(asked, forward):
        wishes = any(name.startswith("want-") for name in asked.headers)
        return status(code)(asked, forward) if wishes else forward()

    for method in ("GET", "HEAD", "PUT"):
        door.always(method, refusing)
    assert plugin.get(url).ok
    assert plugin.got() == DATA
    assert plugin.get(door.url("not-there"), env=NO_RETRY).failures == [K.NOT_FOUND]
    assert plugin.put(door.url("no-wish-up"), DATA).verified == "size"


def test_digest_that_only_the_wish_brings(plugin, door, url):
    """Grid storage states it when it is asked; a wrong one is noticed, one of another version is none."""

    def stating(digest, **more):
        def fault(asked, forward):
            wish = {"Digest": f"SHA-256={b64(digest)}"} if "want-digest" in asked.headers else {}
            return changed(**wish, **more)(asked, forward)

        return fault

    door.always("HEAD", stating(SHA256))
    assert plugin.get(url).verified == "sha256"
    door.always("HEAD", stating(BAD))
    assert plugin.get(url, env=NO_RETRY).failures == [K.CONTENT_MISMATCH]
    door.always("HEAD", stating(BAD, ETag='"another"'))
    assert plugin.get(url).verified == "size"


def test_several_digests(plugin, door, url):
    """The strongest counts, unless one was computed while the file was read."""
    several = changed(Digest=f"md5={b64(MD5)},SHA-256={b64(SHA256)}")
    door.always("GET", several)
    assert plugin.get(url).verified == "sha256"
    door.always("HEAD", several)
    assert plugin.put(door.url("several"), DATA).verified == "sha256"


def test_damage_on_the_way(plugin, door, url):
    """Same size, other bytes: only a digest sees it, and the next attempt brings the right ones."""
    door.always("GET", changed(**OFFERS[0][0]))
    door.next("GET", changed(lambda data: data[:-1] + b"?", **OFFERS[0][0]))
    result = plugin.get(url)
    assert result.ok
    assert result.failures == [K.CONTENT_MISMATCH]
    assert plugin.got() == DATA


def test_damage_on_the_way_up(plugin, door, nginx):
    def damage(asked, forward):
        asked.body = asked.body[:-1] + b"?"
        return forward()

    def stated(asked, forward):
        reply = forward()
        stored = nginx.file("damaged-up").read_bytes()
        reply.headers["Repr-Digest"] = f"sha-256=:{b64(hashlib.sha256(stored))}:"
        return reply

    door.next("PUT", damage)
    door.always("HEAD", stated)
    result = plugin.put(door.url("damaged-up"), DATA)
    assert result.ok
    assert result.failures == [K.CONTENT_MISMATCH]
    assert nginx.file("damaged-up").read_bytes() == DATA


def test_required(plugin, nginx, url):
    """nginx states no digest: its ETag is none."""
    policy = {"STAGEOUT_CHECKSUM_POLICY": "required"}
    assert plugin.get(url, env=policy).failures == [K.NOT_VERIFIED]
    assert plugin.leftovers() == []
    assert plugin.put(nginx.url("req-up"), DATA, env=policy).failures == [K.NOT_VERIFIED]
    stated = {"checksum": f"sha256:{SHA256.hexdigest()}"}
    assert plugin.get(url, env=policy, job={"PluginData": stated}).verified == "sha256"


def test_policy_of_the_job_and_of_the_machine(plugin, url):
    assert plugin.get(url, job={"PluginData": {"checksum_policy": "required"}}).failures == [K.NOT_VERIFIED]
    assert plugin.get(url, machine={"STAGEOUT_CHECKSUM_POLICY": "required"}).failures == [K.NOT_VERIFIED]
    assert plugin.get(url, job={"PluginData": {"checksum_policy": "sometimes"}}).failures == [K.BAD_REQUEST]


@pytest.mark.parametrize("name", ["md5", "sha1", "sha256", "sha512"])
def test_owner_states_it(plugin, url, name):
    value = hashlib.new(name, DATA).hexdigest()
    for text in (f"{name}:{value}", f"{name.upper()}:{value.upper()}"):
        result = plugin.get(url, job={"http_PluginData": {"checksum": text}})
        assert result.ok
        assert result.verified == name
    result = plugin.get(url, env=NO_RETRY, job={"PluginData": {"checksum": f"{name}:{value[:-1]}"}})
    assert result.failures == [K.BAD_REQUEST]


def test_owner_states_another(plugin, door, url):
    wrong = {"PluginData": {"checksum": f"sha256:{BAD.hexdigest()}"}}
    assert plugin.get(url, env=NO_RETRY, job=wrong).failures == [K.CONTENT_MISMATCH]
    assert plugin.leftovers() == []
    assert plugin.put(door.url("owner"), DATA, env=NO_RETRY, job=wrong).failures == [K.SOURCE_CHANGED]


def test_what_is_no_digest_is_not_taken_for_one(plugin, door, url):
    """A body's digest in the answer to a PUT is of that answer; an ETag of 32 digits counts at S3 only."""
    door.always("GET", changed(ETag=f'"{BAD.hexdigest()[:32]}"'))
    assert plugin.get(url).verified == "size"
    door.always("GET", changed(Repr_Digest="sha-256=:garbage:", Digest="unknown=xyz"))
    assert plugin.get(url).verified == "size"
    door.next("PUT", lambda asked, forward: changed(Repr_Digest=f"sha-256=:{b64(BAD)}:")(asked, forward))
    assert plugin.put(door.url("answer"), DATA).verified == "size"


def test_server_that_cannot_be_asked(plugin, door):
    """HEAD refused: nothing confirms the upload, and it is said so; with ``required`` it is a failure."""
    door.always("HEAD", status(405))
    result = plugin.put(door.url("silent"), DATA)
    assert result.ok
    assert result.verified == ""
    required = plugin.put(door.url("silent"), DATA, env={"STAGEOUT_CHECKSUM_POLICY": "required"})
    assert required.failures == [K.NOT_VERIFIED]


@pytest.mark.parametrize("size_bytes", [0, 1, (4 << 20) - 1, (4 << 20) + 1, 40 << 20])
def test_digests_of_a_second_thread(size_bytes):
    """Short files have none, long ones do not overtake themselves; values in between are of what has passed."""
    data = os.urandom(1 << 20) * (size_bytes >> 20) + os.urandom(size_bytes % (1 << 20))
    digests, expected = Digests(["md5", "adler32"]), hashlib.md5()
    for start in range(0, size_bytes, 300_000):
        piece = data[start : start + 300_000]
        digests.update(piece)
        expected.update(piece)
        if start % 9_000_000 == 0:
            assert digests.values()["md5"] == expected.hexdigest()
    assert digests.values() == {"md5": expected.hexdigest(), "adler32": f"{zlib.adler32(data):08x}"}
