"""The HTTP paths of the service.

`Service` has the models of a run, and `make_app` its paths. `server.py` runs the application on a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from torch import Tensor

from shoal import __version__
from shoal.codec import packed_bytes
from shoal.serve import schemas
from shoal.serve.assign import NoClusters, cluster_memberships
from shoal.serve.batching import Batcher, BatchOptions
from shoal.serve.blueprint import Blueprint, read_clients
from shoal.serve.inputs import IMAGES, Inputs, InvalidInput
from shoal.serve.model_version import SERVING_MODEL, ModelVersion, PredictRequest, PredictResult
from shoal.serve.predictions import compute_etag, response_rows
from shoal.serve.problems import Problem, error_responses, install_handlers, retry_after
from shoal.serve.prometheus import CONTENT_TYPE, Metrics
from shoal.serve.reload import CheckpointWatcher
from shoal.store.checkpoint import Checkpoints
from shoal.tree import leaves
from shoal.types import ServerState

log = logging.getLogger(__name__)

COMMON_STATUSES = (401, 413, 408, 429, 500)  # of the checks in admission.py, and of internal errors
OptionsModel = TypeVar("OptionsModel", bound=BaseModel)
ClientParameter = Annotated[str | None, Query(description=schemas.CLIENT_DESCRIPTION)]


@dataclass
class Service:
    """A run with its newest models and its queue of requests."""

    run_dir: Path
    batching: BatchOptions = field(default_factory=BatchOptions)
    abstain_below: float = 0.0
    poll_s: float = 1.0
    metrics: Metrics = field(default_factory=Metrics)
    version: ModelVersion | None = None

    def __post_init__(self) -> None:
        self.blueprint = Blueprint.from_run(self.run_dir)
        _ = self.blueprint.method  # a method or network that cannot be imported is refused at once
        self.clients, self.unseen_clients = read_clients(self.run_dir)
        self.watcher = CheckpointWatcher(Checkpoints(self.run_dir / "checkpoints"))
        self.batcher: Batcher | None = None

    def load_newer(self) -> bool:
        """Loads the newest checkpoint and returns whether it was newer. A running batch keeps its models."""
        return self.watcher.load_newer(self._replace_version)

    def _replace_version(self, state: ServerState) -> None:
        version = ModelVersion(self.blueprint, state)
        if self.version is not None:
            self.metrics.model_swaps.inc()
        self.version = version
        self.metrics.model_round.set(version.round)
        log.info("The service predicts with the models of round %d.", version.round)

    @property
    def current_version(self) -> ModelVersion:
        """The newest models. Raises `Problem` if the run has no finished round."""
        if self.version is None:
            raise Problem(
                503,
                "The run has no finished round yet. Send the request again later.",
                headers=retry_after(self.poll_s),
            )
        return self.version

    async def predict(self, request: PredictRequest) -> PredictResult:
        """Returns the result of a request, which waits for its batch."""
        assert self.batcher is not None, "the service is running"
        return await self.batcher.submit(request)

    def check_client(self, client: str | None) -> str | None:
        """Returns the client. Raises `Problem` if it has no serving model of its own."""
        if client in self.unseen_clients:
            raise Problem(
                422,
                f"client is {client!r}, which is an unseen client of this run. Leave client out to use the serving "
                "model of unseen clients.",
                "client",
            )
        if client is not None and client not in self.clients:
            raise Problem(
                422,
                f"client is {client!r}, which is not a client of this run. Leave client out to use the serving model "
                "of unseen clients.",
                "client",
            )
        return client

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self.poll_s)
            try:
                await asyncio.to_thread(self.load_newer)
            except Exception:  # a bad checkpoint must not end the polling
                log.exception("A newer checkpoint could not be loaded.")

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Loads the models and runs the queue while the application runs."""
        await asyncio.to_thread(self.load_newer)
        self.batcher = Batcher(lambda batch: self.current_version.predict_batch(batch), self.batching, self.metrics)
        tasks = [asyncio.create_task(self.batcher.run()), asyncio.create_task(self._poll())]
        yield
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.batcher.close()


def make_app(service: Service) -> FastAPI:
    """Returns the application of a service."""
    app = FastAPI(
        title="shoal",
        version=__version__,
        summary=f"Predictions for unseen clients, by the models of a {service.blueprint.job.method} run.",
        lifespan=service.lifespan,
        docs_url=None,  # its page loads scripts from another site
        redoc_url=None,
    )
    install_handlers(app)
    _add_predict_route(app, service)
    _add_prior_route(app, service)
    _add_assign_route(app, service)
    _add_model_routes(app, service)
    _add_health_routes(app, service)
    app.openapi = partial(_openapi, app, app.openapi)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if app.openapi_schema is None:
        from shoal.serve.problems import ProblemDetails

        description = original()
        component_schemas = description.setdefault("components", {}).setdefault("schemas", {})
        component_schemas["ProblemDetails"] = ProblemDetails.model_json_schema()
    return app.openapi_schema or {}


