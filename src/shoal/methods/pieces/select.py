"""Who takes part in a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.client.measure import Measure
from shoal.client.probe import LossProbe
from shoal.methods.draft import Draft, Piece
from shoal.methods.fedavg import by_chance
from shoal.methods.pieces.contribution import coefficients
from shoal.methods.pieces.represent import told_labels
from shoal.selectors.groups import one_of_each, whole_groups
from shoal.stages.balanced import Balanced
from shoal.stages.budgeted import Budgeted
from shoal.stages.cluster import Group, Repulsive, Similar
from shoal.stages.contribution import MEASURE, ByContribution
from shoal.stages.ensemble import InTurn
from shoal.stages.experts import expert_for
from shoal.stages.represent import AskOnce
from shoal.stages.select import FromGroups

OWN = "groups"  # the stage that forms groups to choose from, where the cluster step forms others


def random(d: Draft) -> None:
    d.stages["select"] += by_chance(d.s)


def from_groups(rule: Callable[..., object]) -> Callable[[Draft], None]:
    def lay(d: Draft) -> None:
        d.stages["select"].append(FromGroups(rule, size=d.s.cohort))  # type: ignore[arg-type]

    return lay


def by_labels(grouping: type[Similar] | type[Repulsive], rule: Callable[..., object]) -> Callable[[Draft], None]:
    """Groups of its own, by labels: beside whatever the cluster step does."""

    def lay(d: Draft) -> None:
        groups = Group(d.s.make(OWN, grouping, cohort=d.s.cohort), column="labels", source=told_labels(d), name=OWN)
        d.stages["select"] += [groups, FromGroups(rule, size=d.s.cohort, source=OWN)]  # type: ignore[arg-type]

    return lay


def bandit(d: Draft) -> None:
    choose = d.s.make("select", Budgeted)
    if choose.asks:
        probe = LossProbe(d.s.model)
        d.stages["select"].append(AskOnce(probe, expert_for, every=1, after=d.made.get("warmup", 0), name="probe"))
    d.stages["select"].append(choose)


def contribution(d: Draft) -> None:
    select = d.s.make("select", ByContribution, size=d.s.cohort, coefficients=coefficients(d))
    fresh, cold = select.metrics == "fresh", select.start == "cold"
    if fresh or cold:
        reuse, split = d.has("personalise", "update"), d.made["split"]
        ask = AskOnce(Measure(d.s.model, split), d.trains, every=int(fresh), after=int(not cold), name=MEASURE)
        d.stages["select"].append(replace(ask, reuse=reuse))
    d.stages["select"].append(select)


def turns(d: Draft) -> None:
    d.stages["select"].append(d.s.make("select", InTurn))


def balanced(d: Draft) -> None:
    d.stages["select"].append(d.s.make("select", Balanced, size=d.s.cohort, source=told_labels(d)))


TOLD = ("its label distribution", "nothing", "how often each label occurs with each client")
PIECES = {
    "random": Piece(random, "McMahan et al. 2017", single=False),
    "one-of-each": Piece(
        from_groups(one_of_each),
        "paper 002, Sec. III-A",
        needs={"cluster": ("similar", "repulsive")},
        why="clients are taken out of groups",
        single=False,
    ),
    "whole-groups": Piece(
        from_groups(whole_groups),
        "paper 002, Sec. III-B",
        needs={"cluster": ("similar", "repulsive")},
        why="clients are taken out of groups",
        single=False,
    ),
    "simclust": Piece(by_labels(Similar, one_of_each), "paper 002, Sec. III-A", *TOLD, single=False),
    "repclust": Piece(by_labels(Repulsive, whole_groups), "paper 002, Sec. III-B, Alg. 1", *TOLD, single=False),
    "bandit": Piece(
        bandit,
        "paper 000, Eq. 9-12, Alg. 3 (CICS)",
        sends="its loss on its group's model",
        keeps="its group's model",
        tells="losses, times, and how far each client's model moved",
        needs={
            "cluster": ("aidc", "dbscan"),
            "represent": ("sparsity", "labels"),
            "aggregate": ("mean", "momentum"),
        },
        says="how many take part follows from a time budget (select.share), not from the cohort",
        why="a set is chosen in each group of clients, known before anybody trains, by what the last "
        "round's training changed",
    ),
    "contribution": Piece(
        contribution,
        "paper 003, Eq. 1-11, Alg. 1",
        sends="accuracy and loss on its own rows after training",
        tells="how good each client's model is, and its number of rows; the last model of everybody is kept",
        needs={"cluster": ("none",)},
        why="contributions are to one model that all share",
    ),
    "turns": Piece(
        turns,
        "paper 004, Alg. 2, 18-21, and Sec. 4",
        needs={"cluster": ("aidc", "dbscan")},
        why="it is members of clusters who take turns",
        says="how many take part is select.take and select.share of each cluster, not the cohort",
        single=False,
    ),
    "balanced": Piece(balanced, "shoal's own", *TOLD, single=False),
}
