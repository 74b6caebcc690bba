"""The supervised stage: its loss is the plain one, its cut into micro-batches does not matter, and it learns."""

import pytest
import torch

from logitless.errors import DataError, TrainingError
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.train.learn.policy import Policy
from logitless.train.learn.warm_start import warm_start
from logitless.train.recipe.data import WarmStartSection
from logitless.train.recipe.training import TrainSection
from logitless.types import Prompt
from tests.train.tiny import ALPHABET, TINY_LLAMA

CONFIG = TINY_LLAMA | {"initializer_range": 0.2}
TOKENIZER = character_tokenizer(ALPHABET)


def _prompts(texts=("ab", "cd", "ef", "gh")):
    return [Prompt(t, t, tuple(TOKENIZER(t)["input_ids"]), {"answer": t[::-1]}) for t in texts]


def _warm(prompts, *, tokens_per_micro_batch=1000, max_grad_norm=1.0, seed=0, **options) -> Policy:
    policy = Policy(load_model(CONFIG, random_weights=True, seed=1))
    section = WarmStartSection(**{"data": {"name": "file", "path": "unused"}, **options})
    train = TrainSection(tokens_per_micro_batch=tokens_per_micro_batch, max_grad_norm=max_grad_norm)
    warm_start(policy, prompts, TOKENIZER, section, train, seed=seed, tell=lambda _: None)
    return policy


def test_the_first_step_follows_the_mean_over_the_answers_tokens():
    prompts = _prompts()
    found = _warm(prompts, steps=1, sequences_per_step=4, learning_rate=1e-2)
    oracle = Policy(load_model(CONFIG, random_weights=True, seed=1))
    loss = torch.zeros(())
    for prompt in prompts:
        ids = [*prompt.token_ids, *TOKENIZER(prompt.columns["answer"], add_special_tokens=False)["input_ids"], 2]
        rows = oracle.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        loss = loss - sum(rows[j - 1, ids[j]] for j in range(len(prompt.token_ids), len(ids))) / 12
    loss.backward()
    torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), 1.0)
    torch.optim.AdamW(oracle.model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0).step()
    for one, other in zip(found.model.parameters(), oracle.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_size_of_micro_batches_changes_rounding_only():
    options = {"steps": 3, "sequences_per_step": 4, "learning_rate": 1e-2}
    whole, cut = _warm(_prompts(), **options), _warm(_prompts(), tokens_per_micro_batch=6, **options)
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_order_follows_the_seed():
    options = {"steps": 2, "sequences_per_step": 2, "learning_rate": 1e-2}
    first, again, other = (_warm(_prompts(), seed=seed, **options) for seed in (0, 0, 1))
    weights = [torch.cat([p.flatten() for p in policy.model.parameters()]) for policy in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_step_of_more_pairs_than_there_are_takes_some_twice():
    _warm(_prompts(("ab", "cd", "ef")), steps=2, sequences_per_step=5, learning_rate=1e-2)


@pytest.mark.parametrize("answer", [None, 7])
def test_a_prompt_without_a_text_to_imitate_is_named(answer):
    prompts = [*_prompts(), Prompt("broken", "a", (3,), {"answer": answer})]
    with pytest.raises(DataError, match=r"column 'answer'.*'broken'.*answer_column"):
        _warm(prompts, steps=1)


def test_a_gradient_that_is_not_finite_stops_it(monkeypatch):
    scores = Policy.scores

    def broken(self, batch, **options):
        found = scores(self, batch, **options)
        return type(found)(logp=found.logp * float("nan"), entropy=found.entropy)

    monkeypatch.setattr(Policy, "scores", broken)
    with pytest.raises(TrainingError, match=r"step 0.*learning_rate"):
        _warm(_prompts(), steps=1)
