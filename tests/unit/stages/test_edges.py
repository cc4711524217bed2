"""Edge servers between the clients and the cloud."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import tiny_federation
from quick import quick_options

from shoal import engine, tree
from shoal.client_table import ClientTable
from shoal.cost.costs import CostModel
from shoal.cost.ledger import EDGE_CLOUD, EdgeClock, Ledger, LedgerEntry
from shoal.cost.links import LINKS
from shoal.data import load, partition
from shoal.errors import UserError
from shoal.experiment.assemble import assemble, make_fleet
from shoal.experiment.evaluate import evaluate_unseen_clients
from shoal.experiment.job import Job, make_job
from shoal.experiment.run import run, run_job
from shoal.methods import METHODS, Setting, build
from shoal.models import load_model
from shoal.serve.blueprint import Blueprint
from shoal.serve.model_version import ModelVersion, PredictRequest
from shoal.stages.edges import (
    CLOUD,
    EDGE_LABEL_STAGE,
    EDGES,
    AssignEdges,
    AverageEdgeModels,
    Topology,
    edge_name,
    edge_states,
    merge_edge_states,
    parse_edges,
)
from shoal.store.checkpoint import Checkpoints
from shoal.types import EdgeExchange, Plan, Report, ServerState, Task

UNDER_EDGES = [m for m in METHODS if m not in ("local", "centralised", "hierfavg")]


def run_method(method, federation=None, rounds=3, fleet="plain", of=None, **keys):
    """Runs `rounds` rounds, or the first rounds of a run of `of` rounds."""
    federation = federation or tiny_federation()
    settings = {"cohort": 3, "epochs": 1, "batch_size": 8, "lr": 0.05, "seed": 4, "model": "mlp", "fleet": fleet}
    keys = {"set": quick_options(method)} | keys
    bench = assemble(Job(method=method, rounds=of or rounds, **settings | keys), method, federation)
    ledger = Ledger(bench.costs)
    result = engine.run(
        bench.method, make_fleet(bench), rounds=rounds, seed=4, central_samples=federation.central, ledger=ledger
    )
    return result, bench


class TestOneEdgeIsNoEdge:
    @pytest.mark.parametrize("method", UNDER_EDGES)
    def test_for_every_method(self, method):
        """The first edge has the server's seed, and the mean of one model is that model, so all results are equal."""
        flat, _ = run_method(method)
        edged, bench = run_method(method, edges="1", cloud_every_rounds=1)
        (edge,) = edge_states(edged.state)
        assert tree.max_abs_difference(edge.models, flat.state.models) == 0
        assert tree.max_abs_difference(edge.membership, flat.state.membership) == 0
        inside = {k: v for k, v in flat.state.memory.items() if k != "delivery"}
        assert tree.max_abs_difference(edge.memory, inside) == 0
        for ours, theirs in zip(edged.rounds, flat.rounds, strict=True):
            assert ours.evaluation.clients == theirs.evaluation.clients
            assert (ours.bytes_up, ours.bytes_down, ours.flops) == (theirs.bytes_up, theirs.bytes_down, theirs.flops)
            assert ours.bytes_edge_cloud > 0
        served = bench.method.models_for(edged.state, None)
        assert served.keys()


