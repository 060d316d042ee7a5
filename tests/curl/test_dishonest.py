"""Servers that do other than they say. A file that is not there whole is never reported as arrived."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.testing.starter import Wanted
from tests.curl.hall import Answer, Door, FtpDoor, Hall, open_ftp
from tests.curl.matrix_worlds import DATA, OLDER, World, dav_store, plain_store, redirecting
from tests.curl.plugin import NO_RETRY

OTHER = bytes(reversed(DATA))
_MD5 = hashlib.md5(OTHER).hexdigest()


@pytest.fixture
def hall() -> Iterator[Hall]:
    with Hall() as running:
        yield running


@pytest.fixture
def serve(hall) -> Callable[..., Door]:
    """Start a server for one file, whose faults are given by step."""

    def start(world, **faults):
        door = world.door()
        door.faults.update({name.replace("_", " "): fault for name, fault in faults.items()})
        open_ftp(hall, door) if isinstance(door, FtpDoor) else hall.open(door)
        door.address = world.url(door)
        return door

    return start


PUT = World("put", True, answer=plain_store)
DAV = World("put by dav", True, scheme="dav", answer=dav_store)
GET = World("get", False, answer=plain_store)


# ---- what is stored --------------------------------------------------------------------------------------------------


def storing(content):
    """Store other content than was sent, and say that all is well."""

    def fault(door, request, forward):
        request.body = content
        return forward()

    return fault


@pytest.mark.parametrize("world", [PUT, DAV], ids=["http", "dav"])
@pytest.mark.parametrize("content", [DATA[:-1], DATA + b"!", b"", OLDER], ids=["less", "more", "nothing", "older"])
def test_stores_another_length(plugin, serve, world, content):
    """The server's own answers show it: the length in HEAD, and again in the answer to a request for one byte."""
    door = serve(world, PUT=storing(content))
    result = plugin.put(door.address, DATA)
    assert not result.ok
    assert result.failures[-1] is K.SIZE_MISMATCH
    assert f"{len(content)} bytes" in result.ad["TransferError"]
    assert door.taken_bytes <= 2 * len(DATA)


def test_stores_a_wrong_copy_once(plugin, serve):
    """The second copy is right: it arrives."""
    door = serve(PUT, PUT=storing(DATA[:100]))
    door.most_fires = 1
    assert plugin.put(door.address, DATA).ok
    assert door.files == {"dir/file": DATA}


@pytest.mark.parametrize("says", ["SIZE", "nothing"])
def test_ftp_stores_less(plugin, serve, says):
    """SIZE and MLST show it; a server that shows nothing is believed, as HTCondor's plugin believes it."""
    door = serve(World("put by ftp", True, scheme="ftp"))
    door.stores = lambda data: data[:-5]
    if says == "nothing":
        door.faults.update({f"{name} after": "550 No." for name in ("SIZE", "MLST", "HASH", "MDTM", "REST")})
    result = plugin.put(door.address, DATA, env=NO_RETRY)
    assert result.ok == (says == "nothing")
    if says == "SIZE":
        assert result.failures == [K.SIZE_MISMATCH]


def test_log_in_page_for_an_upload(plugin, serve):
    """200 with a page, and nothing stored: no success, although each answer is a 200."""
    page = lambda door, request, forward: Answer(200, [("Content-Type", "text/html")], b"<html>log in</html>")  # noqa: E731
    door = serve(PUT, **dict.fromkeys(("PUT", "HEAD", "HEAD with Want-*", "GET as a witness"), page))
    assert not plugin.put(door.address, DATA, env=NO_RETRY).ok
    assert door.files == {}


# ---- ranges and versions ---------------------------------------------------------------------------------------------


def _half(door, request, forward):
    answer = forward()
    answer.how = "half"
    return answer


@pytest.mark.parametrize("tag", [True, False], ids=["with its tag", "without a tag"])
def test_ignores_if_range(plugin, serve, tag):
    """The file is replaced while it is downloaded, and the server continues with the new one all the same."""

    def other_version(door, request, forward):
        door.files["dir/file"] = OTHER
        answer = forward()
        answer.headers = [pair for pair in answer.headers if tag or pair[0] not in ("ETag", "Last-Modified")]
        return answer

    door = serve(GET, GET=_half, GET_of_a_range=other_version)
    door.faults["GET with Want-*"] = _half
    door.most_fires = 2
    result = plugin.get(door.address)
    mixed = plugin.got() not in (DATA, OTHER) if result.ok else False
    if tag:
        assert result.ok
        assert plugin.got() == OTHER
    else:  # the rest cannot be told from that of the old version; the digest of the job's owner does
        assert mixed or not result.ok or plugin.got() == OTHER
        stated = {"PluginData": {"checksum": f"sha-256:{hashlib.sha256(DATA).hexdigest()}"}}
        door.files["dir/file"], door.fired = DATA, 0
        again = plugin.get(door.address, job=stated)
        assert not again.ok or plugin.got() == DATA


