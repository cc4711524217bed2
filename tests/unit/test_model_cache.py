"""Models that clients have cached are not sent again."""

from dataclasses import replace

import pytest
import torch

from shoal import codec, model_cache
from shoal.deploy.loopback import loopback_fleet
from shoal.methods import Setting, build
from shoal.models import load_model
from shoal.types import Plan, Report, ServerState, Task

A, B = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 3.0])}


def plan(**tasks):
    return Plan(None, {c: Task(models) for c, models in tasks.items()}, cache_models=True)


def empty_reports(*clients):
    return {c: Report() for c in clients}


class TestDigest:
    def test_equal_contents_have_equal_digests(self):
        assert model_cache.digest(A) == model_cache.digest({"w": torch.tensor([1.0, 2.0])})
        assert model_cache.digest(A) == model_cache.digest({"w": torch.tensor([1.0, 9.0, 2.0])[::2]})

    def test_different_models_have_different_digests(self):
        others = [B, {"v": A["w"]}, {"w": A["w"].reshape(2, 1)}, {"w": A["w"].int()}, {**A, "b": torch.zeros(0)}]
        assert len({model_cache.digest(m) for m in (A, *others)}) == 6


class TestCachedModels:
    def test_models_are_cached_after_a_report(self):
        state = ServerState(0, {})
        first = model_cache.mark_cached_models(plan(x={"a": A}, y={"a": A, "b": B}), state)
        assert not any(t.cached for t in first.tasks.values())
        state = model_cache.remember_sent_models(state, first, empty_reports("x", "y"))
        second = model_cache.mark_cached_models(plan(x={"k": A, "l": B}, y={"k": B}, z={"k": A}), state)
        assert {c: set(t.cached) for c, t in second.tasks.items()} == {"x": {"k"}, "y": {"k"}, "z": set()}

    def test_only_the_models_of_the_last_task_are_cached(self):
        state = ServerState(0, {})
        for models in ({"a": A}, {"a": B}):
            p = model_cache.mark_cached_models(plan(x=models), state)
            state = model_cache.remember_sent_models(state, p, empty_reports("x"))
        again = model_cache.mark_cached_models(plan(x={"a": A, "b": B}), state)
        assert again.tasks["x"].cached == {"b"}

    def test_the_cache_of_a_client_that_did_not_respond_is_unknown(self):
        state, p = ServerState(0, {}), plan(x={"a": A}, y={"a": A})
        state = model_cache.remember_sent_models(
            state, model_cache.mark_cached_models(p, state), empty_reports("x", "y")
        )
        state = model_cache.remember_sent_models(state, model_cache.mark_cached_models(p, state), empty_reports("y"))
        assert {c: set(t.cached) for c, t in model_cache.mark_cached_models(p, state).tasks.items()} == {
            "x": set(),
            "y": {"a"},
        }

    def test_plans_without_caching_stay_as_they_are(self):
        state, p = ServerState(0, {}), replace(plan(x={"a": A}), cache_models=False)
        assert model_cache.mark_cached_models(p, state) is p
        assert model_cache.remember_sent_models(state, p, empty_reports("x")) is state


class TestMessages:
    def test_cached_models_are_not_sent(self):
        big = {"w": torch.randn(1000)}
        task = Task({"a": big, "b": A}, {"lr": 0.5}, 3, {"a": model_cache.digest(big), "b": model_cache.digest(A)})
        cached = replace(task, cached=frozenset("a"))
        full, short = codec.encode_task(task), codec.encode_task(cached)
        assert len(full) - len(short) >= 4000
        assert (len(full), len(short)) == (codec.task_bytes(task), codec.task_bytes(cached))
        assert big["w"].numpy().tobytes() not in short
        back = codec.decode_task(short, {model_cache.digest(big): big})
        assert torch.equal(back.models["a"]["w"], big["w"])
        assert (back.config, back.seed, back.digests, back.cached) == ({"lr": 0.5}, 3, task.digests, {"a"})
        assert codec.decode_task(full).cached == frozenset()

    def test_a_model_missing_from_the_cache_raises(self):
        task = Task({"a": A}, digests={"a": 1}, cached=frozenset("a"))
        with pytest.raises(codec.MissingModel):
            codec.decode_task(codec.encode_task(task), {2: A})

    def test_messages_without_caching_have_no_digests(self):
        assert len(codec.encode_task(Task({"a": A}, {"lr": 1.0}))) == codec.task_bytes(Task({"a": A}, {"lr": 1.0}))
        assert b"digests" not in codec.encode_task(Task({"a": A}))


def test_a_client_that_lost_its_models_is_sent_them_again(tiny, caplog):
    """The clients restart before the last plan, so their caches are empty."""
    model = load_model("mlp", (6,), 4)
    method = build("scmoe", Setting(model, rounds=2, cohort_size=6, batch_size=8))
    program = method.programs["personalise"]
    models = {"expert-000": model.init(0)}
    tasks = {c: Task(models, {}, 1, {"expert-000": model_cache.digest(models["expert-000"])}) for c in tiny}
    first = loopback_fleet(method, tiny)
    first.execute(Plan(program, tasks))
    cached = {c: replace(t, cached=frozenset(models)) for c, t in tasks.items()}
    assert set(first.execute(Plan(program, cached))) == set(tiny)
    assert "no longer have their cached models" not in caplog.text
    assert set(loopback_fleet(method, tiny).execute(Plan(program, cached))) == set(tiny)
    assert "no longer have their cached models" in caplog.text