class TestTheCloud:
    def test_with_all_clients_and_a_cloud_average_in_every_round_it_is_fedavg(self):
        whole = {"cohort": 6, "batch_size": 100}  # samples have another order at other edges, which has no effect here
        flat, _ = run_method("fedavg", **whole)
        edged, _ = run_method("fedavg", **whole, edges="3", cloud_every_rounds=1)
        for edge in edge_states(edged.state):
            assert tree.max_abs_difference(edge.models["global"], flat.state.models["global"]) < 1e-6

    def test_edges_differ_between_cloud_rounds_and_agree_after_one(self):
        apart, _ = run_method("fedavg", rounds=3, of=4, edges="3", cloud_every_rounds=2)
        models = [e.models["global"] for e in edge_states(apart.state)]
        assert tree.max_abs_difference(models[0], models[1]) > 1e-4
        met, _ = run_method("fedavg", rounds=4, edges="3", cloud_every_rounds=2)
        models = [e.models["global"] for e in edge_states(met.state)]
        assert tree.max_abs_difference(models[0], models[1]) == 0

    def test_an_unseen_client_is_served_what_the_cloud_has(self):
        met, bench = run_method("fedavg", rounds=2, edges="3", cloud_every_rounds=2)
        later, _ = run_method("fedavg", rounds=3, of=4, edges="3", cloud_every_rounds=2)
        both = [bench.method.models_for(r.state, None)["global"] for r in (met, later)]
        assert tree.max_abs_difference(*both) == 0
        first, _ = run_method("fedavg", rounds=1, of=4, edges="3", cloud_every_rounds=2)
        begun = bench.method.init(4).models["global"]
        assert tree.max_abs_difference(bench.method.models_for(first.state, None)["global"], begun) == 0

    def test_an_unseen_client_is_served_what_the_cloud_had_before_edges_formed_clusters(self):
        """Edges form clusters in round 1, the second is the larger one, and the first cloud average is in round 2."""
        keys = {"edges": "2", "cloud_every_rounds": 2, "cohort": 4, "set": {"cluster": {"radius": 0.4}}}
        federation = tiny_federation(9, classes=2)
        result, bench = run_method("represent=labels,cluster=dbscan", federation, rounds=1, of=2, **keys)
        assert len(result.state.models) > 2
        (first,) = result.state.memory[CLOUD]["models"].values()
        assert tree.max_abs_difference(bench.method.models_for(result.state, None)["expert"], first) == 0

    def test_edges_are_weighted_by_samples(self):
        state = edged_state([{"global": 1.0}, {"global": 4.0}], rows=[10, 20])
        after = AverageEdgeModels(1).fold(state, {}, 0)
        # (10 * 1 + 20 * 4) / 30 = 3
        assert [float(e.models["global"]["w"]) for e in edge_states(after)] == [3.0, 3.0]
        assert float(after.memory[CLOUD]["models"]["global"]["w"]) == 3.0
        assert after.edge_exchanges.keys() == {"edge-000", "edge-001"}

    def test_models_are_averaged_with_the_closest_reference_model(self):
        """Edge 0 has three models and is the reference; edge 1 has two, of equally many clients."""
        state = edged_state([{"a": 0.0, "b": 10.0, "c": 20.0}, {"a": 12.0, "b": 1.0}], rows=[30, 10])
        after = AverageEdgeModels(1).fold(state, {}, 0)
        # fractions: a third of 30 samples each, half of 10 each: b (10 * 10 + 5 * 12) / 15, a (10 * 0 + 5 * 1) / 15
        zero, one = ({k: float(m["w"]) for k, m in e.models.items()} for e in edge_states(after))
        assert zero == pytest.approx({"a": 1 / 3, "b": 160 / 15, "c": 20.0})
        assert one == pytest.approx({"a": 160 / 15, "b": 1 / 3})

    def test_models_are_weighted_by_members(self):
        state = edged_state([{"a": 0.0, "b": 10.0}, {"a": 1.0}], rows=[30, 10])
        member = {"c0": torch.tensor([1.0, 0.0, 0.0]), "c1": torch.tensor([0.0, 0.0, 1.0])}
        after = AverageEdgeModels(1).fold(replace(state, membership=member), {}, 0)
        # no client of edge 0 is in b, so all of its 30 samples are in a: (30 * 0 + 10 * 1) / 40; no client trained b
        assert [float(m["w"]) for m in edge_states(after)[0].models.values()] == [0.25, 10.0]
        assert {c: m.tolist() for c, m in after.membership.items()} == {c: m.tolist() for c, m in member.items()}

    def test_nothing_is_averaged_before_sample_counts_are_reported(self):
        state = edged_state([{"global": 1.0}, {"global": 4.0}], rows=[0, 0])
        assert AverageEdgeModels(1).fold(state, {}, 0) is state

    def test_due(self):
        assert [r for r in range(12) if AverageEdgeModels(5, 12).due(r)] == [4, 9, 11], "and after the last round"
        assert [r for r in range(12) if AverageEdgeModels(5).due(r)] == [4, 9]


def edged_state(models, rows):
    """A state with an edge for each dict of models of one number, and one client with `rows` samples at each edge."""
    clients = tuple(f"c{k}" for k in range(len(models)))
    table = ClientTable(clients, {"edge": torch.arange(len(models)), "rows": torch.tensor(rows)})
    named = {f"{edge_name(k)}/{n}": {"w": torch.tensor(w)} for k, of in enumerate(models) for n, w in of.items()}
    return ServerState(0, named, roster=clients, memory={EDGES: table.to_tree()})


