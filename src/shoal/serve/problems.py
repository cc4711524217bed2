"""Errors as RFC 9457 problem details: one sentence that says what would be right."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shoal.serve.batching import QueueFull
from shoal.serve.inputs import InvalidInput
from shoal.serve.model_version import NeedsPrivateState

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    def __init__(
        self, status: int, detail: str, field: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.field, self.headers = status, detail, field, dict(headers or {})

    def body(self) -> bytes:
        facts = {"type": "about:blank", "title": HTTPStatus(self.status).phrase, "status": self.status}
        facts["detail"] = self.detail
        if self.field is not None:
            facts["field"] = self.field
        return json.dumps(facts).encode()

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, MEDIA_TYPE)


class ProblemDetails(BaseModel):
    """The body of every answer that is an error."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Unprocessable Content",
                    "status": 422,
                    "detail": "rows[0][3] is nan; it must be a finite number, at most 1e+30",
                    "field": "rows",
                }
            ]
        }
    )

    type: str
    title: str
    status: int
    detail: str = Field(description="What is wrong, and what would be right.")
    field: str | None = Field(None, description="What it is about: a key of the body, or a parameter.")


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI description of a path."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Details"}}}
    return {s: {"description": HTTPStatus(s).phrase, "content": content} for s in statuses}


def retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def to_problem(error: Exception) -> Problem:
    match error:
        case Problem():
            return error
        case InvalidInput():
            return Problem(400 if error.is_malformed else 422, str(error), error.field)
        case NeedsPrivateState():
            return Problem(409, str(error), "client")
        case QueueFull():
            return Problem(503, "the queue is full: too many rows wait for an answer", headers=retry_after(1))
        case RequestValidationError():
            return _validation_problem(error)
        case HTTPException():
            return Problem(error.status_code, _detail(error), headers=error.headers)
    return Problem(500, "something is wrong in the service itself; its log says what")


def _detail(error: HTTPException) -> str:
    match error.status_code:
        case 404:
            return "there is nothing at this path; GET /openapi.json says what there is"
        case 405:
            allowed = (error.headers or {}).get("Allow") or "other methods"
            return f"this path does not take this method; it takes {allowed}"
    return str(error.detail)


def _validation_problem(error: RequestValidationError) -> Problem:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    field = ".".join(place[1:]) or place[0]
    message = str(first["msg"])
    if first["type"] == "json_invalid":
        return Problem(400, f"body: not JSON: {first.get('ctx', {}).get('error', message)}", "body")
    value = first.get("input")
    said = f" is {value!r}" if isinstance(value, str | int | float | bool) else ""
    return Problem(422, f"{field}{said[:100]}: {message[0].lower()}{message[1:]}", field)


def install_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return to_problem(error).response()

    for kind in (Problem, InvalidInput, NeedsPrivateState, QueueFull, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
