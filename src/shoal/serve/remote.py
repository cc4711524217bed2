"""The caller's side: asks the service, again if need be, and answers by itself while the service is away."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import torch
from safetensors import SafetensorError

from shoal.codec import unpack
from shoal.errors import UserError
from shoal.serve.blueprint import Blueprint
from shoal.serve.inputs import InvalidInput
from shoal.serve.predictions import ServedModels, compute_etag, predict_rows, response_rows
from shoal.store.atomic_files import write_bytes
from shoal.types import LABEL_COUNTS, Tree

RETRY_STATUSES = (429, 502, 503)
MAX_PAUSE_S = 5.0
OFFLINE_S, MAX_OFFLINE_S = 1.0, 60.0  # how long a service that is away is not asked: at first, and at most
RECONNECT_TIMEOUT_S = 1.0  # to be connected with a service that was away


class RequestRejected(UserError):
    """The service understood the request and says what is wrong with it."""


class ServiceUnavailable(UserError):
    """The service cannot be reached, and there is no model here to answer with."""


class UntrustedCertificate(UserError):
    """Whoever answers shows no certificate that is trusted here: being offline is no way round that."""


@dataclass(frozen=True)
class PredictResponse:
    predictions: list[dict[str, Any]]  # one for each row, as the service gives them
    round: int
    is_offline: bool = False  # whether the model that is kept here answered

    @property
    def labels(self) -> list[str | None]:
        return [answer["label"] for answer in self.predictions]


class Remote:
    """`cache` is a folder: the models that answer are kept in it, and fetched again when newer ones are served."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        client: str | None = None,
        cache: Path | str | None = None,
        retries: int = 4,
        pause_s: float = 0.1,
        refresh_s: float = 300.0,
        timeout_s: float = 10.0,
        verify: Any = True,
        trusts_user_code: bool = False,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, verify=verify, trust_env=False)
        self.client, self.retries, self.pause_s, self.refresh_s = client, retries, pause_s, refresh_s
        self.trusts_user_code, self._sleep, self._clock = trusts_user_code, sleep, clock
        self._reconnect_timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, RECONNECT_TIMEOUT_S))
        self._num_absences, self._retry_at_s = 0, 0.0
        name = sha256(f"{url} {client or ''}".encode()).hexdigest()[:16]
        self.cached_file = None if cache is None else Path(cache) / f"{name}.safetensors"
        self._refreshed_at_s: float | None = None
        self.label_counts: str | None = None  # how often classes occur here, as the service reads it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def predict(self, samples: Any, *, prepared: bool = False, abstain_below: float | None = None) -> PredictResponse:
        """Rows as numbers, one or many. While the service is away the kept models answer, and that is said.

        Where there are such, it is then asked once, not again and again, and only after a pause that doubles.
        """
        options = {"client": self.client, "abstain_below": abstain_below, "prepared": "true" if prepared else None}
        options["counts"] = self.label_counts
        parameters = {k: v for k, v in options.items() if v is not None}
        content, can_answer = _to_npy(samples), self.cached_file is not None and self.cached_file.exists()
        if can_answer and self._num_absences and self._clock() < self._retry_at_s:
            return self._predict_offline(samples, prepared, abstain_below or 0.0)
        retry_options: dict[str, Any] = (
            {"retries": 0, "timeout": self._reconnect_timeout} if can_answer and self._num_absences else {}
        )
        try:
            found = self._request(
                "POST",
                "/v1/predict",
                params=parameters,
                content=content,
                headers={"Content-Type": _NPY_TYPE},
                **retry_options,
            ).json()
        except ServiceUnavailable:
            if not can_answer:
                raise
            self._retry_at_s = self._clock() + min(OFFLINE_S * 2**self._num_absences, MAX_OFFLINE_S)
            self._num_absences += 1
            return self._predict_offline(samples, prepared, abstain_below or 0.0)
        if self.cached_file is not None and self._is_refresh_due():
            with suppress(
                ServiceUnavailable, RequestRejected
            ):  # the answer is here; newer models can be fetched after a later one
                self.refresh()
        return PredictResponse(found["answers"], found["round"])

    def estimate_prior(self, samples: Any, *, prepared: bool = False) -> dict[str, float] | None:
        """Has the service estimate from inputs without labels how often each class occurs here, which counts in all
        later predictions; None, and nothing counts, where they tell nothing that is sure enough."""
        parameters = {"prepared": "true"} if prepared else {}
        content, kind = _to_npy(samples), {"Content-Type": _NPY_TYPE}
        found = self._request("POST", "/v1/prior", params=parameters, content=content, headers=kind).json()
        self.label_counts = found["parameter"]
        counts: dict[str, float] | None = found["counts"]
        return counts

    def refresh(self) -> bool:
        """Fetches the models if newer ones are served than those that are kept; whether it did."""
        if self.cached_file is None:
            raise UserError("cache is None; give Remote a folder to keep models in")
        parameters = {} if self.client is None else {"client": self.client}
        headers = {"If-None-Match": compute_etag(self.cached_file.read_bytes())} if self.cached_file.exists() else {}
        self._refreshed_at_s = self._clock()
        answer = self._request("GET", "/v1/models/served", params=parameters, headers=headers)
        if answer.status_code == 304:
            return False
        self.cached_file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self.cached_file, answer.content)
        return True

    @property
    def _private_state(self) -> Tree:
        return (
            {}
            if self.label_counts is None
            else {LABEL_COUNTS: torch.tensor([float(n) for n in self.label_counts.split(",")])}
        )

    def _is_refresh_due(self) -> bool:
        return self._refreshed_at_s is None or self._clock() - self._refreshed_at_s >= self.refresh_s

    def _request(self, method: str, path: str, retries: int | None = None, **what: Any) -> httpx.Response:
        retries = self.retries if retries is None else retries
        for attempt in range(retries + 1):
            pause_s = self.pause_s * 2**attempt * random.uniform(0.5, 1.5)  # so that many callers do not return at once
            try:
                answer = self._http.request(method, path, **options)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                if (
                    "CERTIFICATE_VERIFY_FAILED" in reason
                ):  # somebody else's, perhaps: no reason to try again or go on alone
                    raise UntrustedCertificate(
                        f"the certificate of {self._http.base_url} cannot be trusted: {reason}"
                    ) from None
            else:
                if answer.status_code not in RETRY_STATUSES:
                    self._num_absences = 0
                    return _raise_for_problem(answer)
                reason = f"it answers {answer.status_code}"
                pause_s = max(pause_s, _parse_seconds(answer.headers.get("Retry-After", "0")))
            if attempt < retries:
                self._sleep(min(pause_s, MAX_PAUSE_S))
        raise ServiceUnavailable(f"{self._http.base_url} cannot be asked ({reason}), after {retries + 1} attempts")

    def _predict_offline(self, samples: Any, prepared: bool, abstain_below: float) -> PredictResponse:
        assert self.cached_file is not None
        try:
            models, facts = unpack(self.cached_file.read_bytes())
        except (SafetensorError, ValueError, KeyError):
            raise ServiceUnavailable(f"the service is away, and {self.cached_file} is damaged; remove it") from None
        blueprint = Blueprint.from_facts(facts, str(self.cached_file))
        if blueprint.user_code is not None and not self.trusts_user_code:
            raise UserError(
                f"{self.cached_file} is made for {blueprint.user_code!r}, code that the service names; give own_code=True if "
                "you trust it and have that code here"
            )
        try:
            x = blueprint.inputs.to_tensor(samples, prepared)
        except InvalidInput as error:
            raise RequestRejected(f"422: {error}") from None  # as the service would
        with torch.no_grad():
            predictions = predict_rows(blueprint.method, ServedModels(models, facts["expert"]), x, self._private_state)
        return PredictResponse(
            response_rows(predictions, blueprint.inputs.classes, abstain_below), facts["round"], is_offline=True
        )


_NPY_TYPE = "application/x-npy"


def _to_npy(samples: Any) -> bytes:
    found = np.asarray(samples)
    if found.dtype.kind not in "buif":
        raise UserError("rows: they must make up one array of numbers")
    stream = io.BytesIO()
    np.save(stream, found, allow_pickle=False)
    return stream.getvalue()


def _parse_seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0


def _raise_for_problem(answer: httpx.Response) -> httpx.Response:
    if answer.status_code < 400:
        return answer
    try:
        problem: Mapping[str, Any] = answer.json()
    except ValueError:
        problem = {}
    raise RequestRejected(f"{answer.status_code}: {problem.get('detail') or answer.reason_phrase}")
