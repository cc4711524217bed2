"""`Remote` sends requests to a prediction service.

It repeats a request that failed, and predicts with cached models while the service is unavailable.
"""

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
OFFLINE_S, MAX_OFFLINE_S = (
    1.0,
    60.0,
)  # pause before the next request to an unavailable service: the first one, and the longest one
RECONNECT_TIMEOUT_S = 1.0  # for a connection to a service that was unavailable


class RequestRejected(UserError):
    """The service rejected the request. The message says what is wrong with it."""


class ServiceUnavailable(UserError):
    """The service cannot be reached, and there is no cached model to predict with."""


class UntrustedCertificate(UserError):
    """The certificate of the server is not trusted. Cached models are not used in this case."""


@dataclass(frozen=True)
class PredictResponse:
    """The predictions of some samples.

    Attributes
    ----------
    predictions : list of dict
        One entry per sample, with the keys of the response of the service.
    round : int
        The models that predicted were saved after this training round.
    is_offline : bool
        Whether cached models predicted because the service was unavailable.
    """

    predictions: list[dict[str, Any]]
    round: int
    is_offline: bool = False

    @property
    def labels(self) -> list[str | None]:
        """The label of each sample, or None if the service abstained."""
        return [prediction["label"] for prediction in self.predictions]


class Remote:
    """A connection to a prediction service.

    Parameters
    ----------
    url : str
        The address of the service, such as http://127.0.0.1:8000.
    token : str or None
        The token of the caller, if the service requires one.
    client : str or None
        The client of the run whose serving model predicts. None stands for the serving model of unseen clients.
    cache : Path or str or None
        A folder for the serving models, which predict while the service is unavailable. None caches no models.
    retries : int
        How often a request that failed is repeated.
    pause_s : float
        The pause in seconds before the first repetition. It doubles with each one.
    refresh_s : float
        After this many seconds a prediction also downloads newer models to the cache.
    timeout_s : float
        The limit in seconds of one attempt.
    verify : bool or ssl.SSLContext
        How the certificate of the service is verified, as in httpx.
    trusts_user_code : bool
        Whether cached models may import a method or network of a user that the service names.
    sleep : callable
        Waits for a number of seconds.
    clock : callable
        Returns the time in seconds.
    """

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
        self.label_counts: str | None = None  # of the caller, as the service reads them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def predict(self, samples: Any, *, prepared: bool = False, abstain_below: float | None = None) -> PredictResponse:
        """Predict one or several samples.

        While the service is unavailable, cached models predict, if there are any. The service then receives a single
        request after each pause, and the pauses double.

        Parameters
        ----------
        samples : array_like
            The numbers of one sample or of several.
        prepared : bool
            Whether the values are already prepared like the training data.
        abstain_below : float or None
            Below this confidence a sample gets no label. None stands for the threshold of the service.

        Returns
        -------
        PredictResponse
            The predictions, and whether cached models made them.

        Raises
        ------
        RequestRejected
            If the service or the cached models reject the samples.
        ServiceUnavailable
            If the service cannot be reached and there are no cached models.
        UntrustedCertificate
            If the certificate of the service is not trusted.
        """
        options = {"client": self.client, "abstain_below": abstain_below, "prepared": "true" if prepared else None}
        options["label_counts"] = self.label_counts
        parameters = {k: v for k, v in options.items() if v is not None}
        content, has_models = _to_npy(samples), self.cached_file is not None and self.cached_file.exists()
        if has_models and self._num_absences and self._clock() < self._retry_at_s:
            return self._predict_offline(samples, prepared, abstain_below or 0.0)
        retry_options: dict[str, Any] = (
            {"retries": 0, "timeout": self._reconnect_timeout} if has_models and self._num_absences else {}
        )
        try:
            response = self._request(
                "POST",
                "/v1/predict",
                params=parameters,
                content=content,
                headers={"Content-Type": _NPY_TYPE},
                **retry_options,
            ).json()
        except ServiceUnavailable:
            if not has_models:
                raise
            self._retry_at_s = self._clock() + min(OFFLINE_S * 2**self._num_absences, MAX_OFFLINE_S)
            self._num_absences += 1
            return self._predict_offline(samples, prepared, abstain_below or 0.0)
        if self.cached_file is not None and self._is_refresh_due():
            with suppress(ServiceUnavailable, RequestRejected):  # a later prediction can download newer models
                self.refresh()
        return PredictResponse(response["predictions"], response["round"])

    def estimate_prior(self, samples: Any, *, prepared: bool = False) -> dict[str, float] | None:
        """Estimate the class prior of the caller, which then corrects all later predictions.

        Parameters
        ----------
        samples : array_like
            Inputs of the caller, without labels.
        prepared : bool
            Whether the values are already prepared like the training data.

        Returns
        -------
        dict or None
            The estimated number of inputs of each class. None if the estimate is not reliable enough; later predictions
            are then not corrected.
        """
        parameters = {"prepared": "true"} if prepared else {}
        content, kind = _to_npy(samples), {"Content-Type": _NPY_TYPE}
        response = self._request("POST", "/v1/prior", params=parameters, content=content, headers=kind).json()
        self.label_counts = response["label_counts_text"]
        counts: dict[str, float] | None = response["label_counts"]
        return counts

    def refresh(self) -> bool:
        """Download the serving models if they are newer than the cached ones, and return whether they were."""
        if self.cached_file is None:
            raise UserError("cache is None. Give Remote a folder for cached models.")
        parameters = {} if self.client is None else {"client": self.client}
        headers = {"If-None-Match": compute_etag(self.cached_file.read_bytes())} if self.cached_file.exists() else {}
        self._refreshed_at_s = self._clock()
        response = self._request("GET", "/v1/models/served", params=parameters, headers=headers)
        if response.status_code == 304:
            return False
        self.cached_file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self.cached_file, response.content)
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

    def _request(self, method: str, path: str, retries: int | None = None, **options: Any) -> httpx.Response:
        retries = self.retries if retries is None else retries
        for attempt in range(retries + 1):
            pause_s = (
                self.pause_s * 2**attempt * random.uniform(0.5, 1.5)
            )  # random, so that callers do not all return at the same time
            try:
                response = self._http.request(method, path, **options)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                if "CERTIFICATE_VERIFY_FAILED" in reason:  # it may be another server, so neither retry nor go offline
                    raise UntrustedCertificate(
                        f"The certificate of {self._http.base_url} is not trusted: {reason}"
                    ) from None
            else:
                if response.status_code not in RETRY_STATUSES:
                    self._num_absences = 0
                    return _raise_for_problem(response)
                reason = f"status {response.status_code}"
                pause_s = max(pause_s, _parse_seconds(response.headers.get("Retry-After", "0")))
            if attempt < retries:
                self._sleep(min(pause_s, MAX_PAUSE_S))
        raise ServiceUnavailable(f"{self._http.base_url} is unavailable after {retries + 1} attempts ({reason}).")

    def _predict_offline(self, samples: Any, prepared: bool, abstain_below: float) -> PredictResponse:
        assert self.cached_file is not None
        try:
            models, facts = unpack(self.cached_file.read_bytes())
        except (SafetensorError, ValueError, KeyError):
            raise ServiceUnavailable(
                f"The service is unavailable, and {self.cached_file} is damaged. Remove it."
            ) from None
        blueprint = Blueprint.from_facts(facts, str(self.cached_file))
        if blueprint.user_code is not None and not self.trusts_user_code:
            raise UserError(
                f"{self.cached_file} needs {blueprint.user_code!r}, which is code that the service names. Give "
                "trusts_user_code=True if you trust it and have that code on this machine."
            )
        try:
            x = blueprint.inputs.to_tensor(samples, prepared)
        except InvalidInput as error:
            raise RequestRejected(f"422: {error}") from None  # as the service would respond
        with torch.no_grad():
            predictions = predict_rows(blueprint.method, ServedModels(models, facts["expert"]), x, self._private_state)
        return PredictResponse(
            response_rows(predictions, blueprint.inputs.classes, abstain_below), facts["round"], is_offline=True
        )


_NPY_TYPE = "application/x-npy"


def _to_npy(samples: Any) -> bytes:
    array = np.asarray(samples)
    if array.dtype.kind not in "buif":
        raise UserError("samples must be one array of numbers.")
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def _parse_seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0


def _raise_for_problem(response: httpx.Response) -> httpx.Response:
    if response.status_code < 400:
        return response
    try:
        problem: Mapping[str, Any] = response.json()
    except ValueError:
        problem = {}
    raise RequestRejected(f"{response.status_code}: {problem.get('detail') or response.reason_phrase}")
