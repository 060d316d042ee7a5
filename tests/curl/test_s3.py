"""Pre-signed URLs: one method, one object, one signature."""

from __future__ import annotations

import hashlib
import os

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