def test_range_of_another_place(plugin, serve):
    """206 with bytes from elsewhere than were asked for."""

    def elsewhere(door, request, forward):
        answer, start = forward(), 7
        end = start + len(answer.body)
        answer.headers = [pair for pair in answer.headers if pair[0] != "Content-Range"]
        answer.headers.append(("Content-Range", f"bytes {start}-{end - 1}/{len(DATA)}"))
        answer.body = DATA[start:end]
        return answer

    door = serve(GET, GET=_half, GET_of_a_range=elsewhere)
    door.faults["GET with Want-*"] = _half
    door.most_fires = 2
    assert plugin.get(door.address).ok
    assert plugin.got() == DATA


# ---- tags and digests ------------------------------------------------------------------------------------------------

_TAGS = {
    "KMS": [("x-amz-server-side-encryption", "aws:kms")],
    "two layers of KMS": [("x-amz-server-side-encryption", "aws:kms:dsse")],
    "a key of the owner": [("x-amz-server-side-encryption-customer-algorithm", "AES256")],
    "a bucket that does not tell": [("x-amz-request-id", "1")],
    "MinIO": [("Server", "MinIO")],
}


@pytest.mark.parametrize("move", ["get", "put"])
@pytest.mark.parametrize("kind", _TAGS)
def test_tag_that_is_no_digest(plugin, serve, kind, move):
    """Encrypted objects have tags of 32 hexadecimal digits that are the MD5 of something else."""

    def tagged(door, request, forward):
        answer = forward()
        answer.headers = [*_TAGS[kind], ("ETag", f'"{_MD5}"')]
        return answer

    names = ("GET", "GET with Want-*", "HEAD", "HEAD with Want-*", "PUT", "GET as a witness")
    door = serve(GET if move == "get" else PUT, **dict.fromkeys(names, tagged))
    result = plugin.get(door.address) if move == "get" else plugin.put(door.address, DATA)
    assert result.ok
    assert result.verified == "size"


def test_tag_that_is_a_digest(plugin, serve):
    """S3 says that it encrypted the object with its own key: then the tag is the MD5, and another one is a failure."""

    def tagged(door, request, forward):
        answer = forward()
        answer.headers = [("x-amz-server-side-encryption", "AES256"), ("ETag", f'"{_MD5}"')]
        return answer

    door = serve(GET, **dict.fromkeys(("GET", "GET with Want-*", "HEAD with Want-*", "HEAD"), tagged))
    assert plugin.get(door.address, env=NO_RETRY).failures == [K.CONTENT_MISMATCH]
    door.files["dir/file"] = OTHER
    result = plugin.get(door.address, env=NO_RETRY)
    assert result.ok
    assert result.verified == "md5"


def test_upload_states_its_own_digest(plugin, serve):
    """A digest of the answer itself to a PUT, not of the file."""

    def answered(door, request, forward):
        answer = forward()
        body = b"stored, thank you"
        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        headers = [("Content-MD5", digest), ("Content-Digest", f"md5=:{digest}:"), ("Repr-Digest", f"md5=:{digest}:")]
        return Answer(answer.status, [*answer.headers, *headers, ("Digest", f"md5={digest}")], body)

    result = plugin.put(serve(PUT, PUT=answered).address, DATA)
    assert result.ok
    assert result.verified == "size"


def test_headers_of_another_answer(plugin, serve):
    """A place that 303 names tells that the file is stored; its headers are about that page."""

    def elsewhere(door, request, forward):
        door.files["dir/file"] = request.body
        door.stored = True
        headers = [("Location", "/status"), ("x-amz-request-id", "1"), ("ETag", f'"{_MD5}"')]
        return Answer(303, [*headers, ("Digest", f"md5={_MD5}"), ("OC-Checksum", f"MD5:{_MD5}")])

    def status(door, request, forward):
        if request.path != "status":
            return forward()
        headers = [("ETag", f'"{_MD5}"'), ("x-amz-request-id", "1"), ("OC-Checksum", f"MD5:{_MD5}")]
        return Answer(200, [*headers, ("x-amz-server-side-encryption", "AES256")], b"it is stored")

    names = ("HEAD", "HEAD with Want-*", "HEAD before", "PUT elsewhere", "GET as a witness")
    door = serve(PUT, PUT=elsewhere, **dict.fromkeys(names, status))
    assert plugin.put(door.address, DATA).ok
    assert door.files["dir/file"] == DATA


def test_redirected_uploads(plugin, serve):
    """A door that sends uploads to a pool: what another place has is never taken for a confirmation of a wrong copy."""
    world = World("put, redirected", True, answer=redirecting)
    assert plugin.put(serve(world).address, DATA).ok
    door = serve(world, PUT_elsewhere=storing(DATA[:10]))
    result = plugin.put(door.address, DATA, env=NO_RETRY)
    assert not result.ok or not result.verified


