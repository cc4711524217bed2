"""Pieces that the package does not know work with all others that fit them, and refusals follow from capabilities."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import foreign_pieces
import numpy as np
import pytest
import torch
from compositions import smallest_composition
from federations import tiny_federation
from foreign_pieces import Halves, LargestUpdates, Median
from installed import forget_pieces_afterwards, install
from quick import quick_options

import shoal
from shoal import tree
from shoal.client_table import ClientTable
from shoal.errors import UserError
from shoal.methods import Setting, build, default_options
from shoal.methods.composition import (
    SELECTION_CLUSTERS,
    TRAINING_ACCURACIES,
    UPDATE_LOSSES,
    UPDATE_NORMS,
    ClientColumn,
    Piece,
    form_clusters,
    option,
    register,
)
from shoal.methods.composition import piece as registry
from shoal.methods.composition.capability import CLUSTER_MODELS
from shoal.methods.composition.compose import canonical_name, compose, start_builder
from shoal.methods.composition.fit import misfits, refuse_misfits
from shoal.methods.composition.piece import STEPS, default_piece_names, piece_class, pieces
from shoal.methods.pieces.aggregate.mean import Mean
from shoal.models import load_model
from shoal.stages.cluster import Clustering
from shoal.stages.experts import VectorClusters
from shoal.stages.select import SelectByFunction
from shoal.types import ServerState

FOREIGN = {"cluster": Halves, "select": LargestUpdates, "aggregate": Median}
NETWORK = load_model("mlp", (1,), 2)
PYPROJECT = """
[project]
name = "foreign-package"
version = "1.0"
[project.entry-points."shoal.pieces"]
"""


@pytest.fixture
def forget(monkeypatch):
    forget_pieces_afterwards(monkeypatch)


def path(piece):
    return f"{piece.__module__}:{piece.__name__}"


def compositions(step):
    """Every method with the foreign piece of this step, and any one piece at each other step."""
    offered = {s: list(classes) for s, classes in pieces().items()} | {step: [path(FOREIGN[step])]}
    classes = {(s, name): piece_class(s, name) for s, names in offered.items() for name in names}
    for names in product(*offered.values()):
        steps = dict(zip(offered, names, strict=True))
        yield steps, {s: (classes[s, name],) for s, name in steps.items()}


@pytest.mark.parametrize("step", FOREIGN)
def test_a_foreign_piece_builds_a_method_with_every_piece_that_fits(step):
    partners = set()
    for steps, chosen in compositions(step):
        if next(misfits(chosen), None) is None:
            method = compose(Setting(NETWORK, rounds=20, cohort_size=2), "own", steps)
            assert (step, path(FOREIGN[step])) in {(part.step, part.piece) for part in method.steps}
            partners |= {(s, name) for s, name in steps.items() if s != step}
    refused = {(s, name) for s in STEPS if s != step for name in pieces()[s]} - partners
    assert refused == MISFITS[step]


MISFITS = {  # pieces that are in no method with the foreign piece of the step, and why
    "cluster": {
        ("represent", "none"),  # there must be vectors to cluster
        ("represent", "updates"),  # only overlapping clusters use the directions of updates
        ("select", "one-of-each"),  # there are no clusters to select from
        ("select", "whole-clusters"),
        ("select", "contribution"),  # it needs one model that all clients share
        ("personalise", "update"),
        ("aggregate", "momentum"),  # models of clusters do not stay the same from round to round
        ("serve", "average"),
        ("serve", "prior"),  # it needs a global model
    },
    "select": {
        ("cluster", "similar"),  # their clusters must be used by the selection
        ("cluster", "repulsive"),
        ("aggregate", "secure"),  # no update of a client is known
        ("aggregate", "contribution"),  # no summary of updates
        ("aggregate", "cosine"),
    },
    "aggregate": {("select", "bandit")},  # it needs a summary of updates, which the median does not promise
}


@pytest.mark.parametrize("step", FOREIGN)
def test_a_refusal_is_one_sentence_with_the_capability_and_the_remedy(step):
    every = [c for classes in pieces().values() for p in classes.values() for c in (*p.requires, *p.must_be_used)]
    names = {capability.name for capability in (*every, *(c for p in FOREIGN.values() for c in p.requires))}
    refused = 0
    for other in (s for s in STEPS if s != step):
        for name in pieces()[other]:
            steps = default_piece_names() | {step: path(FOREIGN[step]), other: name}
            chosen = {s: (piece_class(s, n),) for s, n in steps.items()}
            misfit = next(misfits(chosen), None)
            if misfit is None:
                continue
            refused += 1
            with pytest.raises(UserError) as error:
                refuse_misfits(chosen)
            sentence = str(error.value)
            assert "\n" not in sentence
            assert any(name in sentence for name in names), sentence
            reason, _, remedy = sentence.partition("; use ")
            assert reason.split()[0] in {f"{s}={n}" for s, n in steps.items()}, "it begins with one of the pieces"
            assert remedy.replace(" or ", ", ").split(", ") == [f"{s}={n}" for s, n in misfit.remedies]
            assert misfit.remedies
    assert refused >= 3


TRAINED = (
    f"represent=labels,cluster={path(Halves)},select=bandit,personalise=gate",
    f"represent=last-layer,cluster={path(Halves)},select=turns,aggregate={path(Median)},serve=confidence",
    f"represent=sparsity,cluster={path(Halves)},select={path(LargestUpdates)},train=proximal,personalise=fine-tune",
    f"cluster=shift,select={path(LargestUpdates)},train=adjusted,personalise=gate,serve=average+prior",
    f"select={path(LargestUpdates)},aggregate=momentum,personalise=update",
    f"represent=updates,cluster=mctc,select=repclust,aggregate={path(Median)},personalise=gate",
)


@pytest.mark.parametrize("method", TRAINED)
def test_methods_with_foreign_pieces_train(method):
    federation = tiny_federation(5)
    keys = {"rounds": 2, "cohort": 3, "epochs": 2, "fleet": "plain", "seed": 4}
    result = shoal.run(method, federation, **keys, set=quick_options(method))
    first = build(method, Setting(load_model("mlp", (6,), 4), rounds=2, cohort_size=3)).init(4).models
    moved = [tree.max_abs_difference(next(iter(first.values())), model) for model in result.state.models.values()]
    assert all(0 < distance < 10 for distance in moved)
    if "cluster=foreign" in method:
        assert set(result.clusters) == set(federation)
    if "select=foreign" in method:
        norms = UPDATE_NORMS(result.state)
        assert len(norms) >= 3
        assert all(norm > 0 for norm in norms.values()), "the selector reads the updates of every kind of aggregation"


def test_an_installed_package_offers_its_pieces_by_name(tmp_path, monkeypatch, forget):
    """Names, options, remedies and training: as with the pieces of this package."""
    (tmp_path / "foreign_package.py").write_text(Path(foreign_pieces.__file__).read_text())
    lines = (f'"{step}.alien" = "foreign_package:{piece.__name__}"\n' for step, piece in FOREIGN.items())
    install(tmp_path, PYPROJECT + "".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [pieces()[step]["alien"].__module__ for step in FOREIGN] == ["foreign_package"] * 3
    assert default_options("represent=labels,cluster=alien")["cluster"] == {"quantile": 0.5}
    with pytest.raises(UserError, match=r"select=turns needs disjoint .*; use cluster=aidc, cluster=alien or"):
        build("select=turns", Setting(NETWORK, rounds=2, cohort_size=2))
    method = {"represent": "labels", "cluster": "alien", "select": "turns", "aggregate": "alien"}
    result = shoal.run(method, tiny_federation(4), rounds=2, fleet="plain")
    assert sorted({name for names in result.clusters.values() for name in names}) == ["expert-000", "expert-001"]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ('"cluster.x" = "nowhere:X"', "class 'nowhere:X' cannot be imported"),
        ('"clusters.x" = "foreign_pieces:Halves"', "it must be one of represent, cluster, select"),
        ('"select.x" = "foreign_pieces:Halves"', "that piece is for the step 'cluster'"),
        (
            '"cluster.dbscan" = "foreign_pieces:Halves"',
            "piece cluster=dbscan is both shoal.*DensityClusters and foreign_",
        ),
        ('"cluster.x" = "foreign_pieces:select"', "it must be a subclass of shoal.methods.composition.Piece"),
    ],
)
def test_a_broken_entry_point_is_refused_with_the_name_of_its_package(tmp_path, monkeypatch, forget, entry, reason):
    install(tmp_path, PYPROJECT + entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=f"installed package 'foreign-package': .*{reason}"):
        pieces()


def no_dataclass():
    class Mistake(Piece):
        k: int = option(2, "A number.")

    return Mistake


def no_default():
    @dataclass(frozen=True)
    class Mistake(Piece):
        k: int

    return Mistake


def reserved():
    @dataclass(frozen=True)
    class Mistake(Piece):
        requires: int = option(2, "A number.")

    return Mistake


def no_tuple():
    class Mistake(Piece):
        requires = CLUSTER_MODELS

    return Mistake


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (no_dataclass, r"k is an option, but the class is no dataclass; put @dataclass\(frozen=True\) above it"),
        (no_default, "field 'k' has no default; give it one"),
        (reserved, "option 'requires' has a reserved name"),
        (no_tuple, "requires is .* it must be a tuple of capabilities"),
    ],
)
def test_a_mistake_in_a_class_is_refused_in_one_sentence(make, reason, forget):
    with pytest.raises(UserError, match=f"piece cluster=mistake: {reason}"):
        register("cluster", "mistake")(make())
    assert "mistake" not in pieces()["cluster"]


def module(tmp_path, monkeypatch, text):
    (tmp_path / "authors.py").write_text(f"from shoal.methods.pieces.aggregate.mean import Mean\n{text}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "authors", raising=False)


def test_a_subclass_has_a_name_of_its_own_and_is_no_default(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "class Mine(Mean):\n    provides = ()\n")
    piece = piece_class("aggregate", "authors:Mine")
    assert (piece.name, piece.step, piece.is_default) == ("authors:Mine", "aggregate", False)
    assert (Mean.name, Mean.is_default) == ("mean", True)
    with pytest.raises(UserError, match="which aggregate=authors:Mine does not provide"):
        build("represent=updates,cluster=mctc,aggregate=authors:Mine", Setting(NETWORK, rounds=2, cohort_size=2))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("class X(Mean): step = 'select'", "aggregate is 'authors:X', but that piece is for the step 'select'"),
        ("class X(Mean): step = ''", "does not say for which step it is; write step = 'aggregate' in its class"),
        ("class X(Mean) pass", r"cannot be imported \(invalid syntax \(authors.py, line 2\)\)"),
        ("X = 3 / 0", r"cannot be imported \(division by zero\)"),
    ],
)
def test_a_class_of_another_step_is_refused(tmp_path, monkeypatch, text, reason):
    module(tmp_path, monkeypatch, text)
    with pytest.raises(UserError, match=reason):
        build("aggregate=authors:X", Setting(NETWORK, rounds=2, cohort_size=2))


def test_a_mapping_may_have_classes():
    steps = {"cluster": Halves, "serve": ["average", "prior"]}
    assert canonical_name(steps) == "cluster=foreign_pieces:Halves,serve=average+prior"
    with pytest.raises(UserError, match=r"cluster is the class no_tuple.<locals>.Mistake; it must be at the top level"):
        canonical_name({"cluster": no_tuple()})


def clusters_of(labels, rows):
    """The clusters that `form_clusters` makes of what a rule returned for these vectors."""
    steps = {"represent": "labels", "cluster": path(Halves)}
    builder = start_builder(Setting(NETWORK, rounds=2, cohort_size=2), steps)
    builder.representation = ClientColumn("labels")
    form_clusters(builder, lambda vectors, seed: labels)
    return builder.stages["cluster"][0].rule(np.array(rows, dtype=float)[:, None], seed=0).tolist()


def test_labels_have_no_gaps_and_noise_joins_the_nearest_cluster():
    assert clusters_of([5, 2, 5], [0, 9, 1]) == [0, 1, 0]
    assert clusters_of([-1, 0, 1, -1], [8, 0, 9, 2]) == [0, 1, 0, 1]
    assert clusters_of([-1, -1], [0, 9]) == [0, 0]
    assert clusters_of([True, False, True], [0, 9, 1]) == [0, 1, 0]


def test_a_rule_gets_only_the_first_part_of_a_vector():
    """Here each client reported two vectors of one number."""
    seen, rows = [], np.array([[0.0, 5.0], [1.0, 6.0]])
    clusters = VectorClusters(
        lambda rows, seed: seen.append(rows.tolist()) or Clustering(np.array([0, 1])), num_parts=2
    )
    clusters.recluster(rows, np.array([0, 1]), rows, seed=0)
    assert seen == [[[0.0], [1.0]]]
    assert clusters.join(rows, np.array([0, 1]), np.array([[0.1, 6.0]])).tolist() == [0]
    table = ClientTable(("a", "b"), {"x": torch.from_numpy(rows)})
    vectors = ClientColumn("x", num_parts=2)(ServerState(0, {}, memory={"represent": table.to_tree()}))
    assert {c: x.tolist() for c, x in vectors.items()} == {"a": [0.0], "b": [1.0]}
    assert ClientColumn("y")(ServerState(0, {})) == {}


@pytest.mark.parametrize(
    ("method", "column", "values"),
    [
        ("represent=labels,cluster=similar,select=one-of-each", SELECTION_CLUSTERS, {0.0, 1.0}),
        (f"select={path(LargestUpdates)}", UPDATE_LOSSES, None),
        ("aggregate=contribution", TRAINING_ACCURACIES, None),
    ],
)
def test_a_selector_reads_what_other_pieces_have_recorded(method, column, values):
    result = shoal.run(method, tiny_federation(5), rounds=2, cohort=2, fleet="plain")
    value_of_client = column(result.state)
    assert set(value_of_client) <= {f"c{i}" for i in range(5)}
    assert len(value_of_client) >= 2
    assert all(value >= 0 for value in value_of_client.values())
    assert values is None or set(value_of_client.values()) == values


@pytest.mark.parametrize("labels", [[0, 1], [[0], [1], [0]], [0.0, 1.0, 0.0]])
def test_labels_that_are_not_one_number_for_each_client_are_refused(labels):
    with pytest.raises(UserError, match=r"cluster=foreign_pieces:Halves returned .* for 3 clients; it must return one"):
        clusters_of(labels, [0, 9, 1])


def test_a_cohort_is_in_the_order_of_the_roster_and_within_it():
    state = ServerState(0, {}, roster=("a", "b", "c"))
    assert SelectByFunction(lambda state, seed: ["c", "a", "c"]).fold(state, {}, 0).cohort == ("a", "c")
    with pytest.raises(
        UserError, match="Stage 'select' selected client 'z', which is not among the 3 clients of the round"
    ):
        SelectByFunction(lambda state, seed: "az").fold(state, {}, 0)


def described(method, options):
    stages = [(type(stage), stage.name, stage.schedule) for stage in method.stages]
    return stages, options, method.notes, method.uses_cohort_size, [part.stages for part in method.steps]


def test_no_piece_depends_on_the_name_of_another(monkeypatch):
    """Every piece is renamed, and makes the same method with the same others."""
    smallest = [smallest_composition(step, name) for step, classes in pieces().items() for name in classes]
    settings = [Setting(NETWORK, rounds=20, cohort_size=2) for _ in smallest]
    before = [
        described(compose(s, "own", steps), s.available_options) for s, steps in zip(settings, smallest, strict=True)
    ]
    others = {step: {f"other-{name}": piece for name, piece in classes.items()} for step, classes in pieces().items()}
    monkeypatch.setattr(registry, "_registry", others)
    for classes in pieces().values():
        for name, piece in classes.items():
            monkeypatch.setattr(piece, "name", name)
    renamed = [{step: f"other-{name}" for step, name in steps.items()} for steps in smallest]
    settings = [Setting(NETWORK, rounds=20, cohort_size=2) for _ in smallest]
    after = [
        described(compose(s, "own", steps), s.available_options) for s, steps in zip(settings, renamed, strict=True)
    ]
    assert after == before
