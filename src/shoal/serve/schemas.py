"""The service's words, for its OpenAPI description: made for one run, whose inputs and classes they name."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shoal.serve.inputs import IMAGES, MAX_SAMPLES, MAX_VALUE, Inputs

NPY_TYPE = "application/x-npy"
NUMBER_LIST = r"^[0-9]{1,9}(\.[0-9]{1,9})?(,[0-9]{1,9}(\.[0-9]{1,9})?)*$"
CLIENT_DESCRIPTION = "A client of the run: it is served the model of its cluster."


class PredictOptions(BaseModel):
    """What may stand behind the question mark of a prediction."""

    model_config = ConfigDict(extra="forbid")

    client: str | None = Field(None, description=CLIENT_DESCRIPTION)
    prepared: bool = Field(False, description="Values are prepared already, as the training data were.")
    abstain_below: float | None = Field(None, ge=0, le=1, description="No label for rows of less confidence.")
    label_counts: str | None = Field(
        None,
        pattern=NUMBER_LIST,
        description="How often each class occurs with whoever asks, in the order of classes: as /v1/prior gives it.",
        examples=["12,0,3.5"],
    )


class PriorOptions(BaseModel):
    """What may stand behind the question mark of an estimate."""

    model_config = ConfigDict(extra="forbid")

    prepared: bool = Field(False, description="Values are prepared already, as the training data were.")


class RowPrediction(BaseModel):
    label: str | None = Field(description="The class that is most likely; null where the service abstains.")
    abstained: bool
    confidence: float = Field(description="The largest of the probabilities.")
    probabilities: dict[str, float] = Field(description="By class.")
    expert: str | None = Field(description="Which model answered; null where the method has one for all.")
    routing_confidence: float | None = Field(
        description="How sure the rule was that chose it; null where the method has no such rule."
    )


class Prediction(BaseModel):
    round: int = Field(description="Of the training: after which the models were that answered.")
    predictions: list[RowPrediction] = Field(description="One for each row, in their order.")


class ClassPrior(BaseModel):
    round: int = Field(description="Of the training: after which the models were that it follows from.")
    num_inputs: int = Field(description="How many rows it was estimated from.")
    label_counts: dict[str, float] | None = Field(
        description="How many of them are of each class; null where they tell nothing that is sure enough."
    )
    label_counts_text: str | None = Field(description="The same for `counts` of a prediction.")


class Representation(BaseModel):
    model_config = ConfigDict(extra="forbid")

    representation: list[Any] = Field(
        description="As the method's clients tell it, flat or nested. FedEPC: four sparsity vectors.",
        examples=[[0.25, 0.5, 0.0, 1.0]],
        min_length=1,
    )


class Memberships(BaseModel):
    round: int
    nearest: str = Field(description="The cluster with the largest weight.")
    memberships: dict[str, float] = Field(description="The weight of each cluster; they sum to 1.")


class ModelFacts(BaseModel):
    id: str
    num_parameters: int
    num_bytes: int = Field(description="Of the file at /v1/models/{id}.")


class Models(BaseModel):
    round: int
    method: str
    model: str = Field(description="The network.")
    input_shape: list[int]
    columns: list[str] | None = Field(description="Of a table: what each number of a row is; null where rows are none.")
    classes: list[str]
    models: list[ModelFacts]


class Health(BaseModel):
    status: str
    round: int | None = Field(None, description="Of the models that are served.")


def media_types(inputs: Inputs) -> tuple[str, ...]:
    """The kinds of body that a prediction can be asked with."""
    return ("application/json", NPY_TYPE, *(IMAGES if inputs.takes_images else ()))


def describe_request(inputs: Inputs) -> str:
    """What a prediction is asked with, for people."""
    kinds = "JSON, a .npy array (numpy.save), or one PNG or JPEG image" if inputs.takes_images else "JSON or .npy"
    columns = (
        f" A row is one number for each column, in this order: {', '.join(inputs.columns)}." if inputs.columns else ""
    )
    return f"A label and probabilities for each row: {kinds}.{columns}"


def request_schema(inputs: Inputs, options_model: type[BaseModel] = PredictOptions) -> dict[str, Any]:
    """The options, the kinds of body, and an example of the right shape."""
    content: dict[str, Any] = {
        "application/json": {"schema": _body_schema(inputs), "example": {"rows": [_example(inputs)]}}
    }
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in media_types(inputs)[1:]}
    options = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in options_model.model_json_schema()["properties"].items()
    ]
    return {"parameters": options, "requestBody": {"required": True, "content": content}}


def _body_schema(inputs: Inputs) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "number", "minimum": -MAX_VALUE, "maximum": MAX_VALUE}
    for n in reversed(inputs.shape):
        row = {"type": "array", "items": row, "minItems": n, "maxItems": n}
    if inputs.columns:
        row["description"] = f"By column: {', '.join(inputs.columns)}"
    many = {"type": "array", "items": row, "minItems": 1, "maxItems": MAX_SAMPLES}
    return {
        "type": "object",
        "properties": {"rows": {"anyOf": [row, many]}},
        "required": ["rows"],
        "additionalProperties": False,
    }


def _example(inputs: Inputs) -> Any:
    """Of a table a row of its columns' means, which looks like one; else zeros."""
    if inputs.columns and inputs.preparation is not None:
        return [float(f"{mean:.4g}") for mean in inputs.preparation.mean]
    row: Any = 0.0
    for n in reversed(inputs.shape):
        row = [row] * n
    return row
