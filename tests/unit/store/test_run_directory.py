import json
import multiprocessing
import shutil

import pytest
import torch

from shoal import tree
from shoal.engine import Evaluation, RoundRecord, RoundTiming
from shoal.errors import UserError
from shoal.metrics import Score
from shoal.store.checkpoint import Checkpoints
from shoal.store.private import PrivateStore
from shoal.store.run_directory import RunStore, evaluation_from_json, evaluation_to_json, round_record_from_json
from shoal.types import ServerState


def state(round_index, value=0.0):
    return ServerState(
        round_index,
        {"b": {"w": torch.full((3,), value)}, "a": {"n": torch.tensor(round_index)}},
        membership={"c/1": torch.tensor([0.25, 0.75])},
        memory={"train": {"deep": {"x": torch.tensor(2.5)}}},
    )


def new_run(path):
    return RunStore.create(path, {"method": "fedavg"}, {"clients": ["c0", "c1"]}, {})


def record(round_index, evaluated=True):
    scores = {"c1": Score(0.5, 1.25, 0.25, 4)}
    evaluation = Evaluation(scores, Score(0.75, 0.5, 0.7, 100)) if evaluated else None
    return RoundRecord(round_index, 2, {"train.loss": 0.5}, 10, 20, evaluation)


def test_checkpoint_round_trip(tmp_path):
    store = Checkpoints(tmp_path)
    store.save(state(3, 1.5), ["000001", "000002-0003"])
    checkpoint = store.load(3)
    assert checkpoint.state.round == 3
    assert checkpoint.private == ["000001", "000002-0003"]
    for part in ("models", "membership", "memory"):
        assert tree.max_abs_difference(getattr(checkpoint.state, part), getattr(state(3, 1.5), part)) == 0


def test_the_last_k_are_kept(tmp_path):
    store = Checkpoints(tmp_path, num_kept=2)
    for r in range(1, 6):
        store.save(state(r), [])
        store.discard_old()
    assert store.rounds() == [4, 5]


