"""What is forecast for several processes is what real ones hold and send."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.sharding import local_part
from logitless.errors import ConfigurationError
from logitless.train.block import pack_groups
from logitless.train.learn.policy import Policy
from logitless.train.plan.scaling import forecast, traffic_of_rank
from logitless.train.plan.training_memory import memory_of_rank
from tests.ranks import run_on_ranks
from tests.train.groups import group_of
from tests.train.tiny import TINY_LLAMA, tiny_model, tiny_recipe

LLAMA = TINY_LLAMA | {"vocab_size": 12, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


class _Sent(TorchDispatchMode):
    """Bytes that this rank sends, where every rank of a ring passes on what it has: by collective, and of hidden states
    and their gradients in gathers and sums of lists of rows."""

    def __init__(self, world):
        super().__init__()
        self.world, self.bytes, self.hidden = world, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._schema.name.split("::")[1].strip("_")
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            size = max(t.numel() * t.element_size() for t in tensors)  # of the whole
            self.bytes[name] = self.bytes.get(name, 0) + size * (self.world - 1) // self.world
            if tensors[0].ndim == 2 and tensors[0].shape[1] == LLAMA["hidden_size"]:
                sent = {"allgather": self.world - 1, "allreduce": 2 * (self.world - 1) / self.world}
                self.hidden += int(size * sent.get(name, 0))
        return function(*args, **(kwargs or {}))


def a_recipe(folder, **changes):
    """A recipe of that model, and the model without weights."""
    recipe = tiny_recipe(folder, **({"model__source": LLAMA} | changes))
    return recipe, tiny_model(recipe, "meta")


def test_what_layers_may_keep_is_counted_while_there_are_layers_and_never_more_than_there_is(tmp_path):
    def kept(budget):
        moments = memory_of_rank(*a_recipe(tmp_path, train__activation_memory=budget), Arrangement(1, 2, 1)).moments
        assert "inputs of layers" not in moments["embedding"]
        return {name: parts["inputs of layers"] for name, parts in moments.items() if "inputs of layers" in parts}

    everything = kept(None)["layers"]
    assert kept(everything // 2) == dict.fromkeys(("head", "layers", "end"), everything // 2)
    assert kept(10 * everything) == dict.fromkeys(("head", "layers", "end"), everything)


def test_what_layers_keep_is_not_held_while_sampling(tmp_path):
    def moments(**changes):
        return memory_of_rank(*a_recipe(tmp_path, **changes), Arrangement()).moments

    short, long = (moments(train__tokens_per_micro_batch=tokens) for tokens in (100, 100_000))
    assert long["layers"]["inputs of layers"] == 1000 * short["layers"]["inputs of layers"]
    assert long["sampling"] == short["sampling"]


def test_ranks_that_sample_are_sent_copies_of_the_trained_weights(tmp_path):
    def always(**changes):
        return memory_of_rank(*a_recipe(tmp_path, model__lora={"rank": 2}, **changes), Arrangement()).always

    found = always(parallel__sampling=1, rollout__staleness=2)
    assert found["weights to send"] == 3 * found["trained weights"]
    assert "weights to send" not in always(rollout__staleness=2)


def _measured(rank, folder, changes, all_rows=False):
    """Bytes of a rank's shards and gradients, what it sent, of hidden states too, and how many tokens were scored."""
    policy = Policy(tiny_model(tiny_recipe(folder, model__source=LLAMA, **changes)))
    policy.shard(Arrangement(1, dist.get_world_size(), 1).mesh("cpu"), all_rows=all_rows)
    block = pack_groups([group_of("a", [1.0, 0.0], [4, 3]), group_of("b", [1.0, 0.0], [5, 2])])
    with _Sent(dist.get_world_size()) as sent:
        policy.scores(block.packed, temperature=1.0, backend="chunked").logp.sum().backward()
    weights = policy.named_parameters().values()
    shards, gradients = [local_part(p) for p in weights], [local_part(p.grad) for p in weights if p.grad is not None]
    return (
        [sum(t.nbytes for t in part) for part in (shards, gradients)],
        sent.bytes,
        sent.hidden,
        block.packed.num_tokens,
    )


CASES = {"float32": {}, "bfloat16 with masters": {"model__trained_dtype": "bfloat16"}}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_shards_and_messages_are_those_of_real_processes(case, num_ranks, tmp_path):
    arrangement, (recipe, model) = Arrangement(1, num_ranks, 1), a_recipe(tmp_path, **CASES[case])
    memory = memory_of_rank(recipe, model, arrangement)
    traffic = traffic_of_rank(model, arrangement, rows=1, tokens_per_row=20)
    for (shards, gradients), sent, _, _ in run_on_ranks(num_ranks, _measured, tmp_path, CASES[case]):
        assert memory.always["trained weights"] == shards
        assert memory.moments["end"]["gradients"] == gradients
        assert memory.always["AdamW moments"] == 2 * gradients
        assert traffic["weights, forward and backward"] == sent["allgather_base"]
        assert traffic["gradients of shards"] == sent["reduce_scatter_base"]
        assert traffic["shards of the LM head"] == sent["broadcast"] + sent["reduce"]


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_that_travel_to_a_head_of_all_rows_are_those_of_real_processes(case, tmp_path):
    arrangement, (_, model) = Arrangement(1, 2, 1), a_recipe(tmp_path, **CASES[case])
    for *_, sent, tokens in run_on_ranks(2, _measured, tmp_path, CASES[case], True):
        traffic = traffic_of_rank(model, arrangement, rows=1, tokens_per_row=tokens, all_rows=True)
        assert traffic["tokens for the LM head"] == sent


@pytest.mark.parametrize(("tokens", "travel"), [(16, "tokens for the LM head"), (16384, "shards of the LM head")])
def test_auto_lets_travel_for_the_head_what_is_fewer_bytes(tokens, travel, tmp_path):
    made = a_recipe(tmp_path, model__source=LLAMA | {"vocab_size": 4000}, train__tokens_per_micro_batch=tokens)
    assert travel in forecast(*made, Arrangement(1, 2, 1)).traffic_bytes
    assert "shards of the LM head" in forecast(*made, Arrangement(2, 2, 1)).traffic_bytes


def test_more_processes_need_less_each(tmp_path):
    made = a_recipe(tmp_path, train__tokens_per_step=4096)
    found = [forecast(*made, Arrangement(1, shard, 1)) for shard in (1, 2, 4)]
    assert [each.tokens for each in found] == [4096, 2048, 1024]
    assert found[1].memory.always["trained weights"] == 2 * found[2].memory.always["trained weights"]
    assert found[0].traffic_bytes == {}


def test_an_arrangement_of_another_number_of_processes_is_refused():
    with pytest.raises(ConfigurationError, match="= 6, the number of processes; given 2 \\* 2 \\* 1"):
        Arrangement.of(6, replicate=2, shard=2)
    with pytest.raises(ConfigurationError, match="4 \\* auto \\* 1"):
        Arrangement.of(6, replicate=4)
    assert Arrangement.of(6, replicate=2) == Arrangement(2, 3, 1)
    assert Arrangement.of(4, whole=True) == Arrangement(4, 1, 1)
