"""Pre-signed URLs: one method, one object, one signature."""

from __future__ import annotations

import hashlib
import os

import pytest

from stageout.core.errors import ErrorClass as K
from tests.curl.plugin import NO_RETRY

DATA = os.urandom(200_000)


def test_there_and_back(plugin, s3):
    result = plugin.put(s3.signed("PUT", "a/key with blank"), DATA)
    assert result.ok
    assert result.verified == "md5"
    assert s3.content("a/key with blank") == DATA
    result = plugin.get(s3.signed("GET", "a/key with blank"))
    assert result.ok
    assert result.verified == "md5"
    assert plugin.got() == DATA
    assert "X-Amz-Signature" not in result.everything


def test_object_of_several_parts(plugin, s3):
    """Its ETag is the MD5 of MD5s: no digest of the file, so only the size is verified."""
    key, size = "parts", 5 * 1024 * 1024
    parts = [os.urandom(size), DATA]
    upload = s3.client.create_multipart_upload(Bucket="bucket", Key=key)["UploadId"]
    tags = []
    for number, part in enumerate(parts, 1):
        answer = s3.client.upload_part(Bucket="bucket", Key=key, UploadId=upload, PartNumber=number, Body=part)
        tags.append({"PartNumber": number, "ETag": answer["ETag"]})
    s3.client.complete_multipart_upload(Bucket="bucket", Key=key, UploadId=upload, MultipartUpload={"Parts": tags})
    result = plugin.get(s3.signed("GET", key))
    assert result.ok
    assert result.verified == "size"
    assert plugin.got() == b"".join(parts)
    required = plugin.get(s3.signed("GET", key), env={"STAGEOUT_CHECKSUM_POLICY": "required"})
    assert required.failures == [K.NOT_VERIFIED]
    stated = {"checksum": "sha256:" + hashlib.sha256(b"".join(parts)).hexdigest()}
    assert plugin.get(s3.signed("GET", key), job={"PluginData": stated}).verified == "sha256"


def test_object_that_says_its_sha256(plugin, s3):
    s3.client.put_object(Bucket="bucket", Key="sum", Body=DATA, ChecksumAlgorithm="SHA256")
    result = plugin.get(s3.signed("GET", "sum"))
    assert result.ok
    assert result.verified in ("md5", "sha256")


def test_missing(plugin, s3):
    result = plugin.get(s3.signed("GET", "missing"), env=NO_RETRY)
    assert result.failures == [K.NOT_FOUND]


def test_signature_past_its_end(plugin, s3, door):
    """Asked after its time the server says 403, and the URL itself tells why."""
    from tests.curl.interposer import status

    door.always("PUT", status(403))
    query = "X-Amz-Date=20200101T000000Z&X-Amz-Expires=60&X-Amz-Signature=00"
    result = plugin.put(door.url(f"object?{query}"), DATA, env=NO_RETRY)
    assert result.failures == [K.CREDENTIAL_EXPIRED]


def test_empty_object(plugin, s3):
    assert plugin.put(s3.signed("PUT", "empty"), b"").ok
    assert s3.content("empty") == b""


MIB = 1 << 20
BIG = os.urandom(MIB) * 17 + b"end"


def signed_parts(s3, key, count, part_bytes):
    """PluginData with a URL for each request, as an owner makes it before the job."""
    upload = s3.client.create_multipart_upload(Bucket="bucket", Key=key)["UploadId"]

    def url(operation, **more):
        params = {"Bucket": "bucket", "Key": key, "UploadId": upload, **more}
        return s3.client.generate_presigned_url(operation, Params=params)

    urls = [url("upload_part", PartNumber=number) for number in range(1, count + 1)]
    ends = {"complete": url("complete_multipart_upload"), "abort": url("abort_multipart_upload")}
    return {"PluginData": {"s3_parts": {"part_bytes": part_bytes, "urls": urls, **ends}}}


@pytest.mark.parametrize("streams", ["1", "4"])
def test_signed_parts(plugin, s3, streams):
    job = signed_parts(s3, f"signed{streams}", 4, 5 * MIB)
    result = plugin.put(s3.signed("PUT", f"signed{streams}"), BIG, job=job, env={"STAGEOUT_PARALLELISM": streams})
    assert result.ok, result.everything
    assert s3.content(f"signed{streams}") == BIG
    assert result.verified == "size"  # the object's tag is the digest of the parts' digests
    assert "X-Amz-Signature" not in result.everything


def test_too_few_signed_parts(plugin, s3):
    result = plugin.put(s3.signed("PUT", "few"), BIG, job=signed_parts(s3, "few", 2, 5 * MIB), env=NO_RETRY)
    assert result.kind is K.BAD_REQUEST
    result = plugin.put(s3.signed("PUT", "few"), BIG, job={"PluginData": {"s3_parts": {"urls": []}}}, env=NO_RETRY)
    assert result.kind is K.BAD_REQUEST


def test_parts_at_a_server_that_needs_no_signature(plugin, s3):
    url = f"http://127.0.0.1:{s3.port}/bucket/open"
    env = {"STAGEOUT_PARALLELISM": "3", "STAGEOUT_SPLIT_BYTES": str(MIB)}
    result = plugin.put(url, BIG, job={"PluginData": {"s3_multipart": True}}, env=env)
    assert result.ok, result.everything
    assert s3.content("open") == BIG
    assert s3.client.head_object(Bucket="bucket", Key="open")["ETag"].endswith('-3"')
    assert s3.client.list_multipart_uploads(Bucket="bucket", Prefix="open").get("Uploads", []) == []
    assert plugin.put(url, DATA, job={"PluginData": {"s3_multipart": True}}).ok
    assert "-" not in s3.client.head_object(Bucket="bucket", Key="open")["ETag"]  # short: in one piece


def test_only_the_part_that_broke_is_sent_again(plugin, s3):
    from tests.curl.interposer import Interposer, changed, status

    door = Interposer(s3.port)
    door.next("PUT", changed(), status(503))
    url = door.url("bucket/again")
    result = plugin.put(url, BIG, job={"PluginData": {"s3_multipart": True}}, env={"STAGEOUT_SPLIT_BYTES": str(MIB)})
    asked = [one.path.partition("?")[2].partition("&")[0] for one in door.asked if one.method == "PUT"]
    door.close()
    assert result.ok, result.everything
    assert asked == ["partNumber=1", "partNumber=2", "partNumber=2", "partNumber=3"]
    assert s3.content("again") == BIG


def test_parts_are_forgotten_after_a_failure(plugin, s3):
    from tests.curl.interposer import Interposer, status

    door = Interposer(s3.port)
    door.always("PUT", status(403))
    job = {"PluginData": {"s3_multipart": True}}
    result = plugin.put(door.url("bucket/never"), BIG, job=job, env={"STAGEOUT_SPLIT_BYTES": str(MIB), **NO_RETRY})
    door.close()
    assert result.kind is K.PERMISSION_DENIED
    assert s3.client.list_multipart_uploads(Bucket="bucket", Prefix="never").get("Uploads", []) == []
