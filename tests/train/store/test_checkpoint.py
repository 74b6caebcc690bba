"""What is saved comes back bit for bit; a checkpoint is there as a whole or not at all."""

import json
import threading
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from logitless.errors import CheckpointError
from logitless.train.store import checkpoint as checkpoints
from logitless.train.store import tensor_files
from logitless.train.store.checkpoint import BackgroundSaver, clear_remains, load_checkpoint
from logitless.train.store.checkpoint import checkpoints as complete
from tests.train.interrupting import before
from tests.train.tiny import assert_equal


def _begin(saver, step, **options):
    """Begin a save."""
    tensors = {"a": torch.tensor([step])}
    saver.save(**({"block": 0, "step": step, "tensors": tensors, "state": {"step": step}} | options))


def _save(root, step, *, keep=10, **options):
    saver = BackgroundSaver(root, keep=keep)
    _begin(saver, step, **options)
    saver.wait()
    return complete(root)[-1]


def _names(root):
    return [path.name for path in complete(root)]


# --- what comes back ------------------------------------------------------------------------------------------------


def test_the_latest_checkpoint_is_read_back(tmp_path):
    value = torch.tensor([[0.1, float("inf")]], dtype=torch.float64).T  # not contiguous
    _save(tmp_path, 2)
    _save(tmp_path, 10, tensors={"x/y.z": value}, state={"beta": 0.1, "list": [1, None]})
    found = load_checkpoint(tmp_path)
    assert found.folder.name == "block-000000-step-000010"
    assert torch.equal(found.tensors["x/y.z"], value)
    assert found.state == {"beta": 0.1, "list": [1, None]}


