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
from shoal.serve.assign import NoClusters, memberships
from shoal.serve.batching import Batcher, Batching
from shoal.serve.blueprint import Blueprint, clients_of
from shoal.serve.inputs import IMAGES, Inputs, Unfit
from shoal.serve.model_version import SERVED, Asked, Told, Version
from shoal.serve.predictions import etag_of, rows_of
from shoal.serve.problems import Problem, described, install, retry_after
from shoal.serve.prometheus import CONTENT_TYPE, Metrics
from shoal.serve.reload import Watch
from shoal.store.checkpoint import Checkpoints
from shoal.tree import leaves
from shoal.types import ServerState

log = logging.getLogger(__name__)

ALWAYS = (401, 413, 408, 429, 500)  # what the gate, or a fault of ours, may answer on any path
Options = TypeVar("Options", bound=BaseModel)
Client = Annotated[str | None, Query(description=schemas.OF_CLIENT)]


@dataclass
class Service:
    """A run, the newest of its models, and those who wait for their answers."""

    run: Path
    batching: Batching = field(default_factory=Batching)
    abstain_below: float = 0.0
    poll_s: float = 1.0
    metrics: Metrics = field(default_factory=Metrics)
    version: Version | None = None

    def __post_init__(self) -> None:
        self.blueprint = Blueprint.of_run(self.run)
        _ = (
            self.blueprint.method
        )  # what cannot be rebuilt here, such as a class that is not at hand, is refused at once
        self.clients, self.held_out = clients_of(self.run)
        self.watch = Watch(Checkpoints(self.run / "checkpoints"))
        self.batcher: Batcher | None = None

    def look(self) -> bool:
        """Whether there was a newer checkpoint. Passes that are under way end with the models they began with."""
        return self.watch.newer(self._take_up)

    def _take_up(self, state: ServerState) -> None:
        version = Version(self.blueprint, state)
        if self.version is not None:
            self.metrics.swaps.inc()
        self.version = version
        self.metrics.round.set(version.round)
        log.info("serving the models of round %d", version.round)

    @property
    def now(self) -> Version:
        if self.version is None:
            raise Problem(503, "the run has no finished round yet", headers=retry_after(self.poll_s))
        return self.version

    async def answer(self, asked: Asked) -> Told:
        assert self.batcher is not None, "the service is running"
        return await self.batcher.ask(asked)

    def known(self, client: str | None) -> str | None:
        if client in self.held_out:
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
                await asyncio.to_thread(self.look)
            except Exception:  # an odd checkpoint must not end the watch over the next ones
                log.exception("a newer checkpoint could not be taken up")

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(self.look)
        self.batcher = Batcher(lambda asked: self.now.answer(asked), self.batching, self.metrics)
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
        lifespan=service.running,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    install(app)
    _predict(app, service)
    _prior(app, service)
    _assign(app, service)
    _models(app, service)
    _health(app, service)
    app.openapi = partial(_described, app, app.openapi)  # type: ignore[method-assign]
    return app


