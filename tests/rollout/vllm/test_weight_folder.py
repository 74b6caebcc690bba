"""Weights in a folder are read back bitwise identical, whole or as differences; an incomplete folder is refused."""

import gc
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from logitless.errors import EngineError
from logitless.models.export import merged_tensors
from logitless.rollout.vllm.weight_folder import MARKER, WeightFolders, private_folder, read_weights
from tests.rollout.policy import tiny_policy


def _same_bits(read, written):
    return read.keys() == written.keys() and all(
        read[n].dtype == written[n].dtype
        and torch.equal(read[n].view(torch.uint8), written[n].contiguous().view(torch.uint8))
        for n in written
    )


@settings(deadline=None, max_examples=25)
@given(
    changes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    in_a_row=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, None]),
    seed=st.integers(0, 9),
)
def test_every_version_is_read_back_in_every_bit(tmp_path_factory, changes, in_a_row, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = {"a": torch.randn(10, 30, generator=generator), "b": torch.randn(7, generator=generator)}
    folders = WeightFolders(tmp_path_factory.mktemp("w"), dtype=dtype, differences_in_a_row=in_a_row, shard_bytes=100)
    for version, count in enumerate(changes):
        at = torch.randperm(300, generator=generator)[:count]
        weights["a"].view(-1)[at] = torch.randn(count, generator=generator)
        weights["b"][:1] = torch.tensor(float("nan"))
        written = folders.write(list(weights.items()), version)
        rounded = {name: tensor.to(dtype or tensor.dtype) for name, tensor in weights.items()}
        assert _same_bits(dict(read_weights(written.folder)), rounded)


def test_changed_weights_are_counted_and_sent_alone_where_that_is_shorter(tmp_path):
    weight, folders = torch.ones(1000), WeightFolders(tmp_path, differences_in_a_row=9)
    assert folders.write([("w", weight)], 0).num_changed is None
    weight[:3] = 2.0
    few = folders.write([("w", weight)], 1)
    assert (few.kind, few.num_changed, few.num_bytes) == ("difference", 3, 3 * (4 + 4))
    weight[:900] = 3.0
    many = folders.write([("w", weight)], 2)
    assert (many.kind, many.num_changed, many.num_bytes) == ("whole", 900, 4000)
    assert folders.write([("w", weight)], 3).num_bytes == 0


def test_a_routers_correction_bias_is_not_rounded(tmp_path):
    bias = torch.tensor([0.123456789, -7.7654321])
    tensors = [("mlp.gate.weight", bias[None]), ("mlp.gate.e_score_correction_bias", bias)]
    for version in (0, 1):
        folders = WeightFolders(tmp_path / str(version), dtype=torch.bfloat16, differences_in_a_row=version)
        found = dict(read_weights(folders.write(tensors, 0).folder))
        assert torch.equal(found["mlp.gate.e_score_correction_bias"], bias)
        assert torch.equal(found["mlp.gate.weight"], bias[None].bfloat16())


def test_a_step_that_rounding_hides_sends_next_to_nothing_in_bfloat16(tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(100_000)
    folders = WeightFolders(tmp_path, dtype=torch.bfloat16, differences_in_a_row=9)
    folders.write([("w", weight)], 0)
    written = folders.write([("w", weight + 1e-5 * torch.randn(100_000))], 1)
    # A step of 1e-5 beside a distance of about 2^-8 between neighbours: about one weight in 300 moves on.
    assert 0 < written.num_changed < 2_000
    assert written.num_bytes == 6 * written.num_changed


def test_differences_end_after_so_many_and_old_folders_are_removed(tmp_path):
    weight, folders = torch.ones(1000), WeightFolders(tmp_path, differences_in_a_row=2)
    kinds = []
    for version in range(6):
        weight[version] = 7.0
        kinds.append(folders.write([("w", weight)], version).kind)
    assert kinds == ["whole", "difference", "difference"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{v:09d}" for v in (3, 4, 5)]


def test_a_whole_folder_is_one_that_transformers_loads(tmp_path):
    model = tiny_policy()
    folders = WeightFolders(tmp_path, shard_bytes=2000)
    written = folders.write(merged_tensors(model), 0, model.config.save_pretrained)
    assert len(list(written.folder.glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(written.folder)
    assert _same_bits(loaded.state_dict(), model.state_dict())


def test_a_folder_without_its_marker_is_not_read(tmp_path):
    folder = WeightFolders(tmp_path).write([("w", torch.ones(3))], 0).folder
    (folder / MARKER).unlink()
    with pytest.raises(EngineError, match="a complete folder of weights"):
        list(read_weights(folder))
    (folder / MARKER).write_text(json.dumps({"kind": "half"}))
    with pytest.raises(EngineError, match="kind 'half'"):
        list(read_weights(folder))


def test_a_half_written_folder_of_the_same_version_is_replaced(tmp_path):
    left: Path = tmp_path / f"{5:09d}"
    left.mkdir()
    (left / "model-00007.safetensors").write_bytes(b"half")
    written = WeightFolders(tmp_path).write([("w", torch.ones(3))], 5)
    assert dict(read_weights(written.folder))["w"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("again", [1, 2])
def test_a_version_after_one_whose_writing_failed_is_read_back(tmp_path, monkeypatch, again):
    weight, folders = torch.zeros(1000), WeightFolders(tmp_path, differences_in_a_row=9)
    folders.write([("w", weight)], 0)
    weight[7] = 1.0
    with monkeypatch.context() as full:
        full.setattr("logitless.rollout.vllm.weight_folder.save_file", Mock(side_effect=OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            folders.write([("w", weight)], 1)
    weight[8] = 2.0
    assert torch.equal(dict(read_weights(folders.write([("w", weight)], again).folder))["w"], weight)


def test_a_version_that_is_written_twice_is_read_back(tmp_path):
    weight, folders = torch.zeros(1000), WeightFolders(tmp_path, differences_in_a_row=9)
    folders.write([("w", weight)], 0)
    weight[7] = 1.0
    for _ in range(2):
        assert torch.equal(dict(read_weights(folders.write([("w", weight)], 1).folder))["w"], weight)


def test_a_private_folder_goes_with_its_owner_when_nobody_closed_it():
    class Owner:
        pass

    owner = Owner()
    folder, _ = private_folder(owner)
    (folder / "000000001").mkdir()
    del owner
    gc.collect()
    assert not folder.exists()
