"""The fetch of renewed credentials by a sandbox manager: one HTTPS request to the schedd agent's own port.

The agent makes a certificate for itself and says its SHA-256 in its notice; the manager talks to nobody else. The
request is signed with the manager's key, which the run's receipt names, and is about this certificate: nobody to whom
it is sent by mistake can use it. Credentials stand in the answer only.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Callable

PATH = "/stageout/1/credentials"
KIND = "StageOutRenewal"
MAX_ASKS = 100
MAX_REQUEST_BYTES = 256 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024


class BadRenewal(Exception):
    """A request or an answer that violates the protocol; the text has the problem."""


@dataclass(frozen=True)
class Ask:
    """Request for one credential.

    :param job: GlobalJobId. :param run_number: NumShadowStarts. :param ticket: of the hand-off with the credential.
    :param kind: "token" or "proxy". :param service: of a token. :param digest: SHA-256 of the manager's current one.
    """

    job: str
    run_number: int
    ticket: str
    kind: str
    service: str
    digest: str


@dataclass(frozen=True)
class Request:
    """A manager's request to an agent.

    :param certificate: SHA-256 of the certificate that it sees, hexadecimal.
    :param payload: text that ``signature`` covers.
    """

    manager: str
    agent: str
    certificate: str
    asks: tuple[Ask, ...]
    payload: str
    signature: str


@dataclass(frozen=True)
class Answer:
    """About one ask. :param content: the new credential, None without one; then ``reason`` says why."""

    content: bytes | None
    reason: str = ""


def request_bytes(
    manager: str, agent: str, certificate: str, asks: Sequence[Ask], sign: Callable[[str, str], str]
) -> bytes:
    """Encode the body of a request. :param sign: (kind, text) -> signature."""
    facts = {"manager": manager, "agent": agent, "certificate": certificate, "asks": [asdict(item) for item in asks]}
    payload = json.dumps(facts, separators=(",", ":"), sort_keys=True)
    return json.dumps({"payload": payload, "signature": sign(KIND, payload)}).encode("ascii")


def read_request(body: bytes) -> Request:
    """Parse a request without checking its signature. :raises BadRenewal: it is invalid."""
    outer = _object(body)
    payload, signature = outer.get("payload"), outer.get("signature")
    if not isinstance(payload, str) or not isinstance(signature, str):
        raise BadRenewal("a request has a payload and a signature")
    facts = _object(payload.encode("utf-8", "surrogatepass"))
    manager, agent, certificate = (str(facts.get(name, "")) for name in ("manager", "agent", "certificate"))
    rows = facts.get("asks")
    if not isinstance(rows, list) or len(rows) > MAX_ASKS:
        raise BadRenewal(f"a payload names manager, agent, certificate and at most {MAX_ASKS} asks")
    return Request(manager, agent, certificate, tuple(_ask(row) for row in rows), payload, signature)


def _ask(row: Any) -> Ask:
    try:
        made = Ask(**row)
    except TypeError as problem:
        raise BadRenewal(f"not an ask: {problem}") from None
    texts = (made.job, made.ticket, made.kind, made.service, made.digest)
    if not all(isinstance(text, str) for text in texts) or type(made.run_number) is not int:
        raise BadRenewal("not an ask: a value has the wrong type")
    return made


def answer_bytes(answers: Sequence[Answer]) -> bytes:
    """Encode the body of an answer."""
    rows = [
        {"content": None if item.content is None else base64.b64encode(item.content).decode(), "reason": item.reason}
        for item in answers
    ]
    return json.dumps({"answers": rows}).encode("ascii")


def read_answers(body: bytes, count: int) -> list[Answer]:
    """Parse an answer to a number of asks. :raises BadRenewal: it is invalid."""
    rows = _object(body).get("answers")
    if not isinstance(rows, list) or len(rows) != count:
        raise BadRenewal(f"an answer has {count} rows")
    return [_answer(row) for row in rows]


def _answer(row: Any) -> Answer:
    content, reason = (row.get("content"), row.get("reason")) if isinstance(row, dict) else (0, 0)
    if not isinstance(reason, str) or not (content is None or isinstance(content, str)):
        raise BadRenewal("a row of an answer has content and reason")
    try:
        return Answer(None if content is None else base64.b64decode(content, validate=True), reason)
    except ValueError:  # characters outside ASCII do not raise binascii.Error
        raise BadRenewal("a content is not base64") from None


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise BadRenewal(f"not JSON: {problem}") from None
    if not isinstance(found, dict):
        raise BadRenewal("not an object")
    return found
