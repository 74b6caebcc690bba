"""A file that cannot be written is an error in words; a folder is the old one or the new one."""

import os

import pytest

from logitless.errors import TrainingError
from logitless.train.store.atomic import write_atomically, write_folder_atomically
from tests.train.interrupting import before


def test_a_place_where_nothing_can_be_written_or_removed_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"room and permission to write .*file/page"):
        write_atomically(tmp_path / "file" / "page.html", b"")


def test_a_folder_whose_replacement_is_killed_is_whole(tmp_path, monkeypatch):
    def write(folder):
        for name in ("a", "b"):
            (folder / name).touch()

    def killed(*_, **__):
        raise KeyboardInterrupt

    write_folder_atomically(tmp_path / "model", write)
    with monkeypatch.context() as patched:
        before(patched, os, "rmdir", killed)
        with pytest.raises(KeyboardInterrupt):
            write_folder_atomically(tmp_path / "model", write)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["a", "b"]
    write_folder_atomically(tmp_path / "model", write)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