# ---- loops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world", [PUT, DAV, World("put, redirected", True, answer=redirecting)], ids=["http", "dav", "redirected"]
)
def test_no_upload_without_end(plugin, serve, world):
    """A server that takes everything and shows nothing: a file is sent a few times, not a thousand times."""
    names = ("HEAD", "HEAD with Want-*", "PROPFIND", "GET as a witness", "PROPFIND of the directory", "MOVE")
    gone = lambda door, request, forward: Answer(404)  # noqa: E731
    door = serve(world, PUT=storing(b""), PUT_elsewhere=storing(b""), **dict.fromkeys(names, gone))
    plugin.put(door.address, DATA)
    assert door.taken_bytes <= 3 * len(DATA)
    assert len(door.requests) < 60


def test_many_files_at_one_bad_server(plugin, serve):
    """The plugin learns once which requests the server refuses, and asks less for the next files."""
    refused = lambda door, request, forward: Answer(405)  # noqa: E731
    door = serve(DAV, **dict.fromkeys(("HEAD with Want-*", "OPTIONS", "MOVE"), refused))
    plugin.new_scratch()
    names = [f"file{number}" for number in range(8)]
    for name in names:
        (plugin.scratch / name).write_bytes(DATA)
    wanted = [Wanted(door.address.replace("dir/file", f"dir/{name}"), name) for name in names]
    assert plugin.call(wanted, upload=True, env={"STAGEOUT_CONCURRENCY": "1"}).ok
    assert len(door.requests) <= 2 * len(names) + 3
    assert sum(request.method == "PUT" for request in door.requests) == len(names)


@pytest.mark.parametrize("code", [400, 403, 405, 500])
def test_server_that_refuses_the_wish_for_digests(plugin, serve, code):
    """The same question without the wish tells the size."""
    door = serve(PUT, **{"HEAD with Want-*": lambda door, request, forward: Answer(code)})
    result = plugin.put(door.address, DATA)
    assert result.ok
    assert result.verified == "size"


def test_piece_of_another_place(plugin, serve):
    """A download in parts: one of the pieces comes from elsewhere, with the same length and the same tag."""
    wrong = []

    def elsewhere(door, request, forward):
        first, _, last = request.headers["range"].partition("=")[2].partition("-")
        answer = forward()
        if int(first) and not wrong:
            wrong.append(first)
            place = int(first) - 5
            answer.headers = [pair for pair in answer.headers if pair[0] != "Content-Range"]
            answer.headers.append(("Content-Range", f"bytes {place}-{int(last) - 5}/{len(DATA)}"))
            answer.body = DATA[place : int(last) - 4]
        return answer

    door = serve(GET, GET_of_a_range=elsewhere)
    result = plugin.get(door.address, env={"STAGEOUT_PARALLELISM": "3", "STAGEOUT_SPLIT_BYTES": "2000"})
    assert wrong
    assert result.ok
    assert plugin.got() == DATA


def test_refusal_with_an_endless_page(plugin, serve):
    """The head of the answer says all."""
    endless = lambda door, request, forward: Answer(403, [], b"", how="endless")  # noqa: E731
    result = plugin.put(serve(PUT, PUT=endless).address, DATA, env=NO_RETRY)
    assert result.failures == [K.PERMISSION_DENIED]
    assert result.run.duration_s < 15


@pytest.mark.parametrize("end", ["an error", "another tag", "the right tag"])
def test_parts_that_cannot_be_put_together(plugin, serve, end):
    """S3 answers 200 before it knows: the body says that it failed, or the tag shows that other parts are in it."""
    tag = hashlib.md5(hashlib.md5(DATA if end == "the right tag" else OTHER).digest()).hexdigest()
    error = b"<Error><Code>InternalError</Code></Error>"
    done = error if end == "an error" else f'<R><ETag>"{tag}-1"</ETag></R>'.encode()

    def object_store(door, request):
        if request.method == "POST":
            begins = request.target.endswith("?uploads")
            return Answer(200, [], b"<R><UploadId>one</UploadId></R>" if begins else done)
        part = hashlib.md5(request.body).hexdigest()
        return Answer(200, [("ETag", f'"{part}"')]) if request.method == "PUT" else Answer(404)

    door = serve(World("put in parts", True, answer=object_store))
    env, job = {"STAGEOUT_SPLIT_BYTES": "1000", **NO_RETRY}, {"PluginData": {"s3_multipart": True}}
    assert plugin.put(door.address, DATA, env=env, job=job).ok == (end == "the right tag")
    assert "POST" in {request.method for request in door.requests}


def test_pieces_of_two_versions(plugin, serve):
    """A download in parts: the file is replaced in between, and the server ignores If-Range."""

    def replaced(door, request, forward):
        answer = forward()
        door.files["dir/file"] = OTHER
        return answer

    door = serve(GET, GET_of_a_range=replaced)
    door.most_fires = 1
    assert plugin.get(door.address, env={"STAGEOUT_PARALLELISM": "3", "STAGEOUT_SPLIT_BYTES": "2000"}).ok
    assert plugin.got() == OTHER
