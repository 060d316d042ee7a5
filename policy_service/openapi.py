"""The description of the interface (OpenAPI 3.1), made from the table of operations that also makes the routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from policy_service.operations import Operation
from stageout import __version__

_INTEGERS = {
    "streams": "streams that may be used",
    "in_use": "streams last reported as used",
    "wanted": "streams wanted",
}
_NUMBERS = {"ends_in_s": "s until the lease ends", "renew_in_s": "s after which to renew"}
_STRINGS = {
    "lease": "its name in paths",
    "client": "as requested",
    "source": "in lower case",
    "destination": "in lower case",
    "reason": "one sentence for people",
}
_MEMBERS = {
    name: {"type": kind, "description": doc}
    for kind, members in (("string", _STRINGS), ("integer", _INTEGERS), ("number", _NUMBERS))
    for name, doc in members.items()
}
_LEASE = {"type": "object", "properties": _MEMBERS, "required": list(_MEMBERS)}
_LEASES = {
    "type": "object",
    "properties": {"leases": {"type": "array", "items": {"$ref": "#/components/schemas/Lease"}}},
    "required": ["leases"],
}
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_ANSWERS: dict[str, dict[str, Any]] = {
    "lease": {"application/json": {"schema": {"$ref": "#/components/schemas/Lease"}}},
    "leases": {"application/json": {"schema": _LEASES}},
    "description": {"application/json": {"schema": {"type": "object"}}},
    "text": {"text/plain": {"schema": {"type": "string"}}},
    "html": {"text/html": {"schema": {"type": "string"}}},
    "nothing": {},
}
_FAILURES = {
    "400": "the body is not what is described here",
    "401": "no token, or an unknown one",
    "404": "no such lease of this owner: stop using its streams",
    "409": "more in use than was granted",
    "429": "too many leases",
    "503": "the service cannot record the grant",
}


def description(operations: Iterable[Operation]) -> dict[str, Any]:
    """The whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "stageout policy service",
            "version": __version__,
            "description": "Streams between a source and a destination, granted as leases.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Lease": _LEASE, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    status = "204" if operation.answer == "nothing" else "201" if operation.name == "request" else "200"
    success: dict[str, Any] = {"description": "done"}
    if _ANSWERS[operation.answer]:
        success["content"] = _ANSWERS[operation.answer]
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {status: success, **_failures(operation)},
        "security": [] if operation.open_to_all else [{"token": []}],
    }
    names = re.findall(r"{(\w+)}", operation.path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body:
        found["requestBody"] = _body(operation)
    return found


def _body(operation: Operation) -> dict[str, Any]:
    required = [field.name for field in operation.body if field.required]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {field.name: field.schema() for field in operation.body},
        "additionalProperties": False,
    }
    if required:
        schema["required"] = required
    return {"required": bool(required), "content": {"application/json": {"schema": schema}}}


def _failures(operation: Operation) -> dict[str, Any]:
    if operation.open_to_all:
        return {}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": content} for status, text in _FAILURES.items()}
