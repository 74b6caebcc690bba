"""Ranks in any arrangement give the loss and gradients of one: copies, shards, shared sequences and vocabulary."""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.distributed.arrangement import Arrangement
from logitless.distributed.sharding import whole
from logitless.errors import UnavailableError
from logitless.models import loading
from logitless.models.lm_head import causal_lm
from logitless.models.lora import frozen_copy
from logitless.rewards.reward import judge
from logitless.rollout.environment import SingleTurn, play
from logitless.rollout.transformers import TransformersEngine
from logitless.rollout.vllm.probe import scored_tokens
from logitless.train.assembly import stages
from logitless.train.assembly.algorithm import algorithm_of, value_head_of
from logitless.train.assembly.data import data_of, rewards_of
from logitless.train.assembly.model import is_cut_from_host, tokenizer_of
from logitless.train.learn import learner as learner_module
from logitless.train.learn import policy as policy_module
from logitless.train.learn.learner import Learner
from logitless.train.learn.policy import Policy
from logitless.types import Completion
from tests.ranks import run_on_ranks
from tests.train.tiny import TINY_GPT2, TINY_LLAMA, assert_equal, start, tiny_model, tiny_raw, tiny_recipe

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
LLAMA = TINY_LLAMA | HEADS


def _learner(folder, changes, dtype, arrangement=None, device="cpu"):
    """A learner of the tiny recipe, its weights cut over the ranks of the process group as the arrangement says; those
    that are cut start in the host's memory."""
    recipe = tiny_recipe(folder, **changes)
    tokenizer, algorithm = tokenizer_of(recipe.model), algorithm_of(recipe)
    place = "cpu" if arrangement is not None and arrangement.is_sharded else device
    models = [tiny_model(recipe, place, seed=seed) for seed in (0, 1)]
    if dtype is not None:
        models = [model.to(dtype) for model in models]
    value_head = value_head_of(recipe, algorithm, models[0])
    policy = Policy(models[0], value_head=None if value_head is None else value_head.to(dtype))
    reference = None if recipe.kl is None else Policy(frozen_copy(models[1]))
    ranks = Ranks.alone()
    if arrangement is not None:
        ranks = Ranks(data=dist.group.WORLD).arranged(arrangement)
        mesh = arrangement.mesh(device) if arrangement.is_sharded else None
        for scorer in (policy, reference):
            if scorer is not None and mesh is not None:
                on_host = scorer is reference and recipe.parallel.reference == "host"
                scorer.shard(mesh, on_host=on_host, all_rows=recipe.parallel.vocabulary == "all_rows")
            if scorer is not None and ranks.sequence is not None:
                scorer.share_sequences(ranks.sequence)
    return Learner(recipe, algorithm, policy, reference, reward_weights={"length": 1.0}, ranks=ranks), tokenizer


def _groups(folder, changes, dtype, device="cpu"):
    """What one rank draws."""
    learner, tokenizer = _learner(folder, changes, dtype, device=device)
    recipe = learner.recipe
    data, engine = data_of(recipe, tokenizer), TransformersEngine(learner.policy.model, tokenizer)
    prompts = list(data.train[:5])
    episodes = play(engine, prompts, SingleTurn(), num_samples=4, options=recipe.rollout.sampling, seed=7)
    groups = judge(prompts, episodes, rewards_of(recipe, prompts), unscored=recipe.rollout.unscored)
    if recipe.rollout.environment is None:
        return groups
    return [replace(g, completions=tuple(map(_as_if_a_tool_had_written_some, g.completions))) for g in groups]


def _as_if_a_tool_had_written_some(completion):
    written = np.arange(completion.length) % 3 == 1
    return Completion(**vars(completion) | {"trained": ~written})


