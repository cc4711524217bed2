"""The paths of the service."""

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

COMMON_STATUSES = (401, 413, 408, 429, 500)  # what the gate, or a fault of ours, may answer on any path
OptionsModel = TypeVar("Options", bound=BaseModel)
ClientParameter = Annotated[str | None, Query(description=schemas.CLIENT_DESCRIPTION)]


@dataclass
class Service:
    """A run, the newest of its models, and those who wait for their answers."""

    run_dir: Path
    batching: BatchOptions = field(default_factory=BatchOptions)
    abstain_below: float = 0.0
    poll_s: float = 1.0
    metrics: Metrics = field(default_factory=Metrics)
    version: ModelVersion | None = None

    def __post_init__(self) -> None:
        self.blueprint = Blueprint.from_run(self.run_dir)
        _ = (
            self.blueprint.method
        )  # what cannot be rebuilt here, such as a class that is not at hand, is refused at once
        self.clients, self.unseen_clients = read_clients(self.run_dir)
        self.watcher = CheckpointWatcher(Checkpoints(self.run_dir / "checkpoints"))
        self.batcher: Batcher | None = None

    def load_newer(self) -> bool:
        """Whether there was a newer checkpoint. Passes that are under way end with the models they began with."""
        return self.watcher.load_newer(self._replace_version)

    def _replace_version(self, state: ServerState) -> None:
        version = ModelVersion(self.blueprint, state)
        if self.version is not None:
            self.metrics.model_swaps.inc()
        self.version = version
        self.metrics.model_round.set(version.round)
        log.info("serving the models of round %d", version.round)

    @property
    def current_version(self) -> ModelVersion:
        if self.version is None:
            raise Problem(503, "the run has no finished round yet", headers=retry_after(self.poll_s))
        return self.version

    async def predict(self, request: PredictRequest) -> PredictResult:
        assert self.batcher is not None, "the service is running"
        return await self.batcher.submit(request)

    def check_client(self, client: str | None) -> str | None:
        if client in self.unseen_clients:
            raise Problem(
                422,
                f"client is {client!r}, which was held out and never trained, so it has no model of its own; leave "
                "client out to be served as anybody who never trained",
                "client",
            )
        if client is not None and client not in self.clients:
            raise Problem(422, f"client is {client!r}, which is no client of this run; leave it out", "client")
        return client

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self.poll_s)
            try:
                await asyncio.to_thread(self.load_newer)
            except Exception:  # an odd checkpoint must not end the watch over the next ones
                log.exception("a newer checkpoint could not be taken up")

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(self.load_newer)
        self.batcher = Batcher(lambda asked: self.current_version.predict_batch(asked), self.batching, self.metrics)
        tasks = [asyncio.create_task(self.batcher.run()), asyncio.create_task(self._poll())]
        yield
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.batcher.close()


def make_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="shoal",
        version=__version__,
        summary=f"Predictions of a {service.blueprint.job.method} run for clients that never trained.",
        lifespan=service.lifespan,
        docs_url=None,  # its page loads scripts from elsewhere
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

        found = original()
        schemas_of = found.setdefault("components", {}).setdefault("schemas", {})
        schemas_of["Details"] = ProblemDetails.model_json_schema()
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
        service.current_version.served_models(client)  # refused before anything is queued
        x = await _read_inputs(request, inputs, options.prepared)
        round_index, predictions = await service.predict(PredictRequest(x, client, counts))
        below = service.abstain_below if options.abstain_below is None else options.abstain_below
        response = response_rows(predictions, inputs.classes, below)
        _count_predictions(response, service.metrics)
        return _json_response({"round": round_index, "answers": response})


async def _read_inputs(request: Request, inputs: Inputs, prepared: bool) -> Tensor:
    body, media = await request.body(), request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media in ("application/json", ""):
        return inputs.to_tensor(_parse_json_samples(body), prepared)
    if media == schemas.NPY_TYPE:
        return inputs.to_tensor(inputs.read_npy(body), prepared)
    if media in IMAGES:
        return inputs.to_tensor(inputs.read_image(body, media))
    known = ", ".join(schemas.media_types(inputs))
    raise Problem(415, f"the content type is {media[:100]!r}; it must be one of {known}", "Content-Type")


def _parse_label_counts(text: str | None, service: Service) -> tuple[float, ...] | None:
    if text is None:
        return None
    _refuse_without_prior(service)
    counts, classes = tuple(map(float, text.split(","))), len(service.blueprint.inputs.classes)
    if len(counts) != classes:
        raise Problem(422, f"counts: {len(counts)} numbers, but there are {classes} classes: one for each", "counts")
    return counts


def _refuse_without_prior(service: Service) -> None:
    if service.blueprint.method.adaptation_program is None:
        name = service.blueprint.method.name
        raise Problem(409, f"method {name} makes nothing of how often classes occur with a client")


def _add_prior_route(app: FastAPI, service: Service) -> None:
    inputs = service.blueprint.inputs

    @app.post(
        "/v1/prior",
        response_model=schemas.ClassPrior,
        responses=error_responses(400, 409, 415, 422, 503, *COMMON_STATUSES),
        openapi_extra=schemas.request_schema(inputs, schemas.PriorOptions),
    )
    async def prior(request: Request) -> schemas.ClassPrior:
        """How often each class occurs with somebody who never trained, estimated from inputs without labels."""
        options, version = _parse_options(request, schemas.PriorOptions), service.current_version
        _refuse_without_prior(service)
        x = await _read_inputs(request, inputs, options.prepared)
        found = await asyncio.to_thread(version.estimate_prior, x)
        if found is None:
            return schemas.ClassPrior(round=version.round, num_inputs=len(x), label_counts=None, label_counts_text=None)
        counts = [round(n, 6) for n in found.tolist()]
        named = dict(zip(inputs.classes, counts, strict=True))
        text = ",".join(f"{n:.6f}" for n in counts)
        return schemas.ClassPrior(round=version.round, num_inputs=len(x), label_counts=named, label_counts_text=text)


