"""The schemas of requests and responses. The OpenAPI description of a service names the inputs of its run."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shoal.serve.inputs import IMAGES, MAX_SAMPLES, MAX_VALUE, Inputs

NPY_TYPE = "application/x-npy"
NUMBER_LIST = r"^[0-9]{1,9}(\.[0-9]{1,9})?(,[0-9]{1,9}(\.[0-9]{1,9})?)*$"
CLIENT_DESCRIPTION = (
    "The client of the run whose serving model is used. Default: the serving model of unseen clients is used."
)


class PredictOptions(BaseModel):
    """The query parameters of a prediction."""

    model_config = ConfigDict(extra="forbid")

    client: str | None = Field(None, description=CLIENT_DESCRIPTION)
    prepared: bool = Field(
        False, description="Whether the values are already prepared like the training data. Default: false."
    )
    abstain_below: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Below this confidence a sample gets no label. Default: the threshold of the service.",
    )
    label_counts: str | None = Field(
        None,
        pattern=NUMBER_LIST,
        description="The label counts of the caller, in the order of the classes, which correct the predictions. "
        "/v1/prior estimates them.",
        examples=["12,0,3.5"],
    )


class PriorOptions(BaseModel):
    """The query parameters of an estimate of the class prior."""

    model_config = ConfigDict(extra="forbid")

    prepared: bool = Field(
        False, description="Whether the values are already prepared like the training data. Default: false."
    )


class SamplePrediction(BaseModel):
    """The prediction of one sample."""

    label: str | None = Field(description="This is the most probable class. It is null if the service abstains.")
    abstained: bool = Field(description="True if the confidence is below the threshold.")
    confidence: float = Field(description="This is the largest probability.")
    probabilities: dict[str, float] = Field(description="Each class has a probability. They sum to 1.")
    expert: str | None = Field(
        description="This is the name of the model that predicted. It is null if the method has only one model."
    )
    routing_confidence: float | None = Field(
        description="This is the confidence of the choice of the model. It is null if the method does not choose."
    )


class Prediction(BaseModel):
    """The predictions of all samples of a request."""

    round: int = Field(description="The models that predicted were saved after this training round.")
    predictions: list[SamplePrediction] = Field(description="Each sample has one prediction, in the order sent.")


class ClassPrior(BaseModel):
    """The class prior of an unseen client, estimated from inputs without labels."""

    round: int = Field(description="The models of the estimate were saved after this training round.")
    num_inputs: int = Field(description="The class prior was estimated from this number of inputs.")
    label_counts: dict[str, float] | None = Field(
        description="Each class has an estimated number of inputs. It is null if the estimate is not reliable enough."
    )
    label_counts_text: str | None = Field(
        description="This text has the same counts, for the parameter `label_counts` of a prediction."
    )


class Representation(BaseModel):
    """The representation of a client, which the method computes from the client's data."""

    model_config = ConfigDict(extra="forbid")

    representation: list[Any] = Field(
        description="The numbers that a client reports as its representation, flat or nested. For FedEPC they are four "
        "sparsity vectors.",
        examples=[[0.25, 0.5, 0.0, 1.0]],
        min_length=1,
    )


class Memberships(BaseModel):
    """The clusters that a representation belongs to."""

    round: int = Field(description="The clusters are those after this training round.")
    nearest: str = Field(description="This cluster has the largest weight.")
    memberships: dict[str, float] = Field(description="Each cluster has a weight. They sum to 1.")


class ModelFacts(BaseModel):
    """A model that can be downloaded."""

    id: str = Field(description="This is the name of the model in /v1/models/{id}.")
    num_parameters: int = Field(description="The model has this number of parameters.")
    num_bytes: int = Field(description="The file at /v1/models/{id} has this number of bytes.")


class Models(BaseModel):
    """The models that can be downloaded, and the inputs and classes that they have in common."""

    round: int = Field(description="The models were saved after this training round.")
    method: str = Field(description="This method trained the models.")
    model: str = Field(description="This is the name of the network.")
    input_shape: list[int] = Field(description="One sample has this shape.")
    columns: list[str] | None = Field(
        description="These are the names of the numbers of a sample. It is null if the data are not a table."
    )
    classes: list[str] = Field(description="The models predict these classes.")
    models: list[ModelFacts] = Field(description="Each model has an entry.")


class Health(BaseModel):
    """The state of the service."""

    status: str = Field(description="This is ok or ready.")
    round: int | None = Field(None, description="The serving models were saved after this training round.")


def media_types(inputs: Inputs) -> tuple[str, ...]:
    """Returns the content types that the body of a request may have."""
    return ("application/json", NPY_TYPE, *(IMAGES if inputs.takes_images else ()))


def describe_request(inputs: Inputs) -> str:
    """Returns the description of a prediction request."""
    kinds = (
        "JSON, a .npy array (numpy.save), or one PNG or JPEG image" if inputs.takes_images else "JSON or a .npy array"
    )
    columns = (
        f" A sample has one number for each column, in this order: {', '.join(inputs.columns)}."
        if inputs.columns
        else ""
    )
    return f"Predicts a label and probabilities for each sample. The samples are sent as {kinds}.{columns}"


def request_schema(inputs: Inputs, options_model: type[BaseModel] = PredictOptions) -> dict[str, Any]:
    """Returns the OpenAPI description of the parameters and the body of a request, with an example."""
    content: dict[str, Any] = {
        "application/json": {"schema": _body_schema(inputs), "example": {"samples": [_example(inputs)]}}
    }
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in media_types(inputs)[1:]}
    options = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in options_model.model_json_schema()["properties"].items()
    ]
    return {"parameters": options, "requestBody": {"required": True, "content": content}}


def _body_schema(inputs: Inputs) -> dict[str, Any]:
    sample: dict[str, Any] = {"type": "number", "minimum": -MAX_VALUE, "maximum": MAX_VALUE}
    for n in reversed(inputs.shape):
        sample = {"type": "array", "items": sample, "minItems": n, "maxItems": n}
    if inputs.columns:
        sample["description"] = f"The numbers of the columns {', '.join(inputs.columns)}."
    many = {"type": "array", "items": sample, "minItems": 1, "maxItems": MAX_SAMPLES}
    return {
        "type": "object",
        "properties": {"samples": {"anyOf": [sample, many]}},
        "required": ["samples"],
        "additionalProperties": False,
    }


def _example(inputs: Inputs) -> Any:
    """Returns an example sample: the column means of a table, which look realistic, or else zeros."""
    if inputs.columns and inputs.preparation is not None:
        return [float(f"{mean:.4g}") for mean in inputs.preparation.mean]
    sample: Any = 0.0
    for n in reversed(inputs.shape):
        sample = [sample] * n
    return sample
