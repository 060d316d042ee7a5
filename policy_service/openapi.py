"""The description of the interface (OpenAPI 3.1), made from the same table of operations as the routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from policy_service.bodies import Body, Failure
from policy_service.operations import Operation
from stageout import __version__

_REFERENCE = "#/components/schemas/{model}"
_FAILURES = {
    "400": "the body is not what is described here",
    "401": "no token, or an unknown one",
    "404": "no such lease of this owner: stop using its streams",
    "409": "more in use than was granted",
    "429": "too many leases",
    "503": "the service cannot record the grant",
}


def description(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the whole document."""
    table = list(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in table:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    used = {item for one in table for item in (one.body, one.answer) if isinstance(item, type)} - {Body} | {Failure}
    models = sorted(used, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "stageout policy service",
            "version": __version__,
            "description": "Streams between a source and a destination, granted as leases.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {str(operation.status): _success(operation), **_failures(operation)},
        "security": [] if operation.open_to_all else [{"token": []}],
    }
    names = re.findall(r"{(\w+)}", operation.path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.body is not Body:
        needed = any(field.is_required() for field in operation.body.model_fields.values())
        found["requestBody"] = {"required": needed, "content": _content(operation.body)}
    return found


def _success(operation: Operation) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        return {"description": "done", **({"content": {operation.answer: {}}} if operation.answer else {})}
    return {"description": "done", "content": _content(operation.answer)}


def _failures(operation: Operation) -> dict[str, Any]:
    if operation.open_to_all:
        return {}
    return {status: {"description": text, "content": _content(Failure)} for status, text in _FAILURES.items()}


def _content(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
