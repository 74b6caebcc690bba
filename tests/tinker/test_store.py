"""Checkpoints are whole folders below one folder."""

import os
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from logitless.errors import CheckpointError, ConfigurationError, InputError
from logitless.tinker import store as store_module
from logitless.tinker.adapter import Shape
from logitless.tinker.store import Checkpoint, Store, opened


class Config:
    """PEFT's configuration, as far as it is saved."""

    def save_pretrained(self, folder):
        Path(folder, "adapter_config.json").write_text("{}")


def checkpoint(name="a", **options):
    about = {"run": "s-1:train:0", "kind": "weights", "base_model": "m", "owner": "me", "created": 1.0}
    return Checkpoint(name=name, shape=Shape(2, True, True, False), **{**about, **options})


def save(store, value=1.0, overwrite=False, **options):
    return store.save(checkpoint(**options), {"w": torch.full((2,), value)}, {}, Config(), overwrite=overwrite)


def test_a_checkpoint_is_found_listed_loaded_and_deleted(tmp_path):
    store = Store(tmp_path)
    made, later = save(store), save(store, name="b", created=2.0)
    assert store.find("tinker://s-1:train:0/weights/a") == made
    assert store.all("me") == [later, made]
    assert store.all("me", "another") == store.all("somebody else") == []
    assert store.tensors(made, optimizer=True)[0]["w"].tolist() == [1.0, 1.0]
    store.delete(made)
    with pytest.raises(InputError, match="that was saved here"):
        store.find(made.path)


@pytest.mark.parametrize(
    "path",
    ["tinker://../weights/a", "tinker://s/weights/..", "tinker://s/../a", "tinker://s/weights/a/b", "/etc/passwd", ""],
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, path):
    with pytest.raises(InputError):
        Store(tmp_path / "inner").find(path)
    with pytest.raises(InputError, match="plain name"):
        save(Store(tmp_path / "inner"), name="../../a")
    assert list(tmp_path.iterdir()) == [tmp_path / "inner"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that root cannot write either")
def test_a_folder_that_is_there_and_cannot_be_written_is_refused_at_the_start():
    with pytest.raises(CheckpointError, match="Name another --folder"):
        Store(Path("/proc/self"))


def test_a_name_is_taken_until_it_is_overwritten(tmp_path):
    store = Store(tmp_path)
    save(store)
    with pytest.raises(InputError, match="a name that is free"):
        save(store, 2.0)
    made = save(store, 2.0, overwrite=True)
    assert store.tensors(made, optimizer=False)[0]["w"].tolist() == [2.0, 2.0]


def test_what_was_saved_is_there_after_a_kill_between_the_renames(tmp_path):
    made = save(Store(tmp_path))
    place = Store(tmp_path).place(made.run, made.kind, made.name)
    place.rename(place.with_name(".a.old"))
    with opened(tmp_path) as store:
        assert store.find(made.path) == made


def test_a_checkpoint_is_found_and_listed_while_it_is_overwritten(tmp_path, monkeypatch):
    store = Store(tmp_path)
    made, asked = save(store), []
    rename = Path.rename

    def asked_between(path, target):
        renamed = rename(path, target)
        if str(target).endswith(".old"):
            asked.append(threads.submit(store.find, made.path))
            asked.append(threads.submit(store.all, "me"))
            wait(asked, timeout=0.1)  # they wait for the save
        return renamed

    with ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(Path, "rename", asked_between)
        later = save(store, overwrite=True, created=2.0)
        assert [each.result() for each in asked] == [later, [later]]


def test_a_checkpoint_that_replaces_an_expired_one_is_not_deleted_for_it(tmp_path, monkeypatch):
    store = Store(tmp_path)
    made = save(store, expires=time.time() - 1)
    saved, real = [], time.time

    def saves_meanwhile():  # after the expired one was read
        if not saved:
            saved.append(None)
            saved[0] = thread.submit(save, store, 2.0, overwrite=True, created=2.0)
            wait(saved, timeout=0.1)
        return real()

    with ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(store_module, "time", SimpleNamespace(time=saves_meanwhile))
        assert store.all("me") == []
        later = saved[0].result()
    assert store.find(made.path) == later
    assert store.tensors(made, optimizer=False)[0]["w"].tolist() == [2.0, 2.0]


def test_when_a_checkpoint_expires_changes_nothing_else_of_the_one_that_replaced_it(tmp_path):
    store = Store(tmp_path)
    made = save(store)
    later = save(store, overwrite=True, created=2.0)
    store.expire(made, None)
    assert store.find(made.path) == later
    store.delete(later)
    store.expire(made, None)
    assert store.all("me") == []


def test_a_checkpoint_whose_deletion_was_killed_is_not_listed_and_goes_at_the_next_start(tmp_path, monkeypatch):
    store = Store(tmp_path)
    made = save(store)

    def killed(place, **_):
        if place.exists():
            (place / "adapter_model.safetensors").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store_module.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.delete(made)
    assert store.all("me") == []
    with opened(tmp_path) as store:
        assert not list(tmp_path.rglob("checkpoint.json"))


def test_an_expired_checkpoint_is_deleted(tmp_path):
    store = Store(tmp_path)
    made = save(store, expires=time.time() + 1000)
    store.expire(made, None)
    assert store.find(made.path).expires is None
    store.expire(made, time.time() - 1)
    assert store.all("me") == []
    assert not store.place(made.run, made.kind, made.name).exists()


def test_a_name_is_free_after_its_checkpoint_has_expired(tmp_path):
    store = Store(tmp_path)
    save(store, expires=time.time() - 1)
    made = save(store, 2.0)
    assert store.tensors(made, optimizer=False)[0]["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("end", ["part", "old"])
def test_what_a_killed_save_left_is_not_listed_and_goes_at_the_next_start(tmp_path, end):
    store = Store(tmp_path)
    made = save(store, expires=time.time() - 1)
    left = store.place(made.run, made.kind, made.name).with_name(f".b.{end}")
    left.with_name("a").rename(left)
    made = save(store)
    assert store.all("me") == [made]
    assert left.exists()
    with opened(tmp_path) as store:
        assert store.all("me") == [made]
    assert not left.exists()


def test_a_folder_that_another_process_has_opened_is_refused_and_its_unfinished_saves_stay(tmp_path):
    unfinished = tmp_path / "s-1:train:0" / "weights" / ".b.part"
    with opened(tmp_path):
        unfinished.mkdir(parents=True)
        with pytest.raises(ConfigurationError, match=rf"process {os.getpid()} .* name another --folder"):
            opened(tmp_path).__enter__()
        assert unfinished.exists()
    with opened(tmp_path):
        assert not unfinished.exists()