def _add_predict_route(app: FastAPI, service: Service) -> None:
    inputs = service.blueprint.inputs

    @app.post(
        "/v1/predict",
        response_model=schemas.Prediction,
        responses=error_responses(400, 409, 415, 422, 503, *COMMON_STATUSES),
        description=schemas.describe_request(inputs),
        openapi_extra=schemas.request_schema(inputs),
    )
    async def predict(request: Request) -> Response:
        options = _parse_options(request, schemas.PredictOptions)
        client, counts = service.check_client(options.client), _parse_label_counts(options.label_counts, service)
        service.current_version.served_models(client)  # refuses the request before it is queued
        x = await _read_inputs(request, inputs, options.prepared)
        round_index, predictions = await service.predict(PredictRequest(x, client, counts))
        below = service.abstain_below if options.abstain_below is None else options.abstain_below
        response = response_rows(predictions, inputs.classes, below)
        _count_predictions(response, service.metrics)
        return _json_response({"round": round_index, "predictions": response})


async def _read_inputs(request: Request, inputs: Inputs, prepared: bool) -> Tensor:
    body, media = await request.body(), request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media in ("application/json", ""):
        return inputs.to_tensor(_parse_json_samples(body), prepared)
    if media == schemas.NPY_TYPE:
        return inputs.to_tensor(inputs.read_npy(body), prepared)
    if media in IMAGES:
        return inputs.to_tensor(inputs.read_image(body, media))
    allowed = ", ".join(schemas.media_types(inputs))
    raise Problem(415, f"The content type is {media[:100]!r}. It must be one of {allowed}.", "Content-Type")


def _parse_label_counts(text: str | None, service: Service) -> tuple[float, ...] | None:
    if text is None:
        return None
    _refuse_without_prior(service)
    counts, classes = tuple(map(float, text.split(","))), len(service.blueprint.inputs.classes)
    if len(counts) != classes:
        raise Problem(
            422, f"label_counts has {len(counts)} numbers. It must have {classes}, one for each class.", "label_counts"
        )
    return counts


def _refuse_without_prior(service: Service) -> None:
    if service.blueprint.method.adaptation_program is None:
        name = service.blueprint.method.name
        raise Problem(409, f"method is {name}, which has no prior correction, so the service cannot use label counts.")


def _add_prior_route(app: FastAPI, service: Service) -> None:
    inputs = service.blueprint.inputs

    @app.post(
        "/v1/prior",
        response_model=schemas.ClassPrior,
        responses=error_responses(400, 409, 415, 422, 503, *COMMON_STATUSES),
        openapi_extra=schemas.request_schema(inputs, schemas.PriorOptions),
    )
    async def prior(request: Request) -> schemas.ClassPrior:
        """Estimates the class prior of an unseen client from inputs without labels."""
        options, version = _parse_options(request, schemas.PriorOptions), service.current_version
        _refuse_without_prior(service)
        x = await _read_inputs(request, inputs, options.prepared)
        estimate = await asyncio.to_thread(version.estimate_prior, x)
        if estimate is None:
            return schemas.ClassPrior(round=version.round, num_inputs=len(x), label_counts=None, label_counts_text=None)
        counts = [round(n, 6) for n in estimate.tolist()]
        counts_by_class = dict(zip(inputs.classes, counts, strict=True))
        text = ",".join(f"{n:.6f}" for n in counts)
        return schemas.ClassPrior(
            round=version.round, num_inputs=len(x), label_counts=counts_by_class, label_counts_text=text
        )


def _parse_options(request: Request, options: type[OptionsModel]) -> OptionsModel:
    """Returns the parsed query parameters.

    Pydantic parses them alone, because FastAPI takes a quarter of a request's time for three parameters.
    """
    try:
        return options.model_validate(dict(request.query_params))
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(options.model_fields)
            raise Problem(
                422, f"The parameter {field[:100]!r} is unknown. It must be one of {allowed}.", field[:100]
            ) from None
        detail = f"{field} is {str(first['input'])[:100]!r}: {first['msg'][0].lower()}{first['msg'][1:]}."
        raise Problem(422, detail, field) from None


def _parse_json_samples(body: bytes) -> Any:
    try:
        content = from_json(body)
    except ValueError as error:
        raise InvalidInput("body", f"body is not JSON: {error}", is_malformed=True) from None
    if not isinstance(content, dict) or set(content) != {"samples"}:
        raise InvalidInput(
            "body", 'body must be an object with the one key "samples", such as {"samples": [[0, 1], [2, 3]]}.'
        )
    # NumPy would give every number the width of the longest text, so texts are refused before it sees them.
    if body.count(b'"') > 2:
        raise InvalidInput("samples", "samples has a value that is not a number. All values must be numbers.")
    if b"true" in body or b"false" in body:  # numpy would convert them to 1 and 0
        raise InvalidInput("samples", "samples has true or false. All values must be numbers, such as 1 and 0.")
    return content["samples"]


