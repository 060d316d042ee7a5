"""Signatures of operations: one use, one key, one text."""

from __future__ import annotations

import base64
import json

import jwt
import pytest

from stageout.core.signing import new_key
from stageout.overlay.http import signing
from stageout.overlay.http.signing import BadJws, sign, signer, thumbprint, verified

KEY, OTHER = new_key(), new_key()


def test_signed_and_verified() -> None:
    jws = sign(signing.OPERATION, b'{"a":1}', KEY)
    assert verified(signing.OPERATION, jws, KEY.public) == b'{"a":1}'
    assert signer(jws) == thumbprint(KEY.public) != thumbprint(OTHER.public)
    assert len(signing.digest(jws)) == 64


def test_the_vectors_of_rfc_8037() -> None:
    assert thumbprint("ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo") == (
        "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"
    )


def test_another_library_reads_it() -> None:
    jws = sign(signing.CANCEL, b'{"a":1}', KEY)
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": KEY.public.partition(":")[2]}
    assert jwt.PyJWS().decode(jws, jwt.PyJWK(jwk).key, algorithms=["EdDSA"]) == b'{"a":1}'


def test_a_put_is_no_cancel() -> None:
    with pytest.raises(BadJws, match="another use"):
        verified(signing.CANCEL, sign(signing.OPERATION, b"{}", KEY), KEY.public)


def test_another_key() -> None:
    with pytest.raises(BadJws, match="another key"):
        verified(signing.LOW, sign(signing.LOW, b"{}", KEY), OTHER.public)
    head, payload, _ = sign(signing.LOW, b"{}", KEY).split(".")
    forged = sign(signing.LOW, b"{}", OTHER).split(".")[2]
    with pytest.raises(BadJws, match="not that of its key"):
        verified(signing.LOW, f"{head}.{payload}.{forged}", KEY.public)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_malformed_ones() -> None:
    good = sign(signing.LOW, b"{}", KEY)
    head, payload, signature = good.split(".")
    facts = json.loads(base64.urlsafe_b64decode(head + "=="))
    heads = [
        {**facts, "alg": "none"}, {**facts, "alg": "HS256"}, {**facts, "crit": ["b64"]}, {**facts, "typ": "JWT"},
        {**facts, "kid": 5}, {**facts, "typ": ["x"]}, [], {**facts, "jwk": {}},
    ]  # fmt: skip
    wrong = [f"{_encoded(json.dumps(one).encode())}.{payload}.{signature}" for one in heads]
    wrong += [
        "",
        "a.b",
        f"{good}.",
        f"{head}.{payload}.",
        f"{head}.{payload}.{signature}=",
        f"{head}.{payload}+.{signature}",
    ]
    wrong += [f"{_encoded(b'[' * 50_000)}.{payload}.{signature}", "a" * 200_000, f"{head}.é.{signature}"]
    # two last bits that no byte uses
    wrong.append(good[:-1] + chr(ord(good[-1]) + 1))
    for one in wrong:
        with pytest.raises(BadJws):
            verified(signing.LOW, one, KEY.public)
