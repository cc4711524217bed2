"""Error responses of the service, as problem details of RFC 9457.

The detail of a problem says what is wrong and what would be right.
"""

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
    """An error response with its HTTP status."""

    def __init__(
        self, status: int, detail: str, field: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.field, self.headers = status, detail, field, dict(headers or {})

    def body(self) -> bytes:
        """Returns the JSON body."""
        facts = {"type": "about:blank", "title": HTTPStatus(self.status).phrase, "status": self.status}
        facts["detail"] = self.detail
        if self.field is not None:
            facts["field"] = self.field
        return json.dumps(facts).encode()

    def response(self) -> Response:
        """Returns the HTTP response."""
        return Response(self.body(), self.status, self.headers, MEDIA_TYPE)


class ProblemDetails(BaseModel):
    """The body of every error response."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "type": "about:blank",
                    "title": "Unprocessable Content",
                    "status": 422,
                    "detail": "samples[0][3] is nan. It must be a finite number of at most 1e+30.",
                    "field": "samples",
                }
            ]
        }
    )

    type: str = Field(description="This is always about:blank.")
    title: str = Field(description="This is the phrase of the HTTP status.")
    status: int = Field(description="This is the HTTP status.")
    detail: str = Field(description="This sentence says what is wrong and what would be right.")
    field: str | None = Field(None, description="This is the key of the body, the parameter or the header at fault.")


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the error responses of a path for its OpenAPI description."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    return {s: {"description": HTTPStatus(s).phrase, "content": content} for s in statuses}


def retry_after(seconds: float) -> dict[str, str]:
    """Returns the header that tells a caller to wait, for 1 s at least."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def to_problem(error: Exception) -> Problem:
    """Returns the error response for an exception."""
    match error:
        case Problem():
            return error
        case InvalidInput():
            return Problem(400 if error.is_malformed else 422, str(error), error.field)
        case NeedsPrivateState():
            return Problem(409, str(error), "client")
        case QueueFull():
            return Problem(
                503,
                "The queue is full because too many samples are waiting. Send the request again later.",
                headers=retry_after(1),
            )
        case RequestValidationError():
            return _validation_problem(error)
        case HTTPException():
            return Problem(error.status_code, _detail(error), headers=error.headers)
    return Problem(500, "The service has an internal error. Its log has the details.")


def _detail(error: HTTPException) -> str:
    match error.status_code:
        case 404:
            return "There is nothing at this path. GET /openapi.json lists the paths."
        case 405:
            allowed = (error.headers or {}).get("Allow") or "other methods"
            return f"This path does not support the method of the request. It supports {allowed}."
    return str(error.detail)


def _validation_problem(error: RequestValidationError) -> Problem:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    field = ".".join(location[1:]) or location[0]
    message = str(first["msg"])
    if first["type"] == "json_invalid":
        return Problem(400, f"body is not JSON: {first.get('ctx', {}).get('error', message)}", "body")
    value = first.get("input")
    value_text = f" is {value!r}" if isinstance(value, str | int | float | bool) else ""
    return Problem(422, f"{field}{value_text[:100]}: {message[0].lower()}{message[1:]}.", field)


def install_handlers(app: FastAPI) -> None:
    """Makes the application respond to every exception with a problem."""

    async def respond(request: Request, error: Exception) -> Response:
        return to_problem(error).response()

    for kind in (Problem, InvalidInput, NeedsPrivateState, QueueFull, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, respond)
