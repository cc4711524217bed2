"""Clients that never train: every method answers them; some can be held out of a run to see how well."""

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
def test_every_method_answers_a_client_that_it_never_saw(method, rounds):
    """From the first models too, before anybody trained."""
    federation = tiny_federation(5)
    setting = Setting(load_model("mlp", (6,), 4), rounds=2, cohort_size=3, batch_size=8)
    built = build(method, setting)
    state = engine.run(built, PlainFleet(federation), rounds=rounds, seed=0).state if rounds else built.init(0)
    models = built.models_for(state, None)
    logits = built.predict(models, {}, federation.central.x)
    assert logits.shape == (40, 4)
    assert bool(logits.isfinite().all())
    if built.predict_routed is not None:
        answer = built.predict_routed(models, {}, federation.central.x)
        assert torch.equal(answer.logits, logits)
        assert answer.model_index.shape == answer.confidence.shape == (40,)


class TestHoldingOut:
    whole = tiny_federation(5)
    kept = whole.hold_out({"c1", "c4"})

    def test_who_is_left_has_what_it_had(self):
        assert list(self.kept) == ["c0", "c2", "c3"]
        for client in self.kept:
            for split, (x, y) in self.whole[client].items():
                assert torch.equal(self.kept[client][split].x, x)
                assert torch.equal(self.kept[client][split].y, y)

    def test_who_is_held_out_is_nowhere_but_apart(self):
        assert "c1" not in self.kept
        assert list(self.kept.unseen) == ["c1", "c4"]
        parts = self.whole["c4"]
        assert torch.equal(self.kept.unseen["c4"].y, torch.cat([parts[s].y for s in ("train", "val", "test")]))
        assert len(self.kept[CENTRALISED_CLIENT]["train"].y) == sum(len(self.whole[c]["train"].y) for c in self.kept)
        assert self.kept.label_counts().sum() == self.whole.label_counts()[[0, 2, 3]].sum()

    def test_what_is_said_of_it(self):
        assert partition_facts(self.kept)["unseen"] == ["c1", "c4"]
        assert "unseen" not in partition_facts(self.whole)

    def test_goes_with_its_federation(self):
        assert list(self.kept.to("cpu").unseen) == ["c1", "c4"]

    def test_planted_groups_and_chance(self):
        data = shoal.load("digits")
        whole = shoal.partition(data, "groups:2,100", clients=8, seed=3)
        kept = shoal.partition(data, "groups:2,100", clients=8, seed=3, unseen=3)
        assert set(kept) | set(kept.unseen) == set(whole)
        assert kept.planted_groups == {c: whole.planted_groups[c] for c in kept}
        assert set(shoal.partition(data, "groups:2,100", clients=8, seed=3, unseen=0.375).unseen) == set(kept.unseen)
        others = [set(shoal.partition(data, "iid", clients=8, seed=s, unseen=3).unseen) for s in range(4)]
        assert any(chosen != set(kept.unseen) for chosen in others)


@pytest.mark.parametrize(("clients", "unseen", "count"), [(20, 5, 5), (20, 0.25, 5), (20, 0.01, 1), (2, 1, 1)])
def test_how_many(clients, unseen, count):
    assert num_held_out(clients, unseen) == count
    assert Job(unseen=unseen).num_training_clients(clients) == clients - count


@pytest.mark.parametrize("unseen", [-1, 20, 21, 0.99, -0.5])
def test_somebody_must_be_left(unseen):
    with pytest.raises(UserError, match=f"unseen is {unseen} of 20 clients; it must be 1 or more"):
        num_held_out(20, unseen)


def job(method, **kw):
    return Job(**{"method": method, "partition": "groups:3,100", "clients": 12, "rounds": 4, "epochs": 1} | kw)


