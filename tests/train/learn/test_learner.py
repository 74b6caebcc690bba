"""The learner alone: a block through its epochs, the state it goes on from, and what it refuses."""

import json
from unittest import mock

import pytest
import torch

from logitless.errors import TrainingError
from logitless.train.assembly.algorithm import algorithm_of
from logitless.train.assembly.model import policy_model, tokenizer_of
from logitless.train.assembly.process import device_of
from logitless.train.block import pack_groups
from logitless.train.learn.learner import Learner, scores_in_training
from logitless.train.learn.policy import Policy
from logitless.train.learn.progress import halvings
from logitless.train.learn.step import backward
from tests.train.groups import group_of
from tests.train.tiny import tiny_recipe

GROUPS = [group_of(name, [0.0, 1.0, 1.0, 0.0], [3, 5, 6, 6]) for name in "abcd"]  # 80 tokens: two steps of 40


def learner(folder, **changes) -> Learner:
    recipe = tiny_recipe(folder, **{"kl": None, **changes})
    tokenizer = tokenizer_of(recipe.model)
    model = policy_model(recipe.model, tokenizer, seed=0, device=device_of(recipe.model))
    policy = Policy(model, share_prompts=recipe.train.share_prompts)
    return Learner(recipe, algorithm_of(recipe), policy, None, reward_weights={})


def begin(made: Learner) -> None:
    made.begin(made.score(pack_groups(GROUPS), GROUPS))


def weights(made: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in made.policy.model.parameters()]


def test_a_block_is_trained_on_for_all_its_epochs_and_then_over(tmp_path):
    made = learner(tmp_path)
    begin(made)
    records = []
    while made.in_training:
        records.append(made.step())
    assert [(r["step"], r["block"], r["epoch"]) for r in records] == [(1, 1, 1), (2, 1, 1), (3, 1, 2), (4, 1, 2)]
    assert [r["optimizer/tokens"] for r in records] == [40, 40, 40, 40]
    assert records[0]["ratio/min"] == records[0]["ratio/max"] == 1 != records[1]["ratio/max"]
    assert (made.progress.block, made.version) == (1, 4)
    with pytest.raises(ValueError, match="call begin first"):
        made.step()


def test_half_an_update_is_not_handed_out_for_a_checkpoint(tmp_path, monkeypatch):
    made = learner(tmp_path, model__trained_dtype="bfloat16")

    def failing(*args, **named):
        raise RuntimeError("the device is gone")

    assert made.tensors()
    first = next(iter(made.policy.held().values()))
    monkeypatch.setattr("logitless.train.optim.master_weights.fused_update", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        made.optimizer._fused({first: torch.ones_like(first)}, torch.ones(1))
    with pytest.raises(TrainingError, match="go on from the last checkpoint"):
        made.tensors()


@pytest.mark.parametrize("steps", [1, 3])
def test_it_goes_on_from_its_state_in_the_middle_of_a_block(tmp_path, steps):
    whole = learner(tmp_path)
    begin(whole)
    for _ in range(steps):
        whole.step()
    tensors = {name: tensor.detach().clone() for name, tensor in whole.tensors().items()}
    state = json.loads(json.dumps(whole.state_dict()))
    again = learner(tmp_path, model__random_weights=True)
    with torch.no_grad():
        for parameter in again.policy.model.parameters():
            parameter.zero_()
    again.load_state(tensors, state)
    while whole.in_training:
        assert again.step() == whole.step()
    assert not again.in_training
    assert all(map(torch.equal, weights(whole), weights(again)))


# --- what is not computed twice, or for nothing

SAVINGS = ("share_prompts", "pack_by_cost", "skip_zero_advantage", "reuse_logp")
ONCE = {"train__epochs_per_block": 1, "train__tokens_per_step": 1000}
HALF_SILENT = [group_of(name, [1.0] * 4 if name in "bd" else [0.0, 1.0, 1.0, 0.0], [3, 5, 6, 6]) for name in "abcd"]


def test_a_block_with_values_is_scored(tmp_path):
    for preset, in_training in (("grpo", True), ("ppo", False)):
        made = learner(tmp_path, **ONCE, algorithm__preset=preset)
        assert scores_in_training(made.recipe, made.algorithm) == in_training


def first_step(folder, **changes):
    """The first step's numbers, the weights after it, and how many tokens were read before it and in it."""
    made = learner(folder, **ONCE, **changes)
    made.policy.scores = mock.Mock(wraps=made.policy.scores)

    def read():
        return sum(call.args[0].num_tokens for call in made.policy.scores.call_args_list)

    made.begin(made.score(pack_groups(HALF_SILENT), HALF_SILENT))
    scored = read()
    return made.step(), weights(made), scored, read() - scored


def test_a_step_with_every_saving_has_the_numbers_of_one_without(tmp_path):
    plain, plain_weights, scored, trained = first_step(tmp_path, **{f"train__{name}": False for name in SAVINGS})
    assert (scored, trained) == (80, 80)
    others = ("saving/", "optimizer/read_tokens", "optimizer/micro_batches")
    plain = {key: value for key, value in plain.items() if not key.startswith(others)}
    for name in (*SAVINGS, None):
        changes = {f"train__{each}": name in (each, None) for each in SAVINGS}
        record, after, scored, trained = first_step(tmp_path, **changes)
        leaves_out, reuses = name in ("skip_zero_advantage", None), name in ("reuse_logp", None)
        assert trained == (40 if leaves_out else 80)
        assert scored == (0 if name == "reuse_logp" else 40 if reuses else 80)
        assert record["ratio/min"] == record["ratio/max"] == 1
        assert {key: record[key] for key in plain} == pytest.approx(plain, rel=1e-4, abs=1e-6)
        assert record["saving/zero_advantage_sequences"] == (8 if leaves_out else 0)
        assert (record["saving/shared_tokens"] > 0) == (name in ("share_prompts", None))
        for mine, theirs in zip(after, plain_weights, strict=True):
            # AdamW divides by the gradient's size: where that is only rounding, weights move by up to the learning rate
            assert (mine - theirs).abs().median() < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"train__epochs_per_block": 2},
        {"algorithm__filters": ({"name": "top_entropy", "quantile": 0.5},)},
        {"rescore": True},
    ],
)
def test_a_block_that_is_used_twice_or_read_before_its_step_is_scored(tmp_path, changes):
    changes = dict(changes)
    rescore = changes.pop("rescore", False)
    scored = learner(tmp_path, **{**ONCE, **changes}).score(pack_groups(HALF_SILENT), HALF_SILENT, rescore=rescore)
    assert not scored.scores_itself
    assert not scored.logp_old.isnan().any()