def _count_predictions(predictions: list[dict[str, Any]], metrics: Metrics) -> None:
    for prediction in predictions:
        metrics.predicted_samples.labels(prediction["expert"] or "").inc()
        if prediction["abstained"]:
            metrics.abstained_samples.inc()


def _json_response(value: Any) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


def _add_assign_route(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/clusters/assign",
        response_model=schemas.Memberships,
        responses=error_responses(400, 409, 422, 503, *COMMON_STATUSES),
    )
    async def assign(body: schemas.Representation) -> schemas.Memberships:
        """Assigns a client to clusters by the representation that it has computed."""
        version = service.current_version
        try:
            memberships = cluster_memberships(version.method, version.state, body.representation)
        except NoClusters as error:
            raise Problem(409, str(error)) from None
        nearest = max(memberships, key=lambda name: memberships[name])
        return schemas.Memberships(round=version.round, nearest=nearest, memberships=memberships)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    unchanged: dict[int | str, dict[str, Any]] = {
        304: {"description": "The content has not changed since the ETag in If-None-Match."},
    }

    @app.get("/v1/models", response_model=schemas.Models, responses=unchanged | error_responses(503, *COMMON_STATUSES))
    @app.head("/v1/models", include_in_schema=False)
    async def models(request: Request) -> Response:
        """Lists the downloads: all serving models of unseen clients together, and every model alone."""
        version, blueprint = service.current_version, service.blueprint
        facts = [
            schemas.ModelFacts(
                id=name,
                num_parameters=sum(x.numel() for x in leaves(version.models(name))),
                num_bytes=packed_bytes(version.models(name), version.facts(name)),
            )
            for name in version.model_names
        ]
        models_list = schemas.Models(
            round=version.round,
            method=blueprint.job.method,
            model=blueprint.job.model,
            input_shape=list(blueprint.inputs.shape),
            columns=None if blueprint.inputs.columns is None else list(blueprint.inputs.columns),
            classes=list(blueprint.inputs.classes),
            models=facts,
        )
        data = models_list.model_dump_json().encode()
        return _etag_response(request, data, compute_etag(data), version.round, "application/json")

    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": "The model is a safetensors file.", "content": content},
        **unchanged,
    }

    @app.get(
        "/v1/models/{id}",
        response_class=Response,
        responses=responses | error_responses(404, 409, 422, 503, *COMMON_STATUSES),
    )
    @app.head("/v1/models/{id}", include_in_schema=False)
    async def model(id: str, request: Request, client: ClientParameter = None) -> Response:
        """Downloads a model as a safetensors file with an ETag.

        The name `served` stands for all models that predict for an unseen client, or for the client in `client`.
        """
        version, client = service.current_version, service.check_client(client)
        if id not in version.model_names:
            raise Problem(
                404,
                f"id is {id[:100]!r}, which is not a model. It must be one of {', '.join(version.model_names)}.",
                "id",
            )
        if client is not None and id != SERVING_MODEL:
            raise Problem(
                404,
                f"id is {id}, which is the same model for all clients. Leave client out, or download {SERVING_MODEL}.",
                "id",
            )
        version.served_models(client)
        data, etag = await asyncio.to_thread(version.packed_file, id, client)
        return _etag_response(request, data, etag, version.round, "application/octet-stream")


def _etag_response(request: Request, data: bytes, etag: str, round_index: int, media: str) -> Response:
    """Returns the data, or status 304 if the caller already has them."""
    headers = {"ETag": etag, "Cache-Control": "no-cache", "Shoal-Round": str(round_index)}
    known_etags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if etag in known_etags or "*" in known_etags:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=media)


def _add_health_routes(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", response_model=schemas.Health, responses=error_responses(*COMMON_STATUSES))
    async def healthz() -> schemas.Health:
        """Returns that the process runs, even if it has no models yet."""
        return schemas.Health(status="ok", round=service.version.round if service.version else None)

    @app.get("/readyz", response_model=schemas.Health, responses=error_responses(503, *COMMON_STATUSES))
    async def readyz() -> schemas.Health:
        """Returns whether the service has models to predict with."""
        return schemas.Health(status="ready", round=service.current_version.round)

    @app.get(
        "/metrics",
        response_class=Response,
        responses=error_responses(*COMMON_STATUSES)
        | {200: {"description": "The metrics in the text format of Prometheus.", "content": {"text/plain": {}}}},
    )
    async def metrics() -> Response:
        """Returns the metrics of the service for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)
