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
from shoal.serve.inputs import Unfit
from shoal.serve.predictions import Lot, answered, etag_of, rows_of
from shoal.store.atomic_files import write_bytes
from shoal.types import LABEL_COUNTS, Tree

AGAIN = (429, 502, 503)
LONGEST_PAUSE_S = 5.0
ABSENCE_S, LONGEST_ABSENCE_S = 1.0, 60.0  # how long a service that is away is not asked: at first, and at most
QUICK_S = 1.0  # to be connected with a service that was away


class Refused(UserError):
    """The service understood the request and says what is wrong with it."""


class Away(UserError):
    """The service cannot be reached, and there is no model here to answer with."""


class Untrusted(UserError):
    """Whoever answers shows no certificate that is trusted here: being offline is no way round that."""


@dataclass(frozen=True)
class Predicted:
    answers: list[dict[str, Any]]  # one for each row, as the service gives them
    round: int
    offline: bool = False  # whether the model that is kept here answered

    @property
    def labels(self) -> list[str | None]:
        return [answer["label"] for answer in self.answers]


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
        own_code: bool = False,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, verify=verify, trust_env=False)
        self.client, self.retries, self.pause_s, self.refresh_s = client, retries, pause_s, refresh_s
        self.own_code, self._sleep, self._clock = own_code, sleep, clock
        self._quick = httpx.Timeout(timeout_s, connect=min(timeout_s, QUICK_S))
        self._absences, self._ask_after = 0, 0.0
        name = sha256(f"{url} {client or ''}".encode()).hexdigest()[:16]
        self.kept = None if cache is None else Path(cache) / f"{name}.safetensors"
        self._refreshed: float | None = None
        self.counts: str | None = None  # how often classes occur here, as the service reads it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def predict(self, rows: Any, *, prepared: bool = False, abstain_below: float | None = None) -> Predicted:
        """Rows as numbers, one or many. While the service is away the kept models answer, and that is said.

        Where there are such, it is then asked once, not again and again, and only after a pause that doubles.
        """
        given = {"client": self.client, "abstain_below": abstain_below, "prepared": "true" if prepared else None}
        given["counts"] = self.counts
        parameters = {k: v for k, v in given.items() if v is not None}
        content, can_answer = _npy(rows), self.kept is not None and self.kept.exists()
        if can_answer and self._absences and self._clock() < self._ask_after:
            return self._alone(rows, prepared, abstain_below or 0.0)
        once: dict[str, Any] = {"retries": 0, "timeout": self._quick} if can_answer and self._absences else {}
        try:
            found = self._ask(
                "POST", "/v1/predict", params=parameters, content=content, headers={"Content-Type": _NPY}, **once
            ).json()
        except Away:
            if not can_answer:
                raise
            self._ask_after = self._clock() + min(ABSENCE_S * 2**self._absences, LONGEST_ABSENCE_S)
            self._absences += 1
            return self._alone(rows, prepared, abstain_below or 0.0)
        if self.kept is not None and self._due():
            with suppress(Away, Refused):  # the answer is here; newer models can be fetched after a later one
                self.refresh()
        return Predicted(found["answers"], found["round"])

    def learn(self, rows: Any, *, prepared: bool = False) -> dict[str, float] | None:
        """Has the service estimate from inputs without labels how often each class occurs here, which counts in all
        later predictions; None, and nothing counts, where they tell nothing that is sure enough."""
        parameters = {"prepared": "true"} if prepared else {}
        content, kind = _npy(rows), {"Content-Type": _NPY}
        found = self._ask("POST", "/v1/prior", params=parameters, content=content, headers=kind).json()
        self.counts = found["parameter"]
        counts: dict[str, float] | None = found["counts"]
        return counts

    def refresh(self) -> bool:
        """Fetches the models if newer ones are served than those that are kept; whether it did."""
        if self.kept is None:
            raise UserError("cache is None; give Remote a folder to keep models in")
        parameters = {} if self.client is None else {"client": self.client}
        held = {"If-None-Match": etag_of(self.kept.read_bytes())} if self.kept.exists() else {}
        self._refreshed = self._clock()
        answer = self._ask("GET", "/v1/models/served", params=parameters, headers=held)
        if answer.status_code == 304:
            return False
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(self.kept, answer.content)
        return True

    @property
    def _private(self) -> Tree:
        return {} if self.counts is None else {LABEL_COUNTS: torch.tensor([float(n) for n in self.counts.split(",")])}

    def _due(self) -> bool:
        return self._refreshed is None or self._clock() - self._refreshed >= self.refresh_s

    def _ask(self, method: str, path: str, retries: int | None = None, **what: Any) -> httpx.Response:
        retries = self.retries if retries is None else retries
        for turn in range(retries + 1):
            pause_s = self.pause_s * 2**turn * random.uniform(0.5, 1.5)  # so that many callers do not return at once
            try:
                answer = self._http.request(method, path, **what)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                if (
                    "CERTIFICATE_VERIFY_FAILED" in reason
                ):  # somebody else's, perhaps: no reason to try again or go on alone
                    raise Untrusted(f"the certificate of {self._http.base_url} cannot be trusted: {reason}") from None
            else:
                if answer.status_code not in AGAIN:
                    self._absences = 0
                    return _checked(answer)
                reason = f"it answers {answer.status_code}"
                pause_s = max(pause_s, _seconds(answer.headers.get("Retry-After", "0")))
            if turn < retries:
                self._sleep(min(pause_s, LONGEST_PAUSE_S))
        raise Away(f"{self._http.base_url} cannot be asked ({reason}), after {retries + 1} attempts")

    def _alone(self, rows: Any, prepared: bool, below: float) -> Predicted:
        assert self.kept is not None
        try:
            models, facts = unpack(self.kept.read_bytes())
        except (SafetensorError, ValueError, KeyError):
            raise Away(f"the service is away, and {self.kept} is damaged; remove it") from None
        blueprint = Blueprint.read(facts, str(self.kept))
        if blueprint.own_code is not None and not self.own_code:
            raise UserError(
                f"{self.kept} is made for {blueprint.own_code!r}, code that the service names; give own_code=True if "
                "you trust it and have that code here"
            )
        try:
            x = blueprint.inputs.tensor(rows, prepared)
        except Unfit as error:
            raise Refused(f"422: {error}") from None  # as the service would
        with torch.no_grad():
            said = answered(blueprint.method, Lot(models, facts["expert"]), x, self._private)
        return Predicted(rows_of(said, blueprint.inputs.classes, below), facts["round"], offline=True)


_NPY = "application/x-npy"


def _npy(rows: Any) -> bytes:
    found = np.asarray(rows)
    if found.dtype.kind not in "buif":
        raise UserError("rows: they must make up one array of numbers")
    stream = io.BytesIO()
    np.save(stream, found, allow_pickle=False)
    return stream.getvalue()


def _seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.status_code < 400:
        return answer
    try:
        problem: Mapping[str, Any] = answer.json()
    except ValueError:
        problem = {}
    raise Refused(f"{answer.status_code}: {problem.get('detail') or answer.reason_phrase}")
