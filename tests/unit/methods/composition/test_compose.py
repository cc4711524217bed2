"""Methods composed of pieces: the same as those with names, any that fit, and reasons for those that do not."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
from compositions import smallest_composition
from federations import tiny_federation

from shoal import codec, engine, tree
from shoal.client.histogram import LabelHistogram
from shoal.errors import UserError
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.job import Job, make_job
from shoal.experiment.recipe import RECIPES, load_recipe
from shoal.methods import METHODS, Setting, build
from shoal.methods.composition.compose import canonical_name, parse_composition
from shoal.methods.composition.piece import default_piece_names, pieces
from shoal.methods.pieces.cluster.dbscan import DensityClusters
from shoal.models import load_model
from shoal.stages.experts import VectorClusters

COMPOSED = {path.stem: path for name, path in RECIPES.files().items() if name.startswith("methods/")}
OF_PAPERS = {"fedepc", "scmoe", "simclust", "repclust", "apcsma", "fce"}
EVERY_PAPER = (
    "represent=sparsity,cluster=aidc,select=repclust,train=proximal,aggregate=contribution,personalise=gate,"
    "serve=confidence"
)


def play(job, federation=None, fleet="plain"):
    federation = federation or tiny_federation(6, (6,))
    settings = {"model": "mlp", "rounds": 3, "cohort": 4, "epochs": 1, "batch_size": 8, "lr": 0.05, "seed": 4}
    settings |= {"pieces": 2 if fleet == "pool" else None}
    job = job.model_copy(update=settings | {"fleet": fleet, "public": 8, "workers": 2})
    bench, private = assemble(job, job.method, federation), {}
    result = engine.run(
        bench.method, make_fleet(bench, private), rounds=3, seed=4, central_samples=federation.central, eval_every=2
    )
    return result, private


def packed(result, private):
    state = result.state
    whole = {"models": dict(state.models), "membership": dict(state.membership), "memory": dict(state.memory)}
    return codec.pack(whole | {"private": private}, {"records": [r.line() for r in result.rounds]})


def test_every_method_of_the_papers_is_a_recipe():
    assert COMPOSED.keys() >= OF_PAPERS
    assert COMPOSED.keys() <= METHODS.keys()


@pytest.mark.parametrize("method", COMPOSED)
def test_a_recipe_of_pieces_ends_with_the_bytes_of_the_method(method):
    recipe = load_recipe(COMPOSED[method], {}).single_job
    assert "=" in recipe.method, "it names pieces, not the method"
    assert packed(*play(recipe)) == packed(*play(Job(method=method)))


def test_a_table_and_a_string_are_the_same(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[method]\ntrain = "proximal"\nselect = "repclust"\nserve = ["average", "prior"]\n')
    job = load_recipe(file, {}).single_job
    assert job.method == "select=repclust,train=proximal,serve=average+prior"
    assert make_job({"method": tomllib.loads(file.read_text())["method"]}) == job
    assert canonical_name(parse_composition(job.method)) == job.method


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({}, "method is an empty table"),
        ({"select": ["random", "balanced"]}, "it must be one piece"),
        ({"train": {"name": "proximal"}}, r"its options go under \[set.train\]"),
        ({"represnt": "labels"}, "step 'represnt' of a method is not known; did you mean represent"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_plainly(table, reason):
    with pytest.raises(UserError, match=reason) as told:
        make_job({"method": table})
    assert "value error" not in str(told.value).lower()


def test_a_name_is_written_in_one_way():
    assert make_job({"method": "aggregate = momentum , select=balanced"}).method == "select=balanced,aggregate=momentum"


def test_a_method_that_a_grid_would_override_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[method]\nselect = "balanced"\n[grid]\nmethod = ["fedavg"]\n')
    with pytest.raises(UserError, match="method is given and in the grid"):
        load_recipe(file, {})


def test_fine_tuning_goes_on_from_what_is_served():
    """With a running mean: that, not the newest model."""
    result, private = play(Job(method="serve=average,personalise=fine-tune", set={"personalise": {"epochs": 0}}))
    served = built("serve=average").models_for(result.state, None)["global"]
    assert all(tree.max_abs_difference(kept["model"], served) == 0 for kept in private.values())


def test_noise_on_labels_is_not_bypassed():
    """What a mask is made of are the distributions that were told with noise."""
    model = load_model("mlp", (6,), 4)
    options = {"labels": {"gamma": 1.0}, "serve": {"mask": "told"}}
    setting = Setting(model, rounds=3, cohort_size=3, options=options)
    method = build("represent=sparsity,cluster=dbscan,select=repclust,serve=confidence", setting)
    tells = [p for stage in method.stages for p in stage.programs if isinstance(p, LabelHistogram)]
    assert [p.noise_scale for p in tells] == [1.0]


def test_what_noise_on_two_things_protects_is_not_made_up():
    options = {"represent": {"noise": 0.1}, "labels": {"gamma": 1.0}}
    method = "represent=sparsity,cluster=dbscan,select=repclust"
    for given in ({"represent": options["represent"]}, {"labels": options["labels"]}):
        build(method, Setting(load_model("mlp", (6,), 4), rounds=3, cohort_size=3, options=given))
    with pytest.raises(UserError, match="noise to what they send in represent and in labels"):
        build(method, Setting(load_model("mlp", (6,), 4), rounds=3, cohort_size=3, options=options))


def test_what_is_as_usual_need_not_be_said():
    assert canonical_name(default_piece_names()) == "train=sgd"
    assert packed(*play(Job(method="train=sgd"))) == packed(*play(Job(method="fedavg")))


@pytest.mark.parametrize("fleet", ["plain", "vector", "pool", "flower"])
def test_pieces_of_every_paper_in_one_method(fleet):
    result, private = play(Job(method=EVERY_PAPER), fleet=fleet)
    assert {"represent", "cluster", "groups", "labels", "train"} <= set(result.state.memory)
    assert all({"model", "gate"} <= set(kept) for kept in private.values()), "everybody has a model and a gate"
    assert np.isfinite(result.accuracy["central"])


def built(method):
    model = load_model("mlp", (6,), 3)
    return build(method, Setting(model, rounds=3, cohort_size=3))


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("personalise=gate", "personalise=gate needs several experts to weigh, which cluster=none does not provide"),
        (
            "represent=updates,cluster=mctc,aggregate=secure",
            "represent=updates needs updates of individual clients",
        ),
        ("select=contribution,aggregate=secure", "select=contribution needs updates of individual clients"),
        ("cluster=aidc", "use represent=sparsity"),
        ("represent=labels,cluster=aidc", "use represent=sparsity|use cluster="),
        ("select=turns", "the members of clusters take turns"),
        ("serve=confidence", "without clusters there is one model only"),
        ("represent=updates", "no other piece of the method uses directions"),
        ("represent=labels,cluster=similar", "use select=one-of-each or select=whole-groups"),
        ("represent=updates,cluster=mctc,aggregate=momentum", "a velocity belongs to a model"),
        ("represent=updates,cluster=mctc,personalise=fine-tune", "fine-tuning starts from one model"),
        (
            "represent=sparsity,cluster=aidc,serve=average",
            "an average over rounds",
        ),
        ("represent=sparsity,cluster=dbscan,serve=confidence", "ok"),
        ("clustre=aidc", "step 'clustre' of a method is not known; did you mean cluster?"),
        ("cluster=aidx", "cluster 'aidx' is not known; did you mean aidc?"),
        ("cluster=none,cluster=none", "names cluster twice"),
        ("cluster=", "cluster is ''; it must be the name of a piece"),
        ("select=balanced,", "is not of the form step=piece"),
        ("serve=average+average", "each piece must be there once"),
        ("serve=average+plain", "and plain alone"),
        ("represent=labels", "no other piece of the method uses label distributions"),
        ("cluster=shift", "use personalise=gate"),
        ("represent=sparsity,cluster=aidc,select=bandit,aggregate=secure", "which aggregate=secure does not provide"),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_reason(method, reason):
    if reason == "ok":
        assert built(method).predict_routed is not None
        return
    with pytest.raises(UserError, match=reason):
        built(method)


def test_density_needs_what_the_first_round_left():
    model = load_model("mlp", (6,), 3)
    setting = Setting(model, rounds=3, cohort_size=3, options={"serve": {"rule": "density"}})
    with pytest.raises(UserError, match="represent=last-layer"):
        build("represent=labels,cluster=dbscan,serve=confidence", setting)


def smallest():
    """Every piece once, with only those others that it cannot do without."""
    for step, found in pieces().items():
        for name in found:
            yield ",".join(f"{k}={v}" for k, v in smallest_composition(step, name).items())


@pytest.mark.parametrize("method", sorted(set(smallest())))
def test_every_piece_trains(method):
    result, _ = play(Job(method=method))
    first = built(method).init(4).models
    moved = tree.max_abs_difference(next(iter(first.values())), next(iter(result.state.models.values())))
    assert moved > 0
    assert set(method.split(",")) <= {f"{part.step}={part.piece}" for part in built(method).parts}


def test_what_one_piece_keeps_another_does_not_forget():
    """A client's key, its label counts and its own model lie side by side."""
    job = Job(method="represent=labels,cluster=dbscan,train=adjusted,aggregate=secure,personalise=gate")
    _, private = play(job.model_copy(update={"set": {"train": {"adjust": "on"}}}))
    assert all({"key", "labels", "model", "gate"} <= set(kept) for kept in private.values())


def test_running_means_are_what_is_served():
    result, _ = play(Job(method="serve=average"))
    method = built("serve=average")
    served = method.models_for(result.state, None)["global"]
    assert tree.max_abs_difference(served, result.state.memory["average"]["global"]) == 0
    assert tree.max_abs_difference(served, result.state.models["global"]) > 0


def test_dbscan_on_labels_finds_planted_groups():
    rows = np.repeat(np.eye(3), 4, axis=0) + np.random.default_rng(0).uniform(0, 0.01, (12, 3))
    rule = VectorClusters(DensityClusters().cluster)
    labels = rule(rows, 0)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert rule.join(rows, labels, rows[[5, 0]]).tolist() == [1, 0]
    assert rule.recluster(rows, labels, rows[::-1], 0)[1].tolist() == [0] * 4 + [1] * 4 + [2] * 4
