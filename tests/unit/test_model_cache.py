"""What clients keep is not sent again."""

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


def answered(*clients):
    return {c: Report() for c in clients}


class TestDigest:
    def test_of_content(self):
        assert model_cache.digest(A) == model_cache.digest({"w": torch.tensor([1.0, 2.0])})
        assert model_cache.digest(A) == model_cache.digest({"w": torch.tensor([1.0, 9.0, 2.0])[::2]})

    def test_tells_apart(self):
        others = [B, {"v": A["w"]}, {"w": A["w"].reshape(2, 1)}, {"w": A["w"].int()}, {**A, "b": torch.zeros(0)}]
        assert len({model_cache.digest(m) for m in (A, *others)}) == 6


class TestMarks:
    def test_what_was_answered_is_held(self):
        state = ServerState(0, {})
        first = model_cache.mark_cached_models(plan(x={"a": A}, y={"a": A, "b": B}), state)
        assert not any(t.cached for t in first.tasks.values())
        state = model_cache.remember_sent_models(state, first, answered("x", "y"))
        second = model_cache.mark_cached_models(plan(x={"k": A, "l": B}, y={"k": B}, z={"k": A}), state)
        assert {c: set(t.cached) for c, t in second.tasks.items()} == {"x": {"k"}, "y": {"k"}, "z": set()}

    def test_only_the_last_task_is_kept(self):
        state = ServerState(0, {})
        for models in ({"a": A}, {"a": B}):
            p = model_cache.mark_cached_models(plan(x=models), state)
            state = model_cache.remember_sent_models(state, p, answered("x"))
        again = model_cache.mark_cached_models(plan(x={"a": A, "b": B}), state)
        assert again.tasks["x"].cached == {"b"}

    def test_of_the_silent_nothing_is_known(self):
        state, p = ServerState(0, {}), plan(x={"a": A}, y={"a": A})
        state = model_cache.remember_sent_models(state, model_cache.mark_cached_models(p, state), answered("x", "y"))
        state = model_cache.remember_sent_models(state, model_cache.mark_cached_models(p, state), answered("y"))
        assert {c: set(t.cached) for c, t in model_cache.mark_cached_models(p, state).tasks.items()} == {
            "x": set(),
            "y": {"a"},
        }

    def test_other_plans_are_left_alone(self):
        state, p = ServerState(0, {}), replace(plan(x={"a": A}), reuse=False)
        assert model_cache.mark_cached_models(p, state) is p
        assert model_cache.remember_sent_models(state, p, answered("x")) is state


class TestWire:
    def test_what_is_held_does_not_travel(self):
        big = {"w": torch.randn(1000)}
        task = Task({"a": big, "b": A}, {"lr": 0.5}, 3, {"a": model_cache.digest(big), "b": model_cache.digest(A)})
        held = replace(task, cached=frozenset("a"))
        whole, less = codec.encode_task(task), codec.encode_task(held)
        assert len(whole) - len(less) >= 4000
        assert (len(whole), len(less)) == (codec.task_bytes(task), codec.task_bytes(held))
        assert big["w"].numpy().tobytes() not in less
        back = codec.decode_task(less, {model_cache.digest(big): big})
        assert torch.equal(back.models["a"]["w"], big["w"])
        assert (back.config, back.seed, back.digests, back.cached) == ({"lr": 0.5}, 3, task.digests, {"a"})
        assert codec.decode_task(whole).cached == frozenset()

    def test_a_model_that_is_gone(self):
        task = Task({"a": A}, digests={"a": 1}, cached=frozenset("a"))
        with pytest.raises(codec.MissingModel):
            codec.decode_task(codec.encode_task(task), {2: A})

    def test_messages_without_digests_are_as_they_were(self):
        assert len(codec.encode_task(Task({"a": A}, {"lr": 1.0}))) == codec.task_bytes(Task({"a": A}, {"lr": 1.0}))
        assert b"digests" not in codec.encode_task(Task({"a": A}))


def test_who_lost_its_models_is_sent_them_again(tiny, caplog):
    """Two rounds on a fleet whose clients start anew before the second, as after a restart."""
    model = load_model("mlp", (6,), 4)
    method = build("scmoe", Setting(model, rounds=2, cohort_size=6, batch_size=8))
    program = method.programs["personalise"]
    models = {"expert-000": model.init(0)}
    tasks = {c: Task(models, {}, 1, {"expert-000": model_cache.digest(models["expert-000"])}) for c in tiny}
    first = loopback_fleet(method, tiny)
    first.execute(Plan(program, tasks))
    held = {c: replace(t, cached=frozenset(models)) for c, t in tasks.items()}
    assert set(first.execute(Plan(program, held))) == set(tiny)
    assert "no longer have models" not in caplog.text
    assert set(loopback_fleet(method, tiny).execute(Plan(program, held))) == set(tiny)
    assert "no longer have models" in caplog.text
