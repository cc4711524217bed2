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


def run_composition(job, federation=None, fleet="plain"):
    federation = federation or tiny_federation(6, (6,))
    settings = {"model": "mlp", "rounds": 3, "cohort": 4, "epochs": 1, "batch_size": 8, "lr": 0.05, "seed": 4}
    settings |= {"pieces": 2 if fleet == "pool" else None}
    job = job.model_copy(update=settings | {"fleet": fleet, "public_samples": 8, "workers": 2})
    experiment, private = assemble(job, job.method, federation), {}
    result = engine.run(
        experiment.method,
        make_fleet(experiment, private),
        rounds=3,
        seed=4,
        central_samples=federation.central,
        eval_every=2,
    )
    return result, private


def to_bytes(result, private):
    state = result.state
    contents = {"models": dict(state.models), "membership": dict(state.membership), "memory": dict(state.memory)}
    return codec.pack(contents | {"private": private}, {"records": [r.to_json() for r in result.rounds]})


def test_every_method_of_the_papers_is_a_recipe():
    assert COMPOSED.keys() >= OF_PAPERS
    assert COMPOSED.keys() <= METHODS.keys()


@pytest.mark.parametrize("method", COMPOSED)
def test_a_recipe_of_pieces_ends_with_the_bytes_of_the_method(method):
    recipe = load_recipe(COMPOSED[method], {}).single_job
    assert "=" in recipe.method, "it names pieces, not the method"
    assert to_bytes(*run_composition(recipe)) == to_bytes(*run_composition(Job(method=method)))


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
def test_a_wrong_table_is_refused_with_the_reason(table, reason):
    with pytest.raises(UserError, match=reason) as error:
        make_job({"method": table})
    assert "value error" not in str(error.value).lower()


def test_a_name_is_written_in_one_way():
    assert make_job({"method": "aggregate = momentum , select=balanced"}).method == "select=balanced,aggregate=momentum"


def test_a_method_that_a_grid_would_override_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[method]\nselect = "balanced"\n[grid]\nmethod = ["fedavg"]\n')
    with pytest.raises(UserError, match="method is both a key and in the grid"):
        load_recipe(file, {})


def test_fine_tuning_starts_from_the_serving_model():
    """With an EMA model it starts from that, not from the newest model."""
    result, private = run_composition(
        Job(method="serve=average,personalise=fine-tune", set={"personalise": {"epochs": 0}})
    )
    served = built("serve=average").models_for(result.state, None)["global"]
    assert all(tree.max_abs_difference(state["model"], served) == 0 for state in private.values())


def test_noise_on_labels_is_not_bypassed():
    """A mask is made of the label distributions that were reported with noise."""
    model = load_model("mlp", (6,), 4)
    options = {"labels": {"noise_scale": 1.0}, "serve": {"mask": "reported"}}
    setting = Setting(model, rounds=3, cohort_size=3, options=options)
    method = build("represent=sparsity,cluster=dbscan,select=repclust,serve=confidence", setting)
    programs = [p for stage in method.stages for p in stage.programs if isinstance(p, LabelHistogram)]
    assert [p.noise_scale for p in programs] == [1.0]


def test_noise_in_two_programs_is_refused():
    options = {"represent": {"noise_std": 0.1}, "labels": {"noise_scale": 1.0}}
    method = "represent=sparsity,cluster=dbscan,select=repclust"
    for allowed_options in ({"represent": options["represent"]}, {"labels": options["labels"]}):
        build(method, Setting(load_model("mlp", (6,), 4), rounds=3, cohort_size=3, options=allowed_options))
    with pytest.raises(UserError, match="noise to what they send in represent and in labels"):
        build(method, Setting(load_model("mlp", (6,), 4), rounds=3, cohort_size=3, options=options))


def test_default_pieces_need_not_be_named():
    assert canonical_name(default_piece_names()) == "train=sgd"
    assert to_bytes(*run_composition(Job(method="train=sgd"))) == to_bytes(*run_composition(Job(method="fedavg")))


@pytest.mark.parametrize("fleet", ["plain", "vector", "pool", "flower"])
def test_pieces_of_every_paper_in_one_method(fleet):
    result, private = run_composition(Job(method=EVERY_PAPER), fleet=fleet)
    assert {"represent", "cluster", "groups", "labels", "train"} <= set(result.state.memory)
    assert all({"model", "gate"} <= set(state) for state in private.values()), "every client has a model and a gate"
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
        ("represent=labels,cluster=similar", "use select=one-of-each or select=whole-clusters"),
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
def test_pieces_that_do_not_fit_are_refused_with_the_reason(method, reason):
    if reason == "ok":
        assert built(method).predict_routed is not None
        return
    with pytest.raises(UserError, match=reason):
        built(method)


def test_density_requires_the_models_of_the_first_round():
    model = load_model("mlp", (6,), 3)
    setting = Setting(model, rounds=3, cohort_size=3, options={"serve": {"rule": "density"}})
    with pytest.raises(UserError, match="represent=last-layer"):
        build("represent=labels,cluster=dbscan,serve=confidence", setting)


def smallest_compositions():
    """Every piece once, with only those others that it cannot do without."""
    for step, classes in pieces().items():
        for name in classes:
            yield ",".join(f"{k}={v}" for k, v in smallest_composition(step, name).items())


@pytest.mark.parametrize("method", sorted(set(smallest_compositions())))
def test_every_piece_trains(method):
    result, _ = run_composition(Job(method=method))
    first = built(method).init(4).models
    moved = tree.max_abs_difference(next(iter(first.values())), next(iter(result.state.models.values())))
    assert moved > 0
    assert set(method.split(",")) <= {f"{part.step}={part.piece}" for part in built(method).steps}


def test_pieces_keep_the_private_state_of_other_pieces():
    """A client keeps its key, its label counts and its personal model."""
    job = Job(method="represent=labels,cluster=dbscan,train=adjusted,aggregate=secure,personalise=gate")
    _, private = run_composition(job.model_copy(update={"set": {"train": {"logit_adjustment": "on"}}}))
    assert all({"key", "labels", "model", "gate"} <= set(state) for state in private.values())


def test_ema_models_are_served():
    result, _ = run_composition(Job(method="serve=average"))
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