@pytest.mark.parametrize("damage", ["truncate", "flip", "no tensors", "no facts", "empty facts"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, caplog, damage):
    store = Checkpoints(tmp_path)
    store.save(state(1, 1.0), [])
    store.save(state(2, 2.0), [])
    tensors, facts = tmp_path / "round-000002/state.safetensors", tmp_path / "round-000002/state.json"
    data = tensors.read_bytes()
    match damage:
        case "truncate":
            tensors.write_bytes(data[:-4])
        case "flip":
            tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "no tensors":
            tensors.unlink()
        case "no facts":
            facts.unlink()
        case "empty facts":
            facts.write_text("")
    checkpoint = store.latest(lambda c: None)
    assert checkpoint is not None
    assert checkpoint.state.round == 1
    assert "checkpoint of round 2 is damaged" in caplog.text


class TestPrivate:
    def test_only_what_changed_is_written(self, tmp_path):
        store = PrivateStore(tmp_path / "private")
        store["a"], store["b"] = {"m": {"w": torch.ones(2)}}, {"m": {"w": torch.zeros(2)}}
        store.save(1)
        store["b"] = {"m": {"w": torch.full((2,), 7.0)}}
        store.save(2)
        store.save(3)  # nothing changed: no file
        assert sorted(p.name for p in store.folder.iterdir()) == [
            "round-000001.safetensors",
            "round-000002.safetensors",
        ]
        fresh = PrivateStore(tmp_path / "private")
        fresh.restore(3)
        assert fresh["a"]["m"]["w"].tolist() == [1, 1]
        assert fresh["b"]["m"]["w"].tolist() == [7, 7]
        assert list(fresh) == ["a", "b"]

    def test_old_files_stay_while_a_checkpoint_points_at_them(self, tmp_path):
        with new_run(tmp_path / "run") as run:
            run.checkpoints.num_kept = 2
            run.private["c0"] = {"x": torch.tensor(1.0)}
            for r in range(1, 6):
                run.private["c1"] = {"x": torch.tensor(float(r))}
                run.append(record(r), [], RoundTiming(0.1, 0.01))
                run.checkpoint(state(r))
            names = sorted(p.name for p in (run.path / "private").iterdir())
            assert names == [f"round-00000{r}.safetensors" for r in (1, 4, 5)]  # the tree of c0 is in the first
        with RunStore.open(tmp_path / "run") as run:
            run.restore()
            assert run.private["c0"]["x"] == 1
            assert run.private["c1"]["x"] == 5

    def test_a_cut_file_means_the_checkpoint_before(self, tmp_path, caplog):
        with new_run(tmp_path / "run") as run:
            for r in (1, 2):
                run.private["c1"] = {"x": torch.full((50,), float(r))}
                run.append(record(r), [], RoundTiming(0.1, 0.01))
                run.checkpoint(state(r))
        path = tmp_path / "run/private/round-000002.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
        with RunStore.open(tmp_path / "run") as run:
            restored = run.restore()
            assert restored.state is not None
            assert restored.state.round == len(restored.rounds) == 1
            assert run.private["c1"]["x"][0] == 1
        assert "cut short" in caplog.text

    def test_an_old_damaged_checkpoint_does_not_stop_a_resume(self, tmp_path):
        with new_run(tmp_path / "run") as run:
            for r in (1, 2, 3):
                run.private["c1"] = {"x": torch.tensor(float(r))}
                run.append(record(r), [], RoundTiming(0.1, 0.01))
                run.checkpoint(state(r))
        (tmp_path / "run/checkpoints/round-000001/state.json").write_text("")
        with RunStore.open(tmp_path / "run") as run:
            restored = run.restore().state
            assert restored is not None
            assert restored.round == 3

    def test_a_file_is_removed_when_no_checkpoint_needs_any_of_its_trees(self, tmp_path):
        with new_run(tmp_path / "run") as run:
            run.checkpoints.num_kept = 2
            both = ("c0", "c1")
            for r in range(1, 8):
                run.private[both[r % 2]] = {"x": torch.tensor(float(r))}
                run.append(record(r), [], RoundTiming(0.1, 0.01))
                run.checkpoint(state(r))
            # checkpoints 6 and 7 are kept, and at round 6 the current trees were those of rounds 5 and 6
            assert sorted(p.name[-18:-12] for p in run.private.folder.iterdir()) == ["000005", "000006", "000007"]

    def test_what_does_not_fit_into_memory_is_read_again(self, tmp_path):
        store = PrivateStore(tmp_path / "private", memory_bytes=900)
        for r in range(1, 6):
            for i in range(10):
                store[f"c/{i}"] = {"m": {"w": torch.full((20,), float(r * 100 + i))}}  # 80 bytes
            store.save(r)
            assert store._memory_used_bytes <= 900
            store["c/0"] = {"m": {"w": torch.full((20,), -1.0)}}  # not yet on disk: must not be forgotten
            assert [float(store[f"c/{i}"]["m"]["w"][0]) for i in range(10)] == [
                -1,
                *(r * 100 + i for i in range(1, 10)),
            ]
        assert len(store) == 10

    def test_a_round_too_large_for_memory_goes_to_disk_in_parts(self, tmp_path):
        def value(store):
            return [float(store[f"c{i}"]["w"][0]) for i in range(12)]

        store = PrivateStore(tmp_path / "private", memory_bytes=400)  # five trees of 80 bytes
        for i in range(12):
            store[f"c{i}"] = {"w": torch.full((20,), float(i))}
            assert store._memory_used_bytes <= 480
        store["c0"] = {"w": torch.full((20,), 100.0)}  # again in the same round: the last one counts
        expected = [100.0, *range(1, 12)]
        assert value(store) == expected
        assert not list(store.folder.glob("round-*"))  # else the round of a killed run would seem complete
        store.save(1)
        assert value(store) == expected
        names = sorted(p.name for p in store.folder.iterdir())
        assert len(names) > 2
        assert all(name.startswith("round-000001") for name in names)
        fresh = PrivateStore(tmp_path / "private", memory_bytes=400)
        fresh.restore(1)
        assert value(fresh) == expected
        assert fresh.files == store.files
        fresh.check(fresh.files)
        for i in range(12):
            fresh[f"c{i}"] = {"w": torch.full((20,), float(-i))}
        fresh.restore(1)  # the round was not finished
        assert value(fresh) == expected
        for i in range(12):
            fresh[f"c{i}"] = {"w": torch.full((20,), float(-i))}
        fresh.save(2)
        fresh.discard_before(2)
        assert all(p.name.startswith("round-000002") for p in fresh.folder.iterdir())
        assert value(fresh) == [-float(i) for i in range(12)]

    def test_unsaved_trees_are_gone_after_a_restore(self, tmp_path):
        store = PrivateStore(tmp_path / "private")
        store["a"] = {"x": torch.tensor(1.0)}
        store.restore(0)
        assert "a" not in store
        assert len(store) == 0


def test_lines_without_a_checkpoint_are_dropped(tmp_path):
    with new_run(tmp_path / "run") as run:
        for r in (1, 2):
            run.append(record(r, evaluated=r == 1), [], RoundTiming(0.1, 0.01))
            run.checkpoint(state(r))
        run.append(record(3), [], RoundTiming(0.1, 0.01))
        with (run.path / "rounds.jsonl").open("a") as f:
            f.write('{"round": 4, "coh')
    with RunStore.open(tmp_path / "run") as run:
        restored = run.restore()
        assert restored.state is not None
        assert restored.state.round == 2
        assert restored.rounds == [record(1), record(2, evaluated=False)]
        assert restored.timing.wall_s == pytest.approx(0.2)
        assert len((run.path / "rounds.jsonl").read_text().splitlines()) == 2


def test_altered_lines_are_refused(tmp_path):
    with new_run(tmp_path / "run") as run:
        for r in (1, 2):
            run.append(record(r), [], RoundTiming(0.1, 0.01))
            run.checkpoint(state(r))
    lines = (tmp_path / "run/rounds.jsonl").read_text().splitlines()
    (tmp_path / "run/rounds.jsonl").write_text(lines[1] + "\n")
    with RunStore.open(tmp_path / "run") as run, pytest.raises(UserError, match="has 1 of 2 rounds"):
        run.restore()


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    with new_run(tmp_path / "run") as run:
        (run.path / ".result.json.99.tmp").write_text("half")
        (run.path / "checkpoints/.round-000001.tmp").mkdir()
    with RunStore.open(tmp_path / "run") as run:
        run.restore()
    assert not list((tmp_path / "run").rglob(".*.tmp"))


def _try_open(path, outcomes):
    try:
        RunStore.open(path)
        outcomes.put("opened")
    except UserError as error:
        outcomes.put(str(error))


def test_one_process_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    outcomes = context.Queue()
    with new_run(tmp_path / "run"):
        child = context.Process(target=_try_open, args=(tmp_path / "run", outcomes))
        child.start()
        outcome = outcomes.get(timeout=60)
        child.join()
    assert "is being written by another process" in outcome


def test_an_existing_folder_is_not_written_over(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="exists and is not empty"):
        new_run(tmp_path / "run")
    assert (tmp_path / "run/thesis.tex").read_text() == "years of work"


def test_checking_a_path_creates_nothing(tmp_path):
    RunStore.check_free(tmp_path / "a/b/c")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written: .*file is a file"):
        RunStore.check_free(tmp_path / "file/b/c")


def test_not_a_run_directory(tmp_path):
    with pytest.raises(UserError, match=r"is not a run directory: it has no config\.json"):
        RunStore.open(tmp_path)
    with new_run(tmp_path / "run"):
        pass
    about = tmp_path / "run/about.json"
    for file_format in (2, 99):
        about.write_text(json.dumps({"format": file_format}))
        with pytest.raises(
            UserError, match=rf"format {file_format}, but this version of shoal reads format 3 only: .*\.$"
        ):
            RunStore.open(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(UserError, match=r"has no checkpoints\."):
        RunStore.open(tmp_path / "run")


def test_evaluations_survive_as_lines():
    evaluation = record(1).evaluation
    assert evaluation is not None
    line = json.loads(json.dumps(evaluation_to_json(1, evaluation, ["c0", "c1"])))
    assert line["accuracy"] == [None, 0.5]
    assert evaluation_from_json(line, ["c0", "c1"]) == evaluation
    record_line = json.loads(json.dumps(record(1).to_json()))
    assert round_record_from_json(record_line, evaluation) == record(1)