def _gradients(rank, folder, changes, dtype, groups, arrangement=None, device="cpu"):
    """Scores of a block, and in each step of an epoch whose weights do not move the loss and all gradients."""
    learner, _ = _learner(folder, changes, dtype, arrangement, device)
    found, losses = [], []

    def instead_of_a_step(optimizer, *, meanwhile, **_):
        meanwhile()
        named = learner.policy.named_parameters()
        found.append({name: whole(p.grad).clone() for name, p in named.items() if p.grad is not None})
        for parameter in named.values():
            parameter.grad = None
        return torch.tensor(0.0), True

    with mock.patch.object(learner_module, "take_step", instead_of_a_step):
        block = learner.score(learner.packed(groups), groups)
        learner.begin(block)
        while learner.in_training and learner.progress.epoch == 0:
            losses.append(learner.step()["loss/total"])
    return block.logp_old, losses, found


def _check(
    tmp_path, changes, num_ranks, arrangement, *, dtype=torch.float64, rtol=1e-12, atol=1e-12, device="cpu", scores=1e-5
):
    tiny_raw(tmp_path)
    groups = _groups(tmp_path, changes, dtype, device)
    logp, losses, gradients = _gradients(0, tmp_path, changes, dtype, groups, None, device)
    assert len(losses) > 1
    for found in run_on_ranks(
        num_ranks, _gradients, tmp_path, changes, dtype, groups, arrangement, device, device=device
    ):
        torch.testing.assert_close(found[0], logp, rtol=scores, atol=scores)  # they are kept in float32
        assert found[1] == pytest.approx(losses, rel=max(rtol, 1e-9), abs=max(atol, 1e-9))
        assert len(found[2]) == len(gradients)
        for step, of_one in zip(found[2], gradients, strict=True):
            assert step.keys() == of_one.keys()
            for name, gradient in of_one.items():
                gradient = gradient.cpu()
                assert step[name].dtype == gradient.dtype
                assert gradient.any() or "value_head" in name or "lora_" in name
                torch.testing.assert_close(step[name], gradient, rtol=rtol, atol=atol)


ECHO = {
    "algorithm": {"preset": "echo", "parameters": {"alpha": 10.0}},
    "rollout__environment": {"name": "own", "factory": "none:none"},
    "rollout__limits": {"max_tokens": 20},
}
FLOAT64 = {
    "shards, a value head": ({"algorithm": {"preset": "ppo"}}, Arrangement(1, 2, 1)),
    "three copies, many rows": ({"train__tokens_per_micro_batch": 13}, Arrangement(3, 1, 1)),
    "shared sequences, GSPO": ({"algorithm": {"preset": "gspo"}}, Arrangement(1, 1, 2)),
    "a shared vocabulary, what a tool wrote": ({**ECHO, "parallel__vocabulary": "all_rows"}, Arrangement(1, 2, 1)),
    "a reference on the host": ({"parallel__reference": "host"}, Arrangement(1, 2, 1)),
}
SLOW = {
    "four shards of an untied head": ({"model__source": LLAMA}, Arrangement(1, 4, 1)),
    "copies of shards": ({}, Arrangement(2, 2, 1)),
    "sequences over four, more than key heads": ({"model__source": LLAMA}, Arrangement(1, 1, 4)),
    "shards and shared sequences": ({"train__tokens_per_micro_batch": 17}, Arrangement(1, 2, 2)),
    "a shared vocabulary, sequences and shards": ({"parallel__vocabulary": "all_rows"}, Arrangement(1, 2, 2)),
    "shards, many rows": ({"train__tokens_per_micro_batch": 13}, Arrangement(1, 4, 1)),
    "copies, a value head": ({"algorithm": {"preset": "ppo"}}, Arrangement(2, 1, 1)),
    "shared sequences, a value head": ({"algorithm": {"preset": "ppo"}}, Arrangement(1, 1, 2)),
    "copies and shared sequences": ({}, Arrangement(2, 1, 2)),
    "shards, what a tool wrote": (ECHO, Arrangement(1, 2, 1)),
    "shared sequences, what a tool wrote": (ECHO, Arrangement(1, 1, 2)),
    "four shards, few rows, what a tool wrote": ({**ECHO, "train__tokens_per_micro_batch": 200}, Arrangement(1, 4, 1)),
    "a shared vocabulary": ({"parallel__vocabulary": "all_rows"}, Arrangement(1, 2, 1)),
}


