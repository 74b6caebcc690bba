"""What a training step does not compute, on a GPU: every log-prob bit for bit, and deterministic gradients."""

import copy

import pytest
import torch

from logitless.data.packing import Packing, pack
from logitless.models.attention import AttentionLayout
from logitless.models.loading import disable_dropout, load_model
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.objective.objective import Objective
from logitless.train.learn.policy import Policy
from logitless.train.learn.score import scores_of
from logitless.train.learn.step import MicroBatch, backward
from logitless.types import Completion, Prompt, TokenBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]
CONFIG = {
    "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4000,
    "max_position_embeddings": 4096, "initializer_range": 0.05,
}  # fmt: skip
GROUPS = ((600, (40, 130, 1, 77)), (90, (300,)), (33, (150, 20, 64)), (1, (9, 9)))


def _batch():
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 4000, (count,), generator=generator).tolist())

    pairs = []
    for name, (length, completions) in enumerate(GROUPS):
        prompt = Prompt(str(name), "", ids(length))
        pairs += [(prompt, Completion(prompt.id, ids(n), "", "stop")) for n in completions]
    return pack(pairs)


def _model():
    model = load_model(CONFIG, random_weights=True, seed=1, dtype=torch.bfloat16, device="cuda")
    disable_dropout(model)
    return model.train()


def _score(policy, batch, rows):
    return scores_of(policy, batch, rows, temperature=0.8, backend="fused")


def test_log_probs_and_entropies_are_bitwise_identical_with_every_saving_and_without():
    model = _model()
    assert install_row_invariant(model).exact
    shared, apart, batch = Policy(model), Policy(model, share_prompts=False), _batch()
    everyone, live = range(batch.num_sequences), [0, 2, 3, 6, 8]
    packing = Packing(1200, share_prompts=True, hidden_size=512)
    assert shared.shares_prompts
    expected = _score(apart, batch, [tuple(everyone)])
    for policy, rows in (
        (apart, [(s,) for s in everyone]),
        (shared, [tuple(everyone)]),
        (shared, packing.rows(everyone, batch.inputs)),
        (shared, Packing(1200).rows(everyone, batch.inputs)),
    ):
        found = _score(policy, batch, rows)
        assert torch.equal(found.logp.view(torch.int32), expected.logp.view(torch.int32))
        assert torch.equal(found.entropy.view(torch.int32), expected.entropy.view(torch.int32))
    found, tokens = _score(shared, batch, packing.rows(live, batch.inputs)), batch.tokens_of(live)
    assert torch.equal(found.logp[tokens].view(torch.int32), expected.logp[tokens].view(torch.int32))


def _gradient(model, batch, *, share):
    policy = Policy(model, share_prompts=share)
    weight = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1)).cuda()
    scores = policy.scores(batch, temperature=0.8, backend="chunked" if model.dtype == torch.float64 else "fused")
    (scores.logp * weight).sum().backward()
    found = {n: p.grad.double() for n, p in model.named_parameters()} | {"logp": scores.logp.detach().double()}
    model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_micro_batch_is_launched_while_the_one_before_it_runs():
    model, batch = _model(), _batch()
    install_row_invariant(model)
    policy = Policy(model)
    micro_batches = [_micro_batch(batch.take(row)) for row in ((0, 1, 2, 3), (4, 5), (6, 7, 8, 9))]

    def run():
        return backward(policy, Objective(), micro_batches, temperature=0.8, backend="fused", seed=0)

    run()  # kernels are compiled
    try:
        torch.cuda.set_sync_debug_mode("error")
        outputs = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(outputs) == 3


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_row_is_scored_while_the_one_before_it_runs(monkeypatch):
    model, batch = _model(), _batch()
    install_row_invariant(model)
    policy, rows = Policy(model), ((0, 1, 2, 3), (4, 5), (6, 7, 8, 9))
    expected, scores, launched = _score(policy, batch, rows), policy.scores, []

    def launching(*args, **options):
        torch.cuda.set_sync_debug_mode("error")  # until the last row is launched
        launched.append(scores(*args, **options))
        torch.cuda.set_sync_debug_mode("error" if len(launched) < len(rows) else "default")
        return launched[-1]

    monkeypatch.setattr(policy, "scores", launching)
    try:
        found = _score(policy, batch, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.logp, expected.logp)


def _micro_batch(packed):
    ones = torch.ones(packed.num_tokens)
    tokens = TokenBatch(
        packed.sequence, packed.num_sequences, advantage=ones, token_weight=ones / packed.num_tokens, logp_old=-8 * ones
    )
    return MicroBatch(packed, tokens)


@pytest.mark.parametrize("layers", ["transformers", "row_invariant"])
def test_with_a_shared_prompt_gradients_are_no_further_from_float64_and_the_same_twice(layers):
    model, batch = _model(), _batch()
    truth = _gradient(copy.deepcopy(model).double(), batch, share=False)
    if layers == "row_invariant":
        install_row_invariant(model)
    apart, shared, again = (_gradient(model, batch, share=share) for share in (False, True, True))
    for name, want in truth.items():
        plain, found = ((each[name] - want).norm() / want.norm() for each in (apart, shared))
        assert found <= 1.3 * plain + 1e-3, (name, found, plain)
        assert torch.equal(shared[name], again[name]), name


def test_a_rows_prompts_are_read_once_by_the_attention_of_transformers_layers(monkeypatch):
    from logitless.models import packed

    seen, attention = [], packed.prefix_attention

    def counted(query, key, value, layout, **options):
        seen.append(layout)
        return attention(query, key, value, layout, **options)

    monkeypatch.setattr(packed, "prefix_attention", counted)
    policy, batch = Policy(_model()), _batch()
    seen.clear()
    _score(policy, batch, [tuple(range(batch.num_sequences))])
    assert [type(layout) for layout in seen] == [AttentionLayout] * 2
    assert {layout.num_tokens for layout in seen} == {sum(p + sum(n - 1 for n in c) for p, c in GROUPS)}
