"""Evaluation of finished runs, and of unseen clients, which are excluded from training."""

import json

import numpy as np
import pytest
import torch
from federations import tiny_federation

import shoal
from shoal import engine
from shoal.client.sparsity import MeasureSparsity
from shoal.client.train import LocalTraining
from shoal.data.unseen import num_held_out
from shoal.errors import UserError
from shoal.experiment import evaluate
from shoal.experiment.assemble import load_federation, partition_facts
from shoal.experiment.job import Job
from shoal.experiment.run import check_same_job, resume_run, run_job
from shoal.fleet.plain import PlainFleet
from shoal.methods import METHODS, Setting, build
from shoal.models import load_model
from shoal.stages.cluster import SparsityClusters
from shoal.types import CENTRALISED_CLIENT


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_predicts_for_an_unseen_client(method, rounds):
    """Also with the initial models, before any training."""
    federation = tiny_federation(5)
    setting = Setting(load_model("mlp", (6,), 4), rounds=2, cohort_size=3, batch_size=8)
    built = build(method, setting)
    state = engine.run(built, PlainFleet(federation), rounds=rounds, seed=0).state if rounds else built.init(0)
    models = built.models_for(state, None)
    logits = built.predict(models, {}, federation.central.x)
    assert logits.shape == (40, 4)
    assert bool(logits.isfinite().all())
    if built.predict_routed is not None:
        routed = built.predict_routed(models, {}, federation.central.x)
        assert torch.equal(routed.logits, logits)
        assert routed.model_index.shape == routed.confidence.shape == (40,)


class TestHoldingOut:
    full = tiny_federation(5)
    training = full.hold_out({"c1", "c4"})

    def test_training_clients_keep_their_samples(self):
        assert list(self.training) == ["c0", "c2", "c3"]
        for client in self.training:
            for split, (x, y) in self.full[client].items():
                assert torch.equal(self.training[client][split].x, x)
                assert torch.equal(self.training[client][split].y, y)

    def test_unseen_clients_are_only_in_unseen(self):
        assert "c1" not in self.training
        assert list(self.training.unseen) == ["c1", "c4"]
        parts = self.full["c4"]
        assert torch.equal(self.training.unseen["c4"].y, torch.cat([parts[s].y for s in ("train", "val", "test")]))
        assert len(self.training[CENTRALISED_CLIENT]["train"].y) == sum(
            len(self.full[c]["train"].y) for c in self.training
        )
        assert self.training.label_counts().sum() == self.full.label_counts()[[0, 2, 3]].sum()

    def test_partition_facts_name_the_unseen_clients(self):
        assert partition_facts(self.training)["unseen"] == ["c1", "c4"]
        assert "unseen" not in partition_facts(self.full)

    def test_unseen_clients_stay_when_the_device_changes(self):
        assert list(self.training.to("cpu").unseen) == ["c1", "c4"]

    def test_planted_groups_and_the_random_draw(self):
        data = shoal.load("digits")
        full = shoal.partition(data, "groups:2,100", clients=8, seed=3)
        training = shoal.partition(data, "groups:2,100", clients=8, seed=3, unseen=3)
        assert set(training) | set(training.unseen) == set(full)
        assert training.planted_groups == {c: full.planted_groups[c] for c in training}
        assert set(shoal.partition(data, "groups:2,100", clients=8, seed=3, unseen=0.375).unseen) == set(
            training.unseen
        )
        others = [set(shoal.partition(data, "iid", clients=8, seed=s, unseen=3).unseen) for s in range(4)]
        assert any(chosen != set(training.unseen) for chosen in others)


@pytest.mark.parametrize(("clients", "unseen", "count"), [(20, 5, 5), (20, 0.25, 5), (20, 0.01, 1), (2, 1, 1)])
def test_the_number_of_unseen_clients(clients, unseen, count):
    assert num_held_out(clients, unseen) == count
    assert Job(unseen=unseen).num_training_clients(clients) == clients - count


@pytest.mark.parametrize("unseen", [-1, 20, 21, 0.99, -0.5])
def test_at_least_one_client_must_train(unseen):
    with pytest.raises(UserError, match=f"unseen is {unseen} of 20 clients; it must be 1 or more"):
        num_held_out(20, unseen)