@pytest.mark.parametrize("case", [*FLOAT64, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_in_float64_any_arrangement_has_the_scores_loss_and_gradients_of_one_rank(case, tmp_path):
    changes, arrangement = {**FLOAT64, **SLOW}[case]
    if "model__source" in changes:
        rtol = atol = 1e-6  # its norms and angles are float32 whatever the weights are
    else:
        changes = {"model__source": TINY_GPT2, **changes}
        rtol = atol = 1e-12
    _check(tmp_path, changes, arrangement.replicate * arrangement.weights, arrangement, rtol=rtol, atol=atol)


def test_bfloat16_weights_with_sharded_master_weights_have_the_gradients_of_one_rank_to_rounding(tmp_path):
    changes = {"model__source": LLAMA, "model__trained_dtype": "bfloat16"}
    _check(tmp_path, changes, 2, Arrangement(1, 2, 1), dtype=None, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("arrangement", [Arrangement(1, 2, 1), Arrangement(1, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {"targets": ["q_proj", "down_proj", "lm_head"]},
        {"targets": ["q_proj"], "modules_to_save": ["lm_head", "norm", "embed_tokens"], "use_rslora": True},
    ],
    ids=["factors", "modules trained whole"],
)
def test_adapters_on_a_sharded_base_have_the_gradients_of_one_rank(arrangement, more, tmp_path):
    lora = {"rank": 2, **more}
    changes = {"model__source": LLAMA, "model__lora": lora, "kl": None}
    _check(tmp_path, changes, 2, arrangement, dtype=None, rtol=1e-3, atol=1e-5)


IN_ORDER = {
    "micro-batches of one or two sequences": {"train__tokens_per_micro_batch": 17, "model__source": LLAMA},
    "fewer micro-batches than ranks": {"train__tokens_per_micro_batch": 200},
    "tokens chosen in each micro-batch": {
        "algorithm": {"preset": "clip_cov"},
        "train__tokens_per_micro_batch": 17,
    },
    "a value head": {"algorithm": {"preset": "ppo"}, "train__tokens_per_micro_batch": 17},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "tokens" in case else pytest.mark.slow) for case in IN_ORDER]
)
def test_summed_in_order_gradients_and_losses_are_bitwise_identical_on_one_two_and_four_ranks(case, tmp_path):
    changes = {"parallel__deterministic": True, **IN_ORDER[case]}
    tiny_raw(tmp_path)
    groups = _groups(tmp_path, changes, None)
    logp, losses, gradients = _gradients(0, tmp_path, changes, None, groups)
    assert all(loss != 0 for loss in losses)
    for num_ranks in (2, 4):
        arrangement = Arrangement(num_ranks, 1, 1)
        for found in run_on_ranks(num_ranks, _gradients, tmp_path, changes, None, groups, arrangement):
            assert torch.equal(found[0], logp)
            assert found[1] == losses
            for step, of_one in zip(found[2], gradients, strict=True):
                assert_equal(step, of_one)


# --- weights that no rank has whole -----------------------------------------------------------------------------------


def _sharded(rank, folder, **changes):
    """A policy whose weights each rank drew by its number, cut over all of them."""
    policy = Policy(tiny_model(tiny_recipe(folder, **changes), seed=rank))
    policy.shard(Arrangement(1, dist.get_world_size(), 1).mesh("cpu"))
    return policy


@pytest.mark.parametrize(
    ("changes", "is_cut"),
    [
        ({}, True),
        ({"warm_start": {"steps": 3, "data": {"name": "file", "path": "x"}}}, False),
        ({"train__activation_memory": 1}, False),
        ({"model__compile": True}, False),
        ({"model__attention": "sdpa", "model__sdpa_backends": ["cudnn"]}, False),
    ],
)
def test_a_model_waits_for_its_cut_in_the_hosts_memory_unless_something_runs_it_before(changes, is_cut, tmp_path):
    recipe = tiny_recipe(tmp_path, **changes)
    assert is_cut_from_host(recipe, Arrangement(1, 2, 1)) == is_cut
    assert not is_cut_from_host(recipe, Arrangement(2, 1, 1))  # copies are not cut


class _Seen(Exception):
    """A run's learner was to be made."""


def _begun(folder, **changes):
    """The policy and the reference with which a run would begin to learn."""
    with mock.patch.object(stages, "Learner", side_effect=_Seen) as learner, pytest.raises(_Seen):
        start(tiny_recipe(folder, **changes), ranks=Ranks(data=dist.group.WORLD))
    return learner.call_args.args[2:4]


def _references(rank, folder, parallel):
    """The reference's weights as a run begins, whose ranks drew other ones."""
    made = stages.policy_model
    with mock.patch.object(stages, "policy_model", lambda *args, seed, **options: made(*args, seed=rank, **options)):
        _, reference = _begun(folder, parallel=parallel)
    return {name: whole(p.detach()) for name, p in reference.held().items()}


@pytest.mark.parametrize("parallel", [{"replicate": 2}, {}], ids=["copies", "shards"])
def test_all_ranks_have_the_reference_of_the_first(parallel, tmp_path):
    tiny_raw(tmp_path)
    first = dict(tiny_model(tiny_recipe(tmp_path)).named_parameters())
    for found in run_on_ranks(2, _references, tmp_path, parallel):
        assert_equal(found, first)


def _after_sharding(rank, folder, changes, empty):
    """All tensors after the cut, made whole; ranks but the first drew other weights, or none."""
    ranks = Ranks(data=dist.group.WORLD)
    recipe = tiny_recipe(folder, **changes)
    model = tiny_model(recipe, seed=rank, empty=empty and not ranks.is_first)
    assert all(p.is_meta for p in model.parameters()) == (empty and not ranks.is_first)
    for buffer in model.buffers():
        buffer += rank  # as GPT-J's positions, which are rounded otherwise where they are read
    reference = Policy(frozen_copy(model, dtype=torch.bfloat16))
    policy = Policy(model, value_head=value_head_of(recipe, algorithm_of(recipe), model))
    for each in (policy, reference):
        each.shard(Arrangement(1, 2, 1).mesh("cpu"), made_same=ranks.broadcast)
    assert policy.device.type == reference.device.type == "cpu"
    return _tensors(policy), _tensors(reference)


def _tensors(policy):
    """Weights, master weights in place of lowered ones, and buffers."""
    held = {name: whole(p.detach()) for name, p in policy.held().items()}
    return held | dict(policy.model.named_buffers())


LORA = {"model__lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "lm_head"]}}


@pytest.mark.parametrize("empty", [False, True], ids=["drawn", "empty"])
@pytest.mark.parametrize(
    "changes",
    [
        {"model__trained_dtype": "bfloat16"},
        {"model__source": LLAMA, "algorithm__preset": "ppo"},
        {"model__source": LLAMA | {"tie_word_embeddings": True}},
        {"model__source": LLAMA, **LORA, "kl": None},
        {"model__source": TINY_GPT2},
    ],
    ids=["master weights", "untied, value head", "tied", "adapter", "tied, learned positions"],
)
def test_all_ranks_get_the_weights_of_the_first_bit_for_bit_unit_by_unit_as_they_are_cut(changes, empty, tmp_path):
    tiny_raw(tmp_path)
    recipe = tiny_recipe(tmp_path, **changes)
    first = tiny_model(recipe)
    of_reference = _tensors(Policy(frozen_copy(first, dtype=torch.bfloat16)))
    expected = _tensors(Policy(first, value_head=value_head_of(recipe, algorithm_of(recipe), first)))
    for found in run_on_ranks(2, _after_sharding, tmp_path, changes, empty):
        for tensors, wanted in zip(found, (expected, of_reference), strict=True):
            assert_equal(tensors, wanted)
            assert all(tensors[name].dtype == tensor.dtype for name, tensor in wanted.items())


def _started(rank, folder, changes, odd):
    """Whether this rank read weights for a run, and what its learner would begin with."""
    shape = stages._shape
    with ExitStack() as patched:
        read = patched.enter_context(mock.patch.object(loading, "_read_weights", wraps=loading._read_weights))
        odd_layers = {"why_unshared": lambda model: None if next(model.parameters()).is_meta else "its layers are odd"}
        patched.enter_context(mock.patch.multiple(policy_module, **odd_layers))
        if odd:
            patched.enter_context(mock.patch.object(stages, "_shape", lambda model: [*shape(model), [rank]]))
        policy, _ = _begun(folder, **changes)
    eos = causal_lm(policy.model).generation_config.eos_token_id
    return read.called, _tensors(policy), eos, (policy.unshared_because, policy.shares_prompts)


@pytest.mark.parametrize("odd", [False, True], ids=["alike", "made otherwise than read"])
def test_the_first_rank_alone_reads_a_model_that_is_cut_unless_it_is_made_otherwise_than_it_is_read(odd, tmp_path):
    model = tiny_model(tiny_recipe(tmp_path), seed=3)
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(tmp_path / "model")
    changes = {"model__source": str(tmp_path / "model"), "model__random_weights": False}
    found = run_on_ranks(2, _started, tmp_path, changes, odd)
    assert [reads for reads, *_ in found] == [True, odd]
    for _, tensors, eos, unshared in found:
        assert (eos, unshared) == ([2, 5], ("its layers are odd", False))
        for name, weight in model.named_parameters():
            assert torch.equal(tensors[name], weight), name


DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": 1,
    "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip


def test_a_buffer_that_is_read_in_another_dtype_than_it_is_made_in_counts_as_made_otherwise(tmp_path):
    """Routers of DeepSeek-V3 have one, which the first rank would send as more bytes than the others have room for."""
    loading.load_model(DEEPSEEK, random_weights=True).save_pretrained(tmp_path)
    read, made = (loading.load_model(tmp_path, dtype=torch.bfloat16, empty=empty) for empty in (False, True))
    of_read, of_made = (stages._shape(model) for model in (read, made))
    assert [each for each in of_read if each not in of_made] == [
        ["model.layers.1.mlp.gate.e_score_correction_bias", [4], "torch.float32", False]
    ]


def _without_room(rank, folder):
    policy = _sharded(0, folder)
    needed = policy.sharded.whole_bytes
    room = mock.patch.object(policy_module, "_free_memory", return_value=needed - (rank == 1))
    with room, pytest.raises(UnavailableError) as error:
        policy.gather()
    return needed, policy.sharded.is_whole, str(error.value)


def test_where_one_rank_has_no_room_for_all_weights_every_rank_refuses_to_sample(tmp_path):
    tiny_raw(tmp_path)
    numbers = sum(p.numel() for p in tiny_model(tiny_recipe(tmp_path)).parameters())
    for needed, is_whole, said in run_on_ranks(2, _without_room, tmp_path):
        assert (needed, is_whole) == (4 * numbers, False)
        assert "for all weights, which are whole while this process samples" in said
        assert "vllm_server" in said


def _scored_in_shards(rank, folder, changes):
    policy = _sharded(0, folder, **changes)
    with torch.no_grad():
        return policy.weights().score((3, 4, 5), (6, 7), 0.8)


@pytest.mark.parametrize("changes", [{}, {"model__source": LLAMA}])  # a tied LM head, and one of its own
def test_a_probe_of_sharded_weights_says_what_full_logits_of_whole_ones_say(changes, tmp_path):
    tiny_raw(tmp_path)
    expected = scored_tokens(tiny_model(tiny_recipe(tmp_path, **changes)), (3, 4, 5), (6, 7), 0.8)
    for found in run_on_ranks(2, _scored_in_shards, tmp_path, changes):
        assert found == pytest.approx(expected, abs=1e-5)
