"""FTP: to the final name, and the size is asked for."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.core.errors import TransferFailure
from stageout.protocols.curl.address import address_of
from stageout.protocols.curl.download import FtpDownload
from stageout.protocols.curl.transport import Reply
from tests.curl.plugin import NO_RETRY

DATA = os.urandom(100_000)
ALICE = "alice:wonder-land"


def names(ftp):
    return sorted(str(path.relative_to(ftp.root)) for path in ftp.root.rglob("*") if path.is_file())


@pytest.mark.parametrize("user", ["", ALICE])
@pytest.mark.parametrize("name", ["file", "a/b/file", "with blank", "ü", "100%", "a#b"])
def test_there_and_back(plugin, ftp, user, name):
    from urllib.parse import quote

    address = ftp.url(quote(name), user)
    result = plugin.put(address, DATA)
    assert result.ok
    assert result.verified == "size"
    assert names(ftp) == [name]
    assert (ftp.root / name).read_bytes() == DATA
    result = plugin.get(address)
    assert result.ok
    assert plugin.got() == DATA
    assert "wonder-land" not in result.everything


def test_replaces(plugin, ftp):
    (ftp.root / "file").write_bytes(b"older")
    assert plugin.put(ftp.url("file"), DATA).ok
    assert names(ftp) == ["file"]
    assert (ftp.root / "file").read_bytes() == DATA


def test_empty(plugin, ftp):
    assert plugin.put(ftp.url("file"), b"").ok
    assert plugin.get(ftp.url("file")).ok
    assert plugin.got() == b""


def test_wrong_password(plugin, ftp):
    for move in (plugin.get, plugin.put):
        result = move(ftp.url("file", "alice:wrong-pass"), env=NO_RETRY)
        assert result.failures == [K.CREDENTIAL_REFUSED]
        assert "wrong-pass" not in result.everything


@pytest.mark.parametrize(
    ("folder", "kind", "words"),
    [
        ("quota", K.QUOTA_EXCEEDED, "Quota exceeded"),
        ("nospace", K.NO_SPACE_REMOTE, "No space left"),
        ("never", K.PERMISSION_DENIED, "Name not allowed"),
    ],
)
def test_refused(plugin, ftp, folder, kind, words):
    (ftp.root / folder).mkdir()
    result = plugin.put(ftp.url(f"{folder}/file"), DATA, env=NO_RETRY)
    assert result.failures == [kind]
    assert words in result.ad["TransferError"], "the server's own words"
    assert names(ftp) == []


def test_missing(plugin, ftp):
    assert plugin.get(ftp.url("missing"), env=NO_RETRY).failures == [K.NOT_FOUND]
    assert plugin.get(ftp.url("a/b/missing"), env=NO_RETRY).kind in (K.NOT_FOUND, K.PERMISSION_DENIED)
    assert plugin.leftovers() == []


def test_line_break_in_a_name(plugin, ftp):
    """It would be a command of its own."""
    result = plugin.put(ftp.url("a%0d%0aDELE%20b"), DATA, env=NO_RETRY)
    assert result.failures == [K.BAD_REQUEST]
    assert names(ftp) == []
    assert plugin.get(ftp.url("a%0d%0aDELE%20b"), env=NO_RETRY).failures == [K.BAD_REQUEST]


def test_checksum_of_the_owner(plugin, ftp):
    import hashlib

    (ftp.root / "file").write_bytes(DATA)
    right = {"PluginData": {"checksum": "sha256:" + hashlib.sha256(DATA).hexdigest()}}
    wrong = {"PluginData": {"checksum": "sha256:" + hashlib.sha256(b"").hexdigest()}}
    assert plugin.get(ftp.url("file"), job=right).verified == "sha256"
    assert plugin.get(ftp.url("file"), job=wrong, env=NO_RETRY).failures == [K.CONTENT_MISMATCH]


def test_policy_required(plugin, ftp):
    result = plugin.put(ftp.url("file"), DATA, env={"STAGEOUT_CHECKSUM_POLICY": "required"})
    assert result.failures == [K.NOT_VERIFIED]


@pytest.mark.parametrize(("announced_bytes", "verified"), [(0, ""), (-1, ""), (3, "size"), (4, None)])
def test_a_size_of_0_with_data_is_no_announcement(tmp_path, announced_bytes, verified):
    """libcurl 7.76 (Enterprise Linux 9) makes 0 of an answer to SIZE that it cannot read; newer ones make -1."""

    def perform(query, context, settings, meter):
        reply = Reply(status=226, length_bytes=announced_bytes)
        query.receiver.begin(reply)
        query.receiver.write(b"abc")
        return reply

    task = SimpleNamespace(
        address=address_of("ftp://server/file"), path=tmp_path / "file", user_digests=dict, no_digests=True,
        digest_required=False, transport=SimpleNamespace(perform=perform), context=None, settings=None,
        progress=SimpleNamespace(begin=lambda: None, total_bytes=3),
    )  # fmt: skip
    download = FtpDownload(task)
    if verified is None:
        with pytest.raises(TransferFailure, match="announced 4 bytes and sent 3"):
            download.attempt()
    else:
        assert download.attempt().verified == verified
        assert (tmp_path / "file").read_bytes() == b"abc"