def test_a_blocks_first_step_scores_itself_with_the_numbers_of_a_block_that_is_scored(tmp_path):
    found = []
    for reuse in (False, True):
        changes = {
            **ONCE,
            "train__tokens_per_step": 30,
            "train__reuse_logp": reuse,
            "train__skip_zero_advantage": False,
        }
        made = learner(tmp_path / str(reuse), **changes, rollout__parity={"warn": {"mean": 1.0}})
        block = made.score(pack_groups(HALF_SILENT), HALF_SILENT)
        unscored = int(block.logp_old.isnan().sum())
        made.begin(block)
        steps, parity = [], []
        while made.in_training:
            steps.append(made.step())
            parity.append(made.parity)
        found.append((steps, weights(made)))
        assert len(steps) > 2
        assert (0 < unscored < 80) == reuse
        assert [each is not None for each in parity] == [reuse, *[False] * (len(steps) - 1)]
    for plain, own in zip(*(steps for steps, _ in found), strict=True):
        own = {key: own[key] for key in plain}
        assert own == pytest.approx(plain, rel=1e-5, abs=1e-7, nan_ok=True)
    assert all(map(torch.equal, *(after for _, after in found)))


# --- memory that is short


def short_of_memory(monkeypatch, most: int) -> list[int]:
    """Passes that read more than ``most`` tokens at once fail, after the first of them; the number of failures."""
    failures: list[int] = []

    def limited(policy, objective, micro_batches, **options):
        read = [sum(each.packed.inputs.lengths) for each in micro_batches]
        if max(read) > most:
            backward(policy, objective, micro_batches[:1], **options)
            failures.append(max(read))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return backward(policy, objective, micro_batches, **options)

    monkeypatch.setattr("logitless.train.learn.learner.backward", limited)
    return failures


def test_a_step_short_of_memory_is_repeated_with_smaller_micro_batches_and_equals_itself(tmp_path, monkeypatch):
    whole, made = learner(tmp_path, train__share_prompts=False), learner(tmp_path, train__share_prompts=False)
    for each in (whole, made):
        begin(each)
    expected = [whole.step() for _ in range(4)]
    failures = short_of_memory(monkeypatch, 16)
    records = [made.step()]
    assert "repeated with micro-batches of 16 tokens instead of 32" in made.halved
    records += [made.step() for _ in range(3)]
    assert made.halved is None
    assert len(failures) == 1
    found = [[r[f"optimizer/{name}"] for name in ("tokens_per_micro_batch", "halvings")] for r in records]
    assert found == [[16, 1]] * 4
    assert records[0]["optimizer/micro_batches"] > expected[0]["optimizer/micro_batches"]
    for record, wanted in zip(records, expected, strict=True):
        assert record["step"] == wanted["step"]
        assert record["optimizer/grad_norm"] == pytest.approx(wanted["optimizer/grad_norm"], rel=1e-4)
    for found, wanted in zip(weights(made), weights(whole), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_step_repeats_what_a_run_halved_later_on(tmp_path, monkeypatch):
    made = learner(tmp_path, train__share_prompts=False)
    begin(made)
    first = made.step()
    failures = short_of_memory(monkeypatch, 16)
    after = [first, *(made.step() for _ in range(3))]
    assert [r["optimizer/halvings"] for r in after] == [0, 1, 1, 1]
    monkeypatch.undo()
    again = learner(tmp_path, train__share_prompts=False)
    begin(again)
    state = again.state_dict()
    state["progress"]["halvings"] = halvings([], after)
    again.load_state(again.tensors(), state)
    assert [again.step() for _ in range(4)] == after
    assert len(failures) == 1
    assert all(map(torch.equal, weights(made), weights(again)))


def test_a_sequence_that_does_not_fit_alone_ends_the_run(tmp_path, monkeypatch):
    made = learner(tmp_path)
    begin(made)
    short_of_memory(monkeypatch, 2)
    with pytest.raises(TrainingError, match="memory for the longest sequence in a row of its own"):
        made.step()