class TestEdgeStates:
    def test_merging_inverts_splitting(self):
        result, _ = run_method("fedepc", tiny_federation(8), rounds=2, of=9, edges="2", cloud_every_rounds=9)
        state = replace(result.state, roster=tuple(f"c{i}" for i in range(8)))
        back = merge_edge_states(state, edge_states(state))
        assert tree.max_abs_difference(back.models, state.models) == 0
        assert tree.max_abs_difference(back.membership, state.membership) == 0
        assert tree.max_abs_difference(back.memory, state.memory) == 0
        assert set(back.membership) == {c for e in edge_states(state) for c in e.membership}

    def test_an_edge_sees_its_own_clients_only(self):
        state = edged_state([{"global": 1.0}, {"global": 4.0}], rows=[1, 1])
        one, two = edge_states(replace(state, cohort=("c1",)))
        assert (one.roster, one.cohort, two.roster, two.cohort) == (("c0",), (), ("c1",), ("c1",))

    def test_no_edges_yet(self):
        assert edge_states(ServerState(0, {"global": {}})) == []


class TestAssignment:
    ROSTER = tuple(f"c{i}" for i in range(10))

    def assigned(self, topology, state=None, roster=ROSTER, seed=0):
        state = state or ServerState(0, {"global": {"w": torch.zeros(1)}})
        after = AssignEdges(topology).fold(replace(state, roster=roster), {}, seed)
        table = ClientTable.load(after, EDGES)
        return after, table.to_dict("edge")

    def test_random_edges_have_equal_sizes(self):
        for seed in range(5):
            _, of = self.assigned(Topology(3), seed=seed)
            assert sorted(np.bincount(list(of.values())).tolist()) == [3, 3, 4]
        assert self.assigned(Topology(3), seed=0)[1] != self.assigned(Topology(3), seed=1)[1]
        assert self.assigned(Topology(3))[1] == self.assigned(Topology(3), roster=self.ROSTER[::-1])[1]

    def test_all_begin_with_the_first_models(self):
        after, _ = self.assigned(Topology(3))
        assert sorted(after.models) == ["edge-000/global", "edge-001/global", "edge-002/global"]

    def test_late_clients_join_the_smallest_edge_and_no_client_moves(self):
        state, of = self.assigned(Topology(3), roster=self.ROSTER[:7])
        small = np.bincount(list(of.values())).argmin()
        _, later = self.assigned(Topology(3), state)
        assert {c: later[c] for c in of} == of
        assert sorted(np.bincount(list(later.values())).tolist()) == [3, 3, 4]
        assert later["c7"] == small

    def test_by_column_values(self):
        places = {"c0": "north", "c1": "south", "c2": "north"}
        _, of = self.assigned(Topology(2, "column", column_values=places), roster=("c0", "c1", "c2"))
        assert of == {"c0": 0, "c1": 1, "c2": 0}
        with pytest.raises(UserError, match=r"Client 'c3' has no edge server"):
            self.assigned(Topology(2, "column", column_values=places), roster=("c0", "c3"))

    def with_labels(self, clients):
        """Half of the clients have the first class, half the second."""
        rows = {c: {"labels": torch.tensor([1.0, 0.0] if int(c[1:]) % 2 else [0.0, 1.0])} for c in clients}
        return ServerState(
            0, {"global": {"w": torch.zeros(1)}}, memory={EDGE_LABEL_STAGE: ClientTable.from_rows(rows).to_tree()}
        )

    def test_similar(self):
        state, of = self.assigned(Topology(2, "similar"), self.with_labels(self.ROSTER[:6]))
        assert len(of) == 6, "a client that has not reported its labels has no edge yet"
        assert len({of[c] for c in ("c0", "c2", "c4")}) == len({of[c] for c in ("c1", "c3", "c5")}) == 1
        assert of["c0"] != of["c1"]
        with_labels = self.with_labels(self.ROSTER).memory[EDGE_LABEL_STAGE]
        _, later = self.assigned(
            Topology(2, "similar"), replace(state, memory={**state.memory, EDGE_LABEL_STAGE: with_labels})
        )
        assert (later["c8"], later["c9"]) == (of["c0"], of["c1"])

    def test_diverse(self):
        _, of = self.assigned(Topology(2, "diverse"), self.with_labels(self.ROSTER[:8]))
        for edge in (0, 1):
            parities = [int(c[1:]) % 2 for c, k in of.items() if k == edge]
            assert sorted(parities) == [0, 0, 1, 1]

    def test_without_present_clients(self):
        assert self.assigned(Topology(3), roster=())[1] == {}

    def test_a_client_without_an_edge_is_served_by_the_cloud(self):
        result, bench = run_method("fedavg", edges="2", cloud_every_rounds=1)
        served = bench.method.models_for(result.state, "a stranger")
        assert tree.max_abs_difference(served["global"], result.state.memory[CLOUD]["models"]["global"]) == 0


