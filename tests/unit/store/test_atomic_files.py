import errno
import os
import resource
from contextlib import contextmanager

import pytest
import torch

from shoal.store.atomic_files import append_lines, make_folder, read_lines, rewrite_lines, write_bytes, write_folder
from shoal.store.run_directory import RunStore


@contextmanager
def largest_file(size_bytes):
    """Lets the operating system refuse larger files inside the block, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def too_large(path):
    with largest_file(100), pytest.raises(OSError) as caught:
        yield
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)


def test_a_file_that_does_not_fit_keeps_its_old_content(tmp_path):
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with too_large(tmp_path / f".file.{os.getpid()}.tmp"):
        write_bytes(path, b"n" * 101)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_lines_that_do_not_fit_are_not_cut_short(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"a": 1}, {"a": 2}])
    with too_large(path):
        append_lines(path, [{"a": 3}, {"b": "x" * 100}])
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    append_lines(path, [{"a": 3}])
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n'


def test_a_folder_that_does_not_fit_keeps_its_old_files(tmp_path):
    folder, temporary_folder = tmp_path / "folder", tmp_path / ".folder.tmp"
    write_folder(folder, {"a": b"1", "b": b"2"}, temporary_folder)
    with too_large(temporary_folder / "c"):
        write_folder(folder, {"a": b"3", "c": b"n" * 101}, temporary_folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {"a": b"1", "b": b"2"}
    assert list(tmp_path.iterdir()) == [folder]
    write_folder(folder, {"c": b"4"}, temporary_folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {"c": b"4"}


def test_equal_lines_are_not_written_again(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"a": 1}])
    before = path.stat()
    rewrite_lines(path, [{"a": 1}])
    assert path.stat().st_ino == before.st_ino
    rewrite_lines(path, [])
    assert path.read_bytes() == b""


def test_folders_are_created_as_far_as_they_are_missing(tmp_path):
    make_folder(tmp_path / "a/b/c")
    make_folder(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()


def test_parts_of_an_unfinished_round_do_not_stay(tmp_path):
    with RunStore.create(tmp_path / "run", {}, {"clients": ["c0"]}, {}) as run:
        run.private.memory_bytes = 400
        for i in range(12):
            run.private[f"c{i}"] = {"w": torch.full((20,), float(i))}
        assert list((tmp_path / "run/private").iterdir())
    assert not list((tmp_path / "run/private").iterdir())