def job(method, **kw):
    return Job(**{"method": method, "partition": "groups:3,100", "clients": 12, "rounds": 4, "epochs": 1} | kw)


def files(folder):
    skip = ("timing.jsonl", "result.json", "lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name not in skip}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "fedepc"
    return path, run_job(job("fedepc", unseen=3), path)


class TestRuns:
    def test_a_run_records_its_unseen_clients(self, finished_run):
        path, result = finished_run
        assert result["num_unseen_clients"] == 3
        assert result["clients"] == 12
        assert len(json.loads((path / "partition.json").read_text())["unseen"]) == 3
        assert len(json.loads((path / "clients.jsonl").read_text().splitlines()[0])["accuracy"]) == 9

    def test_the_last_checkpoint_gives_the_metrics_of_the_last_round(self, finished_run):
        path, result = finished_run
        before = files(path)
        found = evaluate.evaluate_clients(path)
        assert found["accuracy"] == pytest.approx(result["accuracy"])
        assert found["loss"] == pytest.approx(result["loss"])
        assert len(found["clients"]) == 9
        assert files(path) == before

    def test_unseen_clients_are_evaluated_on_all_their_samples(self, finished_run):
        path, _ = finished_run
        found, again = (evaluate.evaluate_unseen_clients(path) for _ in range(2))
        assert found == again
        unseen = json.loads((path / "partition.json").read_text())["unseen"]
        assert list(found["clients"]) == sorted(unseen)
        full = shoal.partition(shoal.load("digits"), "groups:3,100", clients=12, seed=0)
        for client, score in found["clients"].items():
            assert score["num_samples"] == sum(len(full[client][s].y) for s in ("train", "val", "test"))
        mean = sum(score["accuracy"] for score in found["clients"].values()) / 3
        assert found["accuracy"]["local"] == pytest.approx(mean)
        assert found["accuracy"]["worst10"] == min(score["accuracy"] for score in found["clients"].values())

    def test_clusters_are_inferred_from_inputs(self, finished_run):
        """Planted groups have different classes, so the largest cluster's model fits a third of the clients at most."""
        path, _ = finished_run
        default, inferred = (
            evaluate.evaluate_unseen_clients(path),
            evaluate.evaluate_unseen_clients(path, infer_from_inputs=True),
        )
        assert inferred["accuracy"]["local"] > default["accuracy"]["local"] + 0.2
        assert inferred["inferred_from_inputs"] and not default["inferred_from_inputs"]

    def test_the_same_seed_gives_the_same_bytes_and_a_stop_changes_nothing(self, finished_run, tmp_path):
        path, _ = finished_run

        class Stop(Exception):
            pass

        def stop(record):
            if record.round == 2:
                raise Stop

        with pytest.raises(Stop):
            run_job(job("fedepc", unseen=3), tmp_path / "two", on_round=stop)
        with pytest.raises(UserError, match="is not finished"):
            evaluate.evaluate_clients(tmp_path / "two")
        resume_run(tmp_path / "two")
        assert files(tmp_path / "two") == files(path)

    def test_a_job_with_the_same_unseen_clients_continues_the_run(self, finished_run):
        path, _ = finished_run
        check_same_job(path, job("fedepc", unseen=0.25))
        with pytest.raises(UserError, match="was run with unseen 3, not 4"):
            check_same_job(path, job("fedepc", unseen=4))

    def test_private_state_and_updates(self, tmp_path):
        result = run_job(job("fedavg-ft", cohort=5), tmp_path / "ft")
        assert evaluate.evaluate_clients(tmp_path / "ft")["accuracy"] == pytest.approx(result["accuracy"])
        assert result["num_client_updates"] == 20
        assert "num_unseen_clients" not in result
        assert "unseen" not in json.loads((tmp_path / "ft/config.json").read_text())

    def test_runs_without_unseen_clients_or_inference_are_refused(self, tmp_path):
        run_job(job("fce", rounds=1), tmp_path / "fce")
        with pytest.raises(UserError, match=r"has no unseen clients\. Start a run with --unseen N"):
            evaluate.evaluate_unseen_clients(tmp_path / "fce")
        run_job(job("fce", rounds=1, unseen=2), tmp_path / "two")
        with pytest.raises(
            UserError, match="does not work with method fce, which infers no cluster and no class prior"
        ):
            evaluate.evaluate_unseen_clients(tmp_path / "two", infer_from_inputs=True)


def test_the_vector_without_labels_is_the_reported_one():
    model = load_model("mlp", (6,), 4)
    federation, params = tiny_federation(1), model.init(1)
    program = MeasureSparsity(LocalTraining(model))
    plan = engine.Plan(program, {"c0": engine.Task({"m": params})})
    (report,) = PlainFleet(federation).execute(plan).values()
    vectors = report.tensors["sparsity"]["s"]
    torch.testing.assert_close(program.sparsity_vector(params, federation["c0"]["train"].x), vectors[1])


def test_the_cluster_with_the_smallest_mean_distance_to_reported_vectors():
    rows = torch.tensor([[9, 9, 0.9, 0.1], [9, 9, 0.8, 0.2], [9, 9, 0.1, 0.9]]).repeat_interleave(1, 0)
    rows = torch.cat([rows[:, :2], rows[:, 2:], rows[:, 2:], rows[:, 2:]], 1).double().numpy()
    assert (
        SparsityClusters().nearest_cluster(
            rows, torch.tensor([0, 0, 1]).numpy(), torch.tensor([0.2, 0.9]).double().numpy()
        )
        == 1
    )
    assert (
        SparsityClusters().nearest_cluster(
            rows, torch.tensor([0, 0, 1]).numpy(), torch.tensor([0.7, 0.2]).double().numpy()
        )
        == 0
    )


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "fce"
    run_job(job("fce", unseen=3, set={"serve": {"rule": "density"}}), path)
    return path


class TestServingOptions:
    """One finished run with other serving options."""

    def test_a_run_predicts_as_if_trained_with_the_serving_option(self, dense, tmp_path):
        run_job(job("fce", unseen=3, set={"serve": {"rule": "energy", "mask": "inferred"}}), tmp_path / "energy")
        other = evaluate.evaluate_unseen_clients(dense, options={"serve": {"rule": "energy", "mask": "inferred"}})
        expected = evaluate.evaluate_unseen_clients(tmp_path / "energy")
        assert other.pop("set") == {"serve": {"rule": "energy", "mask": "inferred"}}
        assert other == expected
        assert other["clients"] != evaluate.evaluate_unseen_clients(dense)["clients"]

    def test_samples_by_model(self, dense):
        for score in evaluate.evaluate_unseen_clients(dense)["clients"].values():
            assert sum(score["samples_by_model"].values()) == score["num_samples"]
            assert (
                max(score["samples_by_model"].values()) > 0.8 * score["num_samples"]
            )  # label groups: one model fits a client

    def test_training_clients_are_evaluated_with_the_option(self, dense):
        weighted = evaluate.evaluate_clients(dense, options={"serve": {"logit_weight": 50.0}})
        assert weighted["accuracy"]["central"] != evaluate.evaluate_clients(dense)["accuracy"]["central"]

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"train": {"lr": 0.2}}, r"--set train\.lr=0\.2 cannot be changed after training\. .* method fce"),
            ({"serve": {"max_features": 3}}, "--set serve.max_features=3 cannot be changed after training"),
            ({"serve": {"mask": "reported"}}, "serve.mask=reported cannot be changed after training"),
            ({"serve": {"rule": "luck"}}, "option serve.rule is 'luck'"),
            ({"serve": {"rules": "energy"}}, "did you mean serve.rule"),
        ],
    )
    def test_options_that_would_change_training_are_refused(self, dense, options, sentence):
        with pytest.raises(UserError, match=sentence):
            evaluate.evaluate_unseen_clients(dense, options=options)

    def test_an_option_that_needs_other_reports_is_refused(self, tmp_path):
        run_job(job("fce", rounds=1, unseen=2), tmp_path / "fce")
        with pytest.raises(UserError, match=r"serve\.rule=density cannot be changed"):
            evaluate.evaluate_unseen_clients(tmp_path / "fce", options={"serve": {"rule": "density"}})

    def test_an_option_that_training_uses_is_refused(self, tmp_path):
        """The gate of `shoal` is fitted with it."""
        run_job(job("shoal", rounds=1), tmp_path / "shoal")
        with pytest.raises(UserError, match=r"serve\.pseudocount=2\.0 cannot be changed"):
            evaluate.evaluate_clients(tmp_path / "shoal", options={"serve": {"pseudocount": 2.0}})
        evaluate.evaluate_clients(tmp_path / "shoal", options={"estimate": {"min_gain_nats": 0.5}})

    def test_a_method_with_personal_models(self, tmp_path):
        expected = run_job(job("fedala", rounds=2, set={"serve": {"model": "trained"}}), tmp_path / "trained")
        run_job(job("fedala", rounds=2), tmp_path / "plain")
        other = evaluate.evaluate_clients(tmp_path / "plain", options={"serve": {"model": "trained"}})
        assert other["accuracy"] == pytest.approx(expected["accuracy"])