class TestMethodsUnderEdges:
    @pytest.mark.parametrize("method", UNDER_EDGES)
    def test_each_edge_trains_its_own_clients(self, method):
        result, _ = run_method(method, tiny_federation(8), edges="2", cloud_every_rounds=2, cohort=4)
        pages = [p for p in result.ledger.entries if p.edge]
        of = {c: e["edge"] for e in clients_by_edge(result.state) for c in e["clients"]}
        assert {p.edge for p in pages} == {"edge-000", "edge-001"}
        assert all(of[c] == p.edge for p in pages for c in p.clients)
        assert np.isfinite([s.accuracy for s in result.evaluation.clients.values()]).all()
        assert len(result.evaluation.clients) == 8

    def test_an_edge_has_its_share_of_the_cohort_and_one_at_least(self):
        result, _ = run_method("fedavg", tiny_federation(8), rounds=1, edges="2", cohort=5)
        assert result.rounds[0].cohort_size == 4  # 5 * 4 / 8, rounded down, at both
        result, _ = run_method("fedavg", tiny_federation(8), rounds=1, edges="4", cohort=1)
        assert result.rounds[0].cohort_size == 4

    def test_one_client_per_edge_is_enough_for_contributions(self):
        """For a single client all information is 0."""
        federation = tiny_federation()
        federation.public_samples = tiny_federation(seed=1)["c5"]["train"]
        result, _ = run_method("apcsma", federation, edges="6", cohort=6, cloud_every_rounds=2)
        assert all(bool(torch.isfinite(x).all()) for x in tree.leaves(result.state.models))
        assert result.rounds[-1].metrics["edge-000.train.coefficient_num"] == pytest.approx(1 / 6)

    @pytest.mark.parametrize("method", ["local", "centralised"])
    def test_methods_without_anything_to_average_are_refused(self, method):
        with pytest.raises(UserError, match=f"method {method} cannot run with edges"):
            run_method(method, edges="2")

    def test_hierfavg_is_fedavg_under_five_edges(self):
        ours, bench = run_method("hierfavg", tiny_federation(8))
        theirs, _ = run_method("fedavg", tiny_federation(8), edges="5")
        assert tree.max_abs_difference(ours.state.models, theirs.state.models) == 0
        assert (bench.method.name, bench.job.edges, bench.job.cloud_every_rounds) == ("hierfavg", "random:5", 5)
        two, _ = run_method("hierfavg", tiny_federation(8), edges="2", cloud_every_rounds=1)
        assert len(edge_states(two.state)) == 2
        _, often = run_method("hierfavg", tiny_federation(8), cloud_every_rounds=2)
        assert (often.job.edges, often.job.cloud_every_rounds) == ("random:5", 2)

    @pytest.mark.parametrize("fleet", ["plain", "vector", "pool", "flower"])
    def test_every_edge_fine_tunes_for_the_epochs_that_its_own_clients_chose(self, fleet):
        """The operations of fine-tuning are those of one epoch times the number of epochs."""
        tuned = {"personalise": {"search": True, "epochs_grid": "1,4", "lr_grid": "0.05"}}
        federation = tiny_federation(8)
        result, _ = run_method("fedavg-ft", federation, rounds=1, edges="2", set=tuned, fleet=fleet)
        chosen = {k: result.rounds[0].metrics[f"{k}.tune.epochs"] for k in ("edge-000", "edge-001")}
        assert sorted(chosen.values()) == [1.0, 4.0], "the edges must differ to show anything"
        done = {
            client: flops / (chosen[page.edge] * len(federation[client]["train"].y))
            for page in result.ledger.entries
            if page.stage == "personalise"
            for client, flops in zip(page.clients, page.flops.tolist(), strict=True)
        }
        assert len(done) == 8
        assert len(set(done.values())) == 1, done

    @pytest.mark.parametrize("by", ["similar", "diverse"])
    def test_clients_report_their_labels_before_they_are_assigned(self, by):
        result, bench = run_method("fedavg", tiny_federation(8), edges=f"{by}:2")
        asked = [p for p in result.ledger.entries if p.stage == EDGE_LABEL_STAGE]
        assert [len(p.clients) for p in asked] == [8]
        assert any("label distributions" in note for note in bench.method.notes)