def _parse_options(request: Request, options: type[OptionsModel]) -> OptionsModel:
    """By pydantic alone: FastAPI takes a quarter of a request's time for three parameters."""
    try:
        return options.model_validate(dict(request.query_params))
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            known = ", ".join(options.model_fields)
            raise Problem(
                422, f"parameter {field[:100]!r} is not known; it must be one of {known}", field[:100]
            ) from None
        said = f"{field} is {str(first['input'])[:100]!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
        raise Problem(422, said, field) from None


def _parse_json_samples(body: bytes) -> Any:
    try:
        found = from_json(body)
    except ValueError as error:
        raise InvalidInput("body", f"body: not JSON: {error}", is_malformed=True) from None
    if not isinstance(found, dict) or set(found) != {"rows"}:
        raise InvalidInput(
            "body", 'body: it must be an object with the one key "rows", such as {"rows": [[0, 1], [2, 3]]}'
        )
    if b"true" in body or b"false" in body:  # numpy would take them for 1 and 0; there is no other place for them
        raise InvalidInput("rows", "rows: true and false are no numbers; all values must be numbers, such as 1 and 0")
    return found["rows"]


def _count_predictions(predictions: list[dict[str, Any]], metrics: Metrics) -> None:
    for answer in predictions:
        metrics.predicted_samples.labels(answer["expert"] or "").inc()
        if answer["abstained"]:
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
        """The clusters that somebody belongs to who tells this of itself."""
        version = service.current_version
        try:
            found = cluster_memberships(version.method, version.state, body.representation)
        except NoClusters as error:
            raise Problem(409, str(error)) from None
        nearest = max(found, key=lambda name: found[name])
        return schemas.Memberships(round=version.round, nearest=nearest, memberships=found)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    unchanged: dict[int | str, dict[str, Any]] = {
        304: {"description": "Not Modified: the caller has it already, by its If-None-Match"},
    }

    @app.get("/v1/models", response_model=schemas.Models, responses=unchanged | error_responses(503, *COMMON_STATUSES))
    @app.head("/v1/models", include_in_schema=False)
    async def models(request: Request) -> Response:
        """What can be fetched: what a client that never trained is served, and every model by itself."""
        version, blueprint = service.current_version, service.blueprint
        facts = [
            schemas.ModelFacts(
                id=name,
                num_parameters=sum(x.numel() for x in leaves(version.models(name))),
                num_bytes=packed_bytes(version.models(name), version.facts(name)),
            )
            for name in version.model_names
        ]
        listed = schemas.Models(
            round=version.round,
            method=blueprint.job.method,
            model=blueprint.job.model,
            input_shape=list(blueprint.inputs.shape),
            columns=None if blueprint.inputs.columns is None else list(blueprint.inputs.columns),
            classes=list(blueprint.inputs.classes),
            models=facts,
        )
        data = listed.model_dump_json().encode()
        return _etag_response(request, data, compute_etag(data), version.round, "application/json")

    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    found: dict[int | str, dict[str, Any]] = {
        200: {"description": "A safetensors file", "content": content},
        **unchanged,
    }

    @app.get(
        "/v1/models/{id}",
        response_class=Response,
        responses=found | error_responses(404, 409, 422, 503, *COMMON_STATUSES),
    )
    @app.head("/v1/models/{id}", include_in_schema=False)
    async def model(id: str, request: Request, client: ClientParameter = None) -> Response:
        """A model as safetensors, with an ETag; `served` is all that answers, and a client's own with ?client=."""
        version, client = service.current_version, service.check_client(client)
        if id not in version.model_names:
            raise Problem(
                404, f"there is no model {id[:100]!r}; it must be one of {', '.join(version.model_names)}", "id"
            )
        if client is not None and id != SERVING_MODEL:
            raise Problem(
                404, f"model {id} is the same for everybody: leave client out, or ask for {SERVING_MODEL}", "id"
            )
        version.served_models(client)
        data, etag = await asyncio.to_thread(version.packed_file, id, client)
        return _etag_response(request, data, etag, version.round, "application/octet-stream")


def _etag_response(request: Request, data: bytes, etag: str, round_index: int, media: str) -> Response:
    """The data, unless the caller has them already."""
    headers = {"ETag": etag, "Cache-Control": "no-cache", "Shoal-Round": str(round_index)}
    known_etags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if etag in known_etags or "*" in known_etags:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=media)


def _add_health_routes(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", response_model=schemas.Health, responses=error_responses(*COMMON_STATUSES))
    async def healthz() -> schemas.Health:
        """The process is alive."""
        return schemas.Health(status="ok", round=service.version.round if service.version else None)

    @app.get("/readyz", response_model=schemas.Health, responses=error_responses(503, *COMMON_STATUSES))
    async def readyz() -> schemas.Health:
        """There are models to answer with."""
        return schemas.Health(status="ready", round=service.current_version.round)

    @app.get(
        "/metrics",
        response_class=Response,
        responses=error_responses(*COMMON_STATUSES)
        | {200: {"description": "For Prometheus", "content": {"text/plain": {}}}},
    )
    async def metrics() -> Response:
        """What is counted, for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)