class TestClientColumn:
    """Unseen clients of a natural partition leave no trace in the data of the other clients."""

    @pytest.fixture
    def file(self, tmp_path):
        rng = np.random.default_rng(0)
        clients = np.repeat([f"w{i}" for i in range(8)], 30)
        values = rng.normal(
            np.repeat(10.0 ** np.arange(8), 30)[:, None], 1, (240, 2)
        )  # the size of a value shows its client
        path = tmp_path / "owned.csv"
        lines = [
            f"{a},{b},{client},{i % 2}\n"
            for i, ((a, b), client) in enumerate(zip(values.tolist(), clients, strict=True))
        ]
        path.write_text("a,b,client,label\n" + "".join(lines))
        return path

    def federation(self, file, **kw):
        return load_federation(Job(data=str(file), client_column="client", partition="natural", **kw))

    def test_nothing_depends_on_unseen_clients(self, file):
        found = self.federation(file, unseen=3, public_samples=20)
        assert len(found.unseen) == 3
        assert len(found) == 5
        assert all(len(rows.y) == 30 for rows in found.unseen.values())
        scale = found.preparation
        own = [float(x) for c in found for s in ("train", "val", "test") for x in found[c][s].x[:, 0]]
        own += found.public_samples.x[:, 0].tolist()
        assert len(own) + len(found.central.y) == 150
        assert np.mean(own) == pytest.approx(
            0, abs=1e-4
        )  # scaled by the samples of training clients and the public samples
        assert np.std(own) == pytest.approx(1, abs=1e-4)
        names = sorted([*found, *found.unseen])
        unseen_sizes = [10.0 ** names.index(c) for c in found.unseen]
        for rows in (found.public_samples, found.central):
            sizes = rows.x[:, 0].double() * scale.std[0] + scale.mean[0]
            assert not any(abs(float(size) - one) < 0.3 * one for size in sizes for one in unseen_sizes)

    def test_unseen_as_a_fraction_and_fewer_clients(self, file):
        found = self.federation(file, unseen=0.5, clients=4)
        assert (len(found), len(found.unseen)) == (2, 2)
        assert set(self.federation(file, unseen=0.25).unseen) == set(self.federation(file, unseen=2).unseen)
        with pytest.raises(UserError, match="unseen is 8 of 8 clients"):
            self.federation(file, unseen=8)
        with pytest.raises(UserError, match="clients is 9, but only 8 "):
            self.federation(file, unseen=2, clients=9)

    def test_pinned_values_without_unseen_clients(self, file):
        """The values were measured before unseen clients existed."""
        found = self.federation(file, public_samples=20, clients=6)
        assert partition_facts(found)["clients"] == [f"w{i}" for i in (0, 1, 3, 5, 6, 7)]
        assert found.central.x.double().sum().item() == pytest.approx(-8.957117334, abs=1e-4)
        assert found.public_samples.x.double().sum().item() == pytest.approx(7.948157653, abs=1e-4)

    def test_a_run_with_a_client_column_is_evaluated(self, file, tmp_path):
        keys = {"data": str(file), "client_column": "client", "partition": "natural", "clients": None}
        run_job(job("fedavg", rounds=1, unseen=3, **keys), tmp_path / "run")
        assert evaluate.evaluate_unseen_clients(tmp_path / "run")["num_unseen_clients"] == 3

    def test_in_python(self, file):
        data = shoal.load(str(file), client_column="client", unseen=3)
        assert set(shoal.partition(data, "natural", seed=0, unseen=3).unseen) == data.unseen
        with pytest.raises(UserError, match="unseen is 2, but owned was loaded with 3 unseen clients"):
            shoal.partition(data, "natural", seed=0, unseen=2)