def clients_by_edge(state):
    table = ClientTable.load(state, EDGES)
    of = table["edge"].tolist()
    return [
        {"edge": edge_name(k), "clients": [c for c, e in zip(table.clients, of, strict=True) if e == k]}
        for k in range(max(of) + 1)
    ]


class TestCostsOfEdges:
    @pytest.mark.parametrize(("every", "meetings"), [(1, 4), (2, 2), (3, 2), (9, 1)])
    def test_bytes_of_the_cloud_link(self, every, meetings):
        """The number of cloud rounds * 2 * edges * 4 bytes a parameter, and the headers of the messages."""
        result, bench = run_method("fedavg", rounds=4, edges="3", cloud_every_rounds=every)
        numbers = meetings * 2 * 3 * 4 * bench.model.num_parameters
        sent = sum(r.bytes_edge_cloud for r in result.rounds)
        assert numbers <= sent <= numbers + meetings * 2 * 3 * 800
        assert sent == sum(
            int(p.bytes_up.sum() + p.bytes_down.sum()) for p in result.ledger.entries if p.link == EDGE_CLOUD
        )

    def test_bytes_of_the_paper_s_network(self):
        """P = 159,010, five edges, 60 rounds: 381.6, 76.3 and 19.1 MB with a cloud average every 1, 5 and 20 rounds."""
        layer = {"a": torch.zeros(784, 200), "b": torch.zeros(200), "c": torch.zeros(200, 10), "d": torch.zeros(10)}
        ledger = Ledger()
        relays = {f"edge-{k:03d}": EdgeExchange(Report({"global": layer}), Task({"global": layer})) for k in range(5)}
        ledger.record_edge_exchanges(1, "cloud", "training", relays)
        (page,) = ledger.entries
        sent = int(page.bytes_up.sum() + page.bytes_down.sum())
        for every, megabytes in ((1, 381.6), (5, 76.3), (20, 19.1)):
            assert 60 // every * sent / 1e6 == pytest.approx(megabytes, rel=3e-3)

    def test_joules_of_the_cloud_link_belong_to_no_client(self):
        result, _ = run_method("fedavg", edges="3", cloud_every_rounds=1)
        spent = result.ledger.joules_by_client()
        assert set(spent) <= {f"c{i}" for i in range(6)}
        for record in result.rounds:
            assert record.joules["cloud_link"] > 0
        clients = sum(sum(parts.values()) for parts in spent.values())
        assert result.ledger.total_joules == pytest.approx(clients)

    def test_seconds_of_a_link(self):
        ledger = Ledger(CostModel(cloud_link=LINKS["lte-m"]))
        model = {"w": torch.zeros(1000)}
        ledger.record_edge_exchanges(
            1, "cloud", "training", {"edge-000": EdgeExchange(Report({"m": model}), Task({"m": model}))}
        )
        (page,) = ledger.entries
        # 300 kb/s down, 375 kb/s up
        expected = 8 * page.bytes_down[0] / 300e3 + 8 * page.bytes_up[0] / 375e3
        assert page.radio_s[0] == pytest.approx(expected)

    def test_ledger_entries_are_read_as_they_are_written(self):
        result, _ = run_method("fedavg", edges="2", cloud_every_rounds=1)
        for page in result.ledger.entries:
            assert LedgerEntry.from_json(page.to_json()) == page
            assert LedgerEntry.from_json(page.to_json()).edge == page.edge
        again = Ledger(result.ledger.costs, list(result.ledger.entries))
        assert again.round_duration_s == result.ledger.round_duration_s

    def test_without_edges_no_entry_names_one(self):
        result, _ = run_method("fedavg")
        assert all(page.to_json().keys().isdisjoint({"edge", "link"}) for page in result.ledger.entries)
        assert all("bytes_edge_cloud" not in r.to_json() and "cloud_link" not in r.joules for r in result.rounds)