@pytest.mark.parametrize("dtype", tensor_files._DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_every_dtype_and_shape_comes_back_in_its_bits(tmp_path, dtype, shape):
    numbers = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    value = numbers.view(dtype).reshape(shape)
    _save(tmp_path, 1, tensors={"x": value})
    found = load_checkpoint(tmp_path).tensors["x"]
    assert found.dtype == dtype
    assert found.shape == torch.Size(shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def _edit_index(folder, change):
    """Change what the index of a checkpoint says."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


NO_SPACE = OSError(28, "No space left on device")


def test_the_files_are_those_of_the_safetensors_library(tmp_path):
    tensors = {"b": torch.randn(3, 5, dtype=torch.bfloat16), "a": torch.arange(7), "s": torch.tensor(2.0)}
    assert_equal(load_file(_save(tmp_path, 1, tensors=tensors) / "tensors-00001.safetensors"), tensors)


def test_large_tensors_get_files_of_their_own_and_small_ones_share_one(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "LARGEST_FILE", 100)
    tensors = {name: torch.randn(size) for name, size in {"a": 10, "b": 15, "c": 5, "d": 300, "e": 1}.items()}
    folder = _save(tmp_path, 1, tensors=tensors)
    held = [sorted(load_file(path)) for path in sorted(folder.glob("*.safetensors"))]
    assert held == [["a", "b"], ["c"], ["d"], ["e"]]
    found = load_checkpoint(tmp_path).tensors
    assert list(found) == list(tensors)
    assert_equal(found, tensors)


def test_the_host_holds_one_tensor_at_a_time(tmp_path, monkeypatch):
    moved, written = [], []
    before(monkeypatch, torch.Tensor, "cpu", lambda tensor: moved.append(tensor.numel()))
    before(monkeypatch, tensor_files, "_bytes", lambda *_: written.append(len(moved)))
    _save(tmp_path, 1, tensors={name: torch.zeros(10) for name in "abc"})
    assert written == [1, 2, 3]  # each is written before the next is brought


def test_pieces_that_ranks_wrote_are_put_together(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    folder = _save(tmp_path, 1, tensors={"x": whole})
    pieces = []
    for rank, part in enumerate([whole[:2], whole[2:]]):
        file = f"rank-{rank}.safetensors"
        sums = tensor_files.write_tensors(folder / file, {"x": part})
        pieces.append({"file": file, "start": [2 * rank, 0], "shape": [2, 6], "sha256": sums["x"]})
    _edit_index(folder, lambda index: index["tensors"]["x"].update(pieces=pieces))
    assert torch.equal(load_checkpoint(tmp_path).tensors["x"], whole)
    _edit_index(folder, lambda index: index["tensors"]["x"].update(pieces=pieces[:1]))
    with pytest.raises(CheckpointError, match="not the whole of it"):
        load_checkpoint(tmp_path)


# --- order and number -----------------------------------------------------------------------------------------------


def test_only_the_latest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        _save(tmp_path, step, keep=2)
    assert _names(tmp_path) == ["block-000000-step-000003", "block-000000-step-000004"]


def test_the_millionth_step_is_later_than_the_one_before(tmp_path):
    for step in (999_998, 999_999, 1_000_000):
        _save(tmp_path, step, keep=2)
    assert _names(tmp_path) == ["block-000000-step-999999", "block-000000-step-1000000"]
    assert load_checkpoint(tmp_path).state == {"step": 1_000_000}


def test_a_block_without_a_step_has_a_checkpoint_of_its_own(tmp_path):
    _save(tmp_path, 5, block=1, state={"block": 1})
    _save(tmp_path, 5, block=2, state={"block": 2})
    assert load_checkpoint(tmp_path).state == {"block": 2}


def test_a_moment_that_is_saved_already_is_left_as_it_is(tmp_path):
    _save(tmp_path, 1)
    _save(tmp_path, 1, state={"step": "another"})
    assert load_checkpoint(tmp_path).state == {"step": 1}


def test_other_folders_are_no_checkpoints(tmp_path):
    for name in ("block-1", "step-x", "block-000009-step-000009.old", ".saving-block-000009-step-000009"):
        (tmp_path / name).mkdir()
    (tmp_path / "block-000009-step-000009").write_text("")
    _save(tmp_path, 1)
    assert _names(tmp_path) == ["block-000000-step-000001"]


# --- damage ---------------------------------------------------------------------------------------------------------


def test_remains_of_an_interrupted_save_are_not_read_and_can_be_cleared(tmp_path):
    _save(tmp_path, 1)
    for prefix in (checkpoints._SAVING, checkpoints._REMOVING):
        (tmp_path / f"{prefix}block-000000-step-000002").mkdir()
    assert load_checkpoint(tmp_path).state == {"step": 1}
    clear_remains(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["block-000000-step-000001"]


def test_a_save_that_fails_leaves_earlier_ones_and_no_remains(tmp_path, monkeypatch):
    _save(tmp_path, 1)

    def full(path, content):
        path.write_bytes(content[:1])
        raise NO_SPACE

    monkeypatch.setattr(checkpoints, "write_flushed", full)
    with pytest.raises(CheckpointError, match="No space left"):
        _save(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["block-000000-step-000001"]


def test_no_checkpoint_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(CheckpointError, match="Start without --resume"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["tensors-00001.safetensors", "state.json", "index.json"])
@pytest.mark.parametrize("damage", ["cut", "emptied", "removed"])
def test_a_damaged_checkpoint_is_named_and_not_half_used(tmp_path, name, damage):
    path = _save(tmp_path, 1) / name
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: -5 if damage == "cut" else 0])
    with pytest.raises(CheckpointError, match=r"block-000000-step-000001.*Delete this checkpoint"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["tensors-00001.safetensors", "state.json"])
def test_a_single_flipped_bit_is_noticed(tmp_path, name):
    path = _save(tmp_path, 1, state={"word": "aaaa"}, tensors={"x": torch.zeros(100), "y": torch.zeros(3)}) / name
    content = bytearray(path.read_bytes())
    content[content.index(b"aaaa") if name == "state.json" else -1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checksum"):
        load_checkpoint(tmp_path).tensors["y"]


def test_a_checkpoint_of_a_later_version_is_refused(tmp_path):
    _edit_index(_save(tmp_path, 1), lambda index: index.update(schema_number=3))
    with pytest.raises(CheckpointError, match="schema 3"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["../../secret.safetensors", "/etc/passwd"])
def test_an_index_cannot_name_files_outside_of_its_folder(tmp_path, file):
    _edit_index(_save(tmp_path, 1), lambda index: index["tensors"]["a"]["pieces"][0].update(file=file))
    with pytest.raises(CheckpointError, match="not in the folder"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("lie", [2**62, 10**6, 0])
def test_a_header_that_lies_about_its_length_is_refused(tmp_path, lie):
    path = _save(tmp_path, 1) / "tensors-00001.safetensors"
    path.write_bytes(lie.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="Delete this checkpoint"):
        load_checkpoint(tmp_path)


# --- in the background ----------------------------------------------------------------------------------------------


def _held_up(monkeypatch):
    """Saves wait for this event."""
    go = threading.Event()
    before(monkeypatch, checkpoints, "write_tensors", lambda *_: go.wait(300))
    return go


def test_a_save_in_the_background_returns_at_once_and_is_complete_after_the_wait(tmp_path, monkeypatch):
    go, saver = _held_up(monkeypatch), BackgroundSaver(tmp_path, keep=2)
    state = {"lines": [1]}
    _begin(saver, 1, state=state)
    assert _names(tmp_path) == []
    state["lines"].append(2)  # the run goes on
    go.set()
    saver.wait()
    assert load_checkpoint(tmp_path).state == {"lines": [1]}


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    go, saver = _held_up(monkeypatch), BackgroundSaver(tmp_path, keep=2)
    _begin(saver, 1)
    threading.Timer(0.05, go.set).start()
    _begin(saver, 2)
    assert _names(tmp_path)[0] == "block-000000-step-000001"
    saver.wait()
    assert len(_names(tmp_path)) == 2


def test_a_save_that_fails_in_the_background_is_an_error_of_the_next_wait_and_of_no_later_one(tmp_path, monkeypatch):
    saver = BackgroundSaver(tmp_path, keep=2)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_tensors", mock.Mock(side_effect=NO_SPACE))
        _begin(saver, 1)
        with pytest.raises(CheckpointError, match="No space left"):
            saver.wait()
    saver.wait()
    _begin(saver, 2)
    saver.wait()
    assert _names(tmp_path) == ["block-000000-step-000002"]


@pytest.mark.gpu
def test_a_save_of_tensors_on_a_gpu_waits_for_what_was_queued_before_it_and_not_for_what_is_queued_later(tmp_path):
    value = torch.ones(4096, 4096, device="cuda")
    product = value
    for _ in range(50):
        product = product @ value / 4096  # still at work when the save begins
    saver = BackgroundSaver(tmp_path, keep=1)
    _begin(saver, 1, tensors={"x": product, "y": value})
    for _ in range(50):
        value @ value  # a rollout, which changes nothing that is saved
    saver.wait()
    assert_equal(load_checkpoint(tmp_path).tensors, {"x": product.cpu(), "y": value.cpu()})
