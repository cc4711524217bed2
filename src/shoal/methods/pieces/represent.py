"""What clients tell of themselves before anything is decided about them."""

from __future__ import annotations

from shoal.client.histogram import LabelHistogram
from shoal.client.sparsity import Sparsity
from shoal.client.train import LocalTraining
from shoal.methods.draft import Draft, Piece
from shoal.methods.single import one_model_init
from shoal.stages.extract import Extractor, extractor_for
from shoal.stages.represent import AskOnce
from shoal.stages.select import Random
from shoal.types import ServerState

LABELS = "labels"  # the stage in which label distributions are told where something else is the representation


def labels(d: Draft) -> None:
    used = d.has("cluster", "similar", "repulsive", "dbscan") or d.has("select", "simclust", "repclust", "balanced")
    if not used and not d.has("train", "adjusted") and not d.has("serve", "prior", "confidence"):
        d.refuse("represent", "no other piece has a use for label distributions: leave it out")
    telling = d.s.make("represent", LabelHistogram, classes=d.s.model.classes)
    d.stages["represent"].append(d.s.make("represent", AskOnce, program=telling))


def told_labels(d: Draft) -> str:
    """The stage in which clients tell their label distributions; they do if none of the pieces before has asked."""
    if d.has("represent", "labels"):
        return "represent"
    if not any(stage.name == LABELS for stage in d.stages["represent"]):
        split = d.made.get("split", "train")
        telling = d.s.make(LABELS, LabelHistogram, classes=d.s.model.classes, split=split, name=LABELS)
        d.stages["represent"].append(d.s.make(LABELS, AskOnce, program=telling, name=LABELS))
    return LABELS


def sparsity(d: Draft) -> None:
    s = d.s
    adaptation = s.training("represent", LocalTraining, epochs=1, name="represent")
    extractor = s.make("represent", Extractor, model=s.model)
    vectors = s.make("represent", Sparsity, adaptation=adaptation)
    ask = s.make("represent", AskOnce, program=vectors, models_for=extractor_for, after=extractor.warmup)
    warmup = (Random(s.cohort, name="warmup"),) if extractor.warmup else ()

    def init(seed: int) -> ServerState:
        s.model.relu(vectors.layer)  # one that is not there is refused before any client is asked
        return one_model_init(s.model)(seed)

    d.stages["represent"] += [*warmup, extractor, ask]
    d.init = init
    d.made |= {"sparsity": vectors, "warmup": extractor.warmup}


def by_training(d: Draft) -> None:
    """What training does to a model: nobody is asked for more."""


PIECES = {
    "none": Piece(lambda d: None, "-", single=False),
    "labels": Piece(
        labels,
        "paper 002, Sec. III and Eq. 4",
        sends="its label distribution, with noise if represent.gamma is set",
        tells="how often each label occurs with each client, and its number of rows",
        single=False,
    ),
    "sparsity": Piece(
        sparsity,
        "paper 000, Eq. 1-2, Alg. 1 (SPRE)",
        sends="how often each channel of a ReLU is zero over its rows: four vectors",
        keeps="the extraction model",
        tells="these vectors, from which label distributions can be read, and its number of rows",
        needs={"cluster": ("aidc", "dbscan")},
        why="there is nothing else that looks at sparsity",
        single=False,
    ),
    "updates": Piece(
        by_training,
        "paper 001, Eq. 1-2",
        sends="nothing but what it trained",
        tells="the direction of each client's last update, which is kept",
        needs={"cluster": ("mctc",)},
        why="there is nothing else that looks at directions of updates",
    ),
    "last-layer": Piece(
        by_training,
        "paper 004, Alg. 2, 9",
        sends="nothing but what it trained",
        tells="the last layer of each client's first model, which is kept",
        needs={"cluster": ("dbscan",)},
        why="there is nothing else that looks at last layers",
    ),
}