class TestTheClock:
    def test_edges_work_at_the_same_time(self):
        clock = EdgeClock()
        # a works 3 s, b 5 s, a 4 s: a ends at 7 s, b at 5 s
        assert [clock.advance(*x) for x in (("a", 3.0), ("b", 5.0), ("a", 4.0))] == [3.0, 2.0, 2.0]
        # b continues from 5 s to 6 s, which is before the end of a, so no time passes; then to 10 s
        assert [clock.advance("b", 1.0), clock.advance("b", 4.0)] == [0.0, 3.0]
        # c has not worked since the beginning: it needs more than 10 s to be the last
        assert [clock.advance("c", 4.0), clock.advance("c", 8.0)] == [0.0, 2.0]
        # all wait for each other
        assert clock.advance("", 1.5) == 1.5
        assert [clock.advance("a", 2.0), clock.advance("d", 3.0)] == [2.0, 1.0]

    def test_a_run_takes_as_long_as_its_slowest_edge_between_cloud_rounds(self):
        result, bench = run_method("fedavg", rounds=4, edges="2", cloud_every_rounds=2)
        worked = {}
        for page in result.ledger.entries:
            if page.edge and page.round <= 2:
                worked[page.edge] = worked.get(page.edge, 0.0) + bench.costs.duration_s(page.seconds)
        long_s = next(float(p.seconds.max()) for p in result.ledger.entries if p.link == EDGE_CLOUD)
        two = sum(r.sim_time_s for r in result.rounds[:2])
        assert two == pytest.approx(max(worked.values()) + long_s)
        assert len(worked) == 2

    def test_one_server_is_as_before(self):
        ledger = Ledger(CostModel())
        task, report = Task({"m": {"w": torch.zeros(8)}}), Report(flops=10**9)
        late = ledger.record_stage(
            1, "train", "training", Plan(None, {"a": task, "b": task}), {"a": report, "b": report}
        )
        ledger.record_stage(1, "update", "training", Plan(None, {"a": task}), {"a": report})
        assert not late
        assert ledger.round_duration_s[1] == sum(ledger.costs.duration_s(p.seconds) for p in ledger.entries)

    def test_a_deadline_is_each_edge_s(self):
        ledger = Ledger(CostModel(deadline_s=1.0))
        task = Task({"m": {"w": torch.zeros(8)}})
        reports = {"a": Report(flops=1), "b": Report(flops=10**13)}
        plan = Plan(None, dict.fromkeys(reports, task), edge_of_client={"a": "edge-000", "b": "edge-001"})
        assert ledger.record_stage(1, "train", "training", plan, reports) == {"b"}
        assert [p.edge for p in ledger.entries] == ["edge-000", "edge-001"]
        assert ledger.round_duration_s[1] == 1.0