def files(folder):
    skip = ("timing.jsonl", "result.json", "lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name not in skip}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "fedepc"
    return path, run_job(job("fedepc", unseen=3), path)


class TestRuns:
    def test_a_run_says_who_was_held_out(self, done):
        path, result = done
        assert result["unseen"] == 3
        assert result["clients"] == 12
        assert len(json.loads((path / "partition.json").read_text())["unseen"]) == 3
        assert len(json.loads((path / "clients.jsonl").read_text().splitlines()[0])["accuracy"]) == 9

    def test_the_last_checkpoint_gives_the_last_rounds_figures(self, done):
        path, result = done
        before = files(path)
        found = evaluate.evaluate_clients(path)
        assert found["accuracy"] == pytest.approx(result["accuracy"])
        assert found["loss"] == pytest.approx(result["loss"])
        assert len(found["clients"]) == 9
        assert files(path) == before

    def test_the_unseen_are_evaluated_on_all_their_rows(self, done):
        path, _ = done
        found, again = (evaluate.evaluate_unseen_clients(path) for _ in range(2))
        assert found == again
        held = json.loads((path / "partition.json").read_text())["unseen"]
        assert list(found["clients"]) == sorted(held)
        whole = shoal.partition(shoal.load("digits"), "groups:3,100", clients=12, seed=0)
        for client, score in found["clients"].items():
            assert score["n"] == sum(len(whole[client][s].y) for s in ("train", "val", "test"))
        mean = sum(score["accuracy"] for score in found["clients"].values()) / 3
        assert found["accuracy"]["mean"] == pytest.approx(mean)
        assert found["accuracy"]["worst10"] == min(score["accuracy"] for score in found["clients"].values())

    def test_groups_that_rows_without_labels_point_to(self, done):
        """Planted groups hold different classes: the largest group's model knows one third of the fleet at most."""
        path, _ = done
        anybody, assigned = (
            evaluate.evaluate_unseen_clients(path),
            evaluate.evaluate_unseen_clients(path, infer_from_inputs=True),
        )
        assert assigned["accuracy"]["mean"] > anybody["accuracy"]["mean"] + 0.2
        assert assigned["assigned"] and not anybody["assigned"]

    def test_the_same_seed_gives_the_same_bytes_and_a_stop_changes_nothing(self, done, tmp_path):
        path, _ = done

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

    def test_a_recipe_goes_on_with_it(self, done):
        path, _ = done
        check_same_job(path, job("fedepc", unseen=0.25))
        with pytest.raises(UserError, match="was run with unseen 3, not 4"):
            check_same_job(path, job("fedepc", unseen=4))

    def test_private_state_and_updates(self, tmp_path):
        result = run_job(job("fedavg-ft", cohort=5), tmp_path / "ft")
        assert evaluate.evaluate_clients(tmp_path / "ft")["accuracy"] == pytest.approx(result["accuracy"])
        assert result["updates"] == 20
        assert "unseen" not in result
        assert "unseen" not in json.loads((tmp_path / "ft/config.json").read_text())

    def test_who_held_out_nobody_is_told_so(self, tmp_path):
        run_job(job("fce", rounds=1), tmp_path / "fce")
        with pytest.raises(UserError, match="held out nobody: run it with --unseen N"):
            evaluate.evaluate_unseen_clients(tmp_path / "fce")
        run_job(job("fce", rounds=1, unseen=2), tmp_path / "two")
        with pytest.raises(UserError, match="method fce has no groups that rows without labels point to"):
            evaluate.evaluate_unseen_clients(tmp_path / "two", infer_from_inputs=True)


def test_the_vector_without_labels_is_that_which_members_told():
    model = load_model("mlp", (6,), 4)
    federation, params = tiny_federation(1), model.init(1)
    program = MeasureSparsity(LocalTraining(model))
    plan = engine.Plan(program, {"c0": engine.Task({"m": params})})
    (report,) = PlainFleet(federation).execute(plan).values()
    vectors = report.tensors["sparsity"]["s"]
    torch.testing.assert_close(program.sparsity_vector(params, federation["c0"]["train"].x), vectors[1])


def test_the_group_with_the_least_mean_distance_of_received_vectors():
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


class TestOtherAnswers:
    """One finished run, answering in other ways."""

    def test_a_run_answers_as_one_that_was_told_so_from_the_start(self, dense, tmp_path):
        run_job(job("fce", unseen=3, set={"serve": {"rule": "energy", "mask": "read"}}), tmp_path / "told")
        other = evaluate.evaluate_unseen_clients(dense, options={"serve": {"rule": "energy", "mask": "read"}})
        told = evaluate.evaluate_unseen_clients(tmp_path / "told")
        assert other.pop("set") == {"serve": {"rule": "energy", "mask": "read"}}
        assert other == told
        assert other["clients"] != evaluate.evaluate_unseen_clients(dense)["clients"]

    def test_who_answered_how_many_rows(self, dense):
        for score in evaluate.evaluate_unseen_clients(dense)["clients"].values():
            assert sum(score["answered_by"].values()) == score["n"]
            assert max(score["answered_by"].values()) > 0.8 * score["n"]  # groups of labels: one model knows a client

    def test_clients_of_the_run_too(self, dense):
        trusting = evaluate.evaluate_clients(dense, options={"serve": {"trust": 50.0}})
        assert trusting["accuracy"]["central"] != evaluate.evaluate_clients(dense)["accuracy"]["central"]

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"train": {"lr": 0.2}}, r"--set train\.lr=0\.2 cannot be changed after training\. .* method fce"),
            ({"serve": {"width": 3}}, "--set serve.width=3 cannot be changed after training"),
            ({"serve": {"mask": "told"}}, "serve.mask=told cannot be changed after training"),
            ({"serve": {"rule": "luck"}}, "option serve.rule is 'luck'"),
            ({"serve": {"rules": "energy"}}, "did you mean serve.rule"),
        ],
    )
    def test_what_the_run_has_no_answer_to(self, dense, options, sentence):
        with pytest.raises(UserError, match=sentence):
            evaluate.evaluate_unseen_clients(dense, options=options)

    def test_what_members_never_told_is_not_here(self, tmp_path):
        run_job(job("fce", rounds=1, unseen=2), tmp_path / "fce")
        with pytest.raises(UserError, match=r"serve\.rule=density cannot be changed"):
            evaluate.evaluate_unseen_clients(tmp_path / "fce", options={"serve": {"rule": "density"}})

    def test_an_option_by_which_clients_trained(self, tmp_path):
        """The gate of `shoal` is fitted with it."""
        run_job(job("shoal", rounds=1), tmp_path / "shoal")
        with pytest.raises(UserError, match=r"serve\.alpha=2\.0 cannot be changed"):
            evaluate.evaluate_clients(tmp_path / "shoal", options={"serve": {"alpha": 2.0}})
        evaluate.evaluate_clients(tmp_path / "shoal", options={"estimate": {"guard": 0.5}})

    def test_of_a_method_whose_clients_keep_models(self, tmp_path):
        told = run_job(job("fedala", rounds=2, set={"serve": {"model": "trained"}}), tmp_path / "trained")
        run_job(job("fedala", rounds=2), tmp_path / "plain")
        other = evaluate.evaluate_clients(tmp_path / "plain", options={"serve": {"model": "trained"}})
        assert other["accuracy"] == pytest.approx(told["accuracy"])


