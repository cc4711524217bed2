"""What a command may replace. The commands themselves are tested in tests/cli/test_outputs.py."""

from __future__ import annotations

import pytest

from shoal.errors import UserError
from shoal.store.outputs import OutputKind, begins_with, check_output, write_output

NOTE = OutputKind("a note", ".txt", begins_with("by shoal:", within_bytes=20))


def test_a_file_that_appears_while_a_command_runs_is_kept(tmp_path):
    path = tmp_path / "new" / "a.txt"
    check_output(path, NOTE)
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"a.txt exists \(4 bytes\), and shoal did not write it"):
        write_output(path, b"by shoal: 1", NOTE)
    assert [(p.name, p.read_bytes()) for p in path.parent.iterdir()] == [("a.txt", b"mine")]


def test_files_of_shoal_are_replaced_and_folders_created(tmp_path):
    path = tmp_path / "new" / "a.TXT"  # an ending may be in capitals
    for content in (b"by shoal: 1", b"by shoal: 2"):
        write_output(path, content, NOTE)
        assert path.read_bytes() == content


def test_the_mark_counts_only_at_the_beginning(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a text that quotes 'by shoal:' further down")
    with pytest.raises(UserError, match="shoal did not write it"):
        check_output(path, NOTE)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="0 bytes"):
        check_output(path, NOTE)


def test_checking_a_path_creates_nothing(tmp_path):
    check_output(tmp_path / "a.txt", NOTE)
    assert list(tmp_path.iterdir()) == []