def _described(app: FastAPI, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if app.openapi_schema is None:
        from shoal.serve.problems import Details

        found = original()
        schemas_of = found.setdefault("components", {}).setdefault("schemas", {})
        schemas_of["Details"] = Details.model_json_schema()
    return app.openapi_schema or {}


def _predict(app: FastAPI, service: Service) -> None:
    inputs = service.blueprint.inputs

    @app.post(
        "/v1/predict",
        response_model=schemas.Prediction,
        responses=described(400, 409, 415, 422, 503, *ALWAYS),
        description=schemas.asking(inputs),
        openapi_extra=schemas.predicting(inputs),
    )
    async def predict(request: Request) -> Response:
        options = _options_of(request, schemas.Options)
        client, counts = service.known(options.client), _counts_of(options.counts, service)
        service.now.lot(client)  # refused before anything is queued
        x = await _inputs_of(request, inputs, options.prepared)
        round, said = await service.answer(Asked(x, client, counts))
        below = service.abstain_below if options.abstain_below is None else options.abstain_below
        answers = rows_of(said, inputs.classes, below)
        _counted(answers, service.metrics)
        return _json({"round": round, "answers": answers})


async def _inputs_of(request: Request, inputs: Inputs, prepared: bool) -> Tensor:
    body, media = await request.body(), request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media in ("application/json", ""):
        return inputs.tensor(_rows_of(body), prepared)
    if media == schemas.NPY:
        return inputs.tensor(inputs.from_npy(body), prepared)
    if media in IMAGES:
        return inputs.tensor(inputs.from_image(body, media))
    known = ", ".join(schemas.bodies(inputs))
    raise Problem(415, f"the content type is {media[:100]!r}; it must be one of {known}", "Content-Type")


def _counts_of(text: str | None, service: Service) -> tuple[float, ...] | None:
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


def _prior(app: FastAPI, service: Service) -> None:
    inputs = service.blueprint.inputs

    @app.post(
        "/v1/prior",
        response_model=schemas.Prior,
        responses=described(400, 409, 415, 422, 503, *ALWAYS),
        openapi_extra=schemas.predicting(inputs, schemas.Estimating),
    )
    async def prior(request: Request) -> schemas.Prior:
        """How often each class occurs with somebody who never trained, estimated from inputs without labels."""
        options, version = _options_of(request, schemas.Estimating), service.now
        _refuse_without_prior(service)
        x = await _inputs_of(request, inputs, options.prepared)
        found = await asyncio.to_thread(version.prior, x)
        if found is None:
            return schemas.Prior(round=version.round, inputs=len(x), counts=None, parameter=None)
        counts = [round(n, 6) for n in found.tolist()]
        named = dict(zip(inputs.classes, counts, strict=True))
        text = ",".join(f"{n:.6f}" for n in counts)
        return schemas.Prior(round=version.round, inputs=len(x), counts=named, parameter=text)


def _options_of(request: Request, options: type[Options]) -> Options:
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


def _rows_of(body: bytes) -> Any:
    try:
        found = from_json(body)
    except ValueError as error:
        raise Unfit("body", f"body: not JSON: {error}", malformed=True) from None
    if not isinstance(found, dict) or set(found) != {"rows"}:
        raise Unfit("body", 'body: it must be an object with the one key "rows", such as {"rows": [[0, 1], [2, 3]]}')
    if b"true" in body or b"false" in body:  # numpy would take them for 1 and 0; there is no other place for them
        raise Unfit("rows", "rows: true and false are no numbers; all values must be numbers, such as 1 and 0")
    return found["rows"]


def _counted(answers: list[dict[str, Any]], metrics: Metrics) -> None:
    for answer in answers:
        metrics.rows.labels(answer["expert"] or "").inc()
        if answer["abstained"]:
            metrics.abstained.inc()


def _json(value: Any) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")


def _assign(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/clusters/assign",
        response_model=schemas.Memberships,
        responses=described(400, 409, 422, 503, *ALWAYS),
    )
    async def assign(body: schemas.Representation) -> schemas.Memberships:
        """The clusters that somebody belongs to who tells this of itself."""
        version = service.now
        try:
            found = memberships(version.method, version.state, body.representation)
        except NoClusters as error:
            raise Problem(409, str(error)) from None
        nearest = max(found, key=lambda name: found[name])
        return schemas.Memberships(round=version.round, nearest=nearest, memberships=found)


def _models(app: FastAPI, service: Service) -> None:
    unchanged: dict[int | str, dict[str, Any]] = {
        304: {"description": "Not Modified: the caller has it already, by its If-None-Match"},
    }

    @app.get("/v1/models", response_model=schemas.Models, responses=unchanged | described(503, *ALWAYS))
    @app.head("/v1/models", include_in_schema=False)
    async def models(request: Request) -> Response:
        """What can be fetched: what a client that never trained is served, and every model by itself."""
        version, blueprint = service.now, service.blueprint
        facts = [
            schemas.ModelFacts(
                id=name,
                parameters=sum(x.numel() for x in leaves(version.models(name))),
                bytes=packed_bytes(version.models(name), version.facts(name)),
            )
            for name in version.ids
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
        return _tagged(request, data, etag_of(data), version.round, "application/json")

    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    found: dict[int | str, dict[str, Any]] = {
        200: {"description": "A safetensors file", "content": content},
        **unchanged,
    }

    @app.get(
        "/v1/models/{id}",
        response_class=Response,
        responses=found | described(404, 409, 422, 503, *ALWAYS),
    )
    @app.head("/v1/models/{id}", include_in_schema=False)
    async def model(id: str, request: Request, client: Client = None) -> Response:
        """A model as safetensors, with an ETag; `served` is all that answers, and a client's own with ?client=."""
        version, client = service.now, service.known(client)
        if id not in version.ids:
            raise Problem(404, f"there is no model {id[:100]!r}; it must be one of {', '.join(version.ids)}", "id")
        if client is not None and id != SERVED:
            raise Problem(404, f"model {id} is the same for everybody: leave client out, or ask for {SERVED}", "id")
        version.lot(client)
        data, etag = await asyncio.to_thread(version.file, id, client)
        return _tagged(request, data, etag, version.round, "application/octet-stream")


def _tagged(request: Request, data: bytes, etag: str, round: int, media: str) -> Response:
    """The data, unless the caller has them already."""
    headers = {"ETag": etag, "Cache-Control": "no-cache", "Shoal-Round": str(round)}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=media)


def _health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", response_model=schemas.Health, responses=described(*ALWAYS))
    async def healthz() -> schemas.Health:
        """The process is alive."""
        return schemas.Health(status="ok", round=service.version.round if service.version else None)

    @app.get("/readyz", response_model=schemas.Health, responses=described(503, *ALWAYS))
    async def readyz() -> schemas.Health:
        """There are models to answer with."""
        return schemas.Health(status="ready", round=service.now.round)

    @app.get(
        "/metrics",
        response_class=Response,
        responses=described(*ALWAYS) | {200: {"description": "For Prometheus", "content": {"text/plain": {}}}},
    )
    async def metrics() -> Response:
        """What is counted, for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)