class TestJobs:
    def test_the_result_lists_the_edges(self, tmp_path):
        job = Job(
            method="fedavg",
            clients=6,
            max_train_samples=300,
            rounds=2,
            cohort=3,
            epochs=1,
            edges="diverse:3",
            cloud_every_rounds=1,
        )
        found = run_job(job, tmp_path / "run")
        assert [len(e["clients"]) for e in found["edges"]] == [2, 2, 2]
        assert found["bytes_edge_cloud"] > 0
        assert found["joules"]["total"] == pytest.approx(sum(v for k, v in found["joules"].items() if k != "total"))

    def test_by_a_column(self, tmp_path):
        rng = np.random.default_rng(0)
        client = np.repeat(["a", "b", "c", "d"], 40)
        edge = np.repeat(["north", "south"], 80)
        x, y = rng.normal(size=(160, 3)), rng.integers(0, 2, 160)
        lines = [f"{x[i, 0]},{x[i, 1]},{x[i, 2]},{y[i]},{client[i]},{edge[i]}" for i in range(160)]
        (tmp_path / "t.csv").write_text("\n".join(["u,v,w,label,who,where", *lines]))
        keys = {"data": str(tmp_path / "t.csv"), "client_column": "who", "edge_column": "where", "rounds": 2}
        found = run_job(make_job({"method": "fedavg", **keys}), tmp_path / "run")
        assert [e["clients"] for e in found["edges"]] == [["a", "b"], ["c", "d"]]
        assert [e["name"] for e in found["edges"]] == ["north", "south"]
        federation = partition(load(keys["data"], client_column="who", edge_column="where"), "natural", seed=0)
        assert federation.edge_of_client == {"a": "north", "b": "north", "c": "south", "d": "south"}
        assert federation.input_shape == (3,), "the column is no feature"
        result = run("fedavg", federation, edges="column", rounds=1)
        assert len(edge_states(result.state)) == 2

    def test_a_client_is_at_one_edge(self, tmp_path):
        lines = [f"{i % 7},{i % 2},{'ab'[i % 2]},{'ns'[i % 3 == 0]}" for i in range(60)]
        (tmp_path / "t.csv").write_text("\n".join(["u,label,who,where", *lines]))
        with pytest.raises(
            UserError,
            match=r"client '.' has samples under the edges '.' and '.'\. All its samples must have the same edge",
        ):
            load(str(tmp_path / "t.csv"), client_column="who", edge_column="where")

    @pytest.mark.parametrize(
        ("keys", "sentence"),
        [
            ({"edges": "x"}, "edges is 'x'. It must be the number of edge servers, such as 5"),
            ({"edges": "0"}, "edges is '0'"),
            ({"edges": "near:3"}, "edges is 'near:3'"),
            ({"edges": "3", "cloud_every_rounds": 0}, "cloud_every_rounds is 0: it must be at least 1"),
            ({"cloud_every_rounds": 3}, "cloud_every_rounds is 3, but there are no edge servers. Add --edges"),
            ({"cloud_link": "wifi"}, "cloud_link is 'wifi', but there are no edge servers"),
            ({"edges": "3", "cloud_link": "pigeon"}, "link 'pigeon' is not known"),
            ({"edges": "30"}, "edges is 30, but there are only 20 clients. Use fewer edge servers"),
            ({"edges": "column"}, "edges is 'column', but the data do not name the edge server of each client"),
            (
                {"edge_column": "where"},
                "edge_column is 'where', but partition 'dirichlet:0.3' does not keep the clients of the data",
            ),
            ({"method": "local", "edges": "2"}, "method local cannot run with edges"),
        ],
    )
    def test_refused(self, keys, sentence, tmp_path):
        with pytest.raises(UserError) as error:
            run_job(make_job({"rounds": 1, **keys}), tmp_path / "run")
        assert sentence in str(error.value)
        assert not (tmp_path / "run").exists()

    def test_numbers_and_none_are_understood(self):
        assert [make_job({"edges": x}).edges for x in (5, "5", "none", None)] == ["5", "5", None, None]

    def test_parsed(self):
        assert [parse_edges(t, {}) for t in ("5", "random:2", "similar:3", " diverse:4")] == [
            (5, "random"),
            (2, "random"),
            (3, "similar"),
            (4, "diverse"),
        ]

    def test_a_method_s_options_are_as_without_edges(self):
        model = load_model("mlp", (3,), 2)
        with pytest.raises(UserError, match=r"option train\.nothing is not known"):
            build("fedavg", Setting(model, 3, 2, options={"train": {"nothing": 1}}, edges=Topology(2)))


class TestServing:
    def test_unseen_clients_are_served_by_the_cloud(self, tmp_path):
        keys = {"clients": 8, "max_train_samples": 400, "rounds": 2, "cohort": 4, "epochs": 1, "unseen": 2}
        run_job(make_job({"method": "fedavg", **keys, "edges": "2", "cloud_every_rounds": 1}), tmp_path / "run")
        found = evaluate_unseen_clients(tmp_path / "run")
        assert found["num_unseen_clients"] == 2
        assert 0 <= found["accuracy"]["local"] <= 1

    def test_the_service_predicts_with_the_model_of_the_cloud(self, tmp_path):
        keys = {"clients": 6, "max_train_samples": 300, "rounds": 2, "cohort": 3, "epochs": 1}
        run_job(make_job({"method": "fedavg", **keys, "edges": "3", "cloud_every_rounds": 1}), tmp_path / "run")
        state = Checkpoints(tmp_path / "run" / "checkpoints").load(2).state
        version = ModelVersion(Blueprint.from_run(tmp_path / "run"), state)
        x = torch.randn(3, *version.blueprint.inputs.shape)
        (with_labels,) = version.predict_batch([PredictRequest(x, None)])
        expected = version.blueprint.model.predict(state.memory[CLOUD]["models"]["global"], x)
        assert torch.allclose(with_labels[1].probabilities, expected.softmax(-1), atol=1e-5)