class TestOwners:
    """Rows with owners: who is held out leaves no trace in what the others are trained and judged with."""

    @pytest.fixture
    def file(self, tmp_path):
        rng = np.random.default_rng(0)
        owners = np.repeat([f"w{i}" for i in range(8)], 30)
        values = rng.normal(np.repeat(10.0 ** np.arange(8), 30)[:, None], 1, (240, 2))  # an owner is seen by its size
        path = tmp_path / "owned.csv"
        lines = [
            f"{a},{b},{who},{i % 2}\n" for i, ((a, b), who) in enumerate(zip(values.tolist(), owners, strict=True))
        ]
        path.write_text("a,b,who,label\n" + "".join(lines))
        return path

    def federation(self, file, **kw):
        return load_federation(Job(data=str(file), client_column="who", partition="natural", **kw))

    def test_nothing_is_drawn_from_who_is_held_out(self, file):
        found = self.federation(file, unseen=3, public=20)
        assert len(found.unseen) == 3
        assert len(found) == 5
        assert all(len(rows.y) == 30 for rows in found.unseen.values())
        scale = found.preparation
        own = [float(x) for c in found for s in ("train", "val", "test") for x in found[c][s].x[:, 0]]
        own += found.public.x[:, 0].tolist()
        assert len(own) + len(found.central.y) == 150
        assert np.mean(own) == pytest.approx(0, abs=1e-4)  # scaled by its own rows alone, the public ones among them
        assert np.std(own) == pytest.approx(1, abs=1e-4)
        names = sorted([*found, *found.unseen])
        held = [10.0 ** names.index(c) for c in found.unseen]
        for rows in (found.public, found.central):
            sizes = rows.x[:, 0].double() * scale.std[0] + scale.mean[0]
            assert not any(abs(float(size) - one) < 0.3 * one for size in sizes for one in held)

    def test_share_and_few_of_the_owners(self, file):
        found = self.federation(file, unseen=0.5, clients=4)
        assert (len(found), len(found.unseen)) == (2, 2)
        assert set(self.federation(file, unseen=0.25).unseen) == set(self.federation(file, unseen=2).unseen)
        with pytest.raises(UserError, match="unseen is 8 of 8 clients"):
            self.federation(file, unseen=8)
        with pytest.raises(UserError, match="clients is 9, but only 8 can take part"):
            self.federation(file, unseen=2, clients=9)

    def test_without_unseen_nothing_has_changed(self, file):
        """Pinned: what was drawn before owners could be held out first."""
        found = self.federation(file, public=20, clients=6)
        assert partition_facts(found)["clients"] == [f"w{i}" for i in (0, 1, 3, 5, 6, 7)]
        assert found.central.x.double().sum().item() == pytest.approx(-8.957117334, abs=1e-4)
        assert found.public.x.double().sum().item() == pytest.approx(7.948157653, abs=1e-4)

    def test_a_run_on_owned_rows_is_evaluated(self, file, tmp_path):
        keys = {"data": str(file), "client_column": "who", "partition": "natural", "clients": None}
        run_job(job("fedavg", rounds=1, unseen=3, **keys), tmp_path / "run")
        assert evaluate.evaluate_unseen_clients(tmp_path / "run")["unseen"] == 3

    def test_in_python(self, file):
        data = shoal.load(str(file), client_column="who", unseen=3)
        assert set(shoal.partition(data, "natural", seed=0, unseen=3).unseen) == data.unseen
        with pytest.raises(UserError, match="unseen is 2, but owned was loaded with 3 clients held out"):
            shoal.partition(data, "natural", seed=0, unseen=2)
