"""Scores in the block's order, equal to full logits."""

import pytest
import torch

from logitless.data.packing import pack
from logitless.models.loading import load_model
from logitless.train.learn.policy import Policy
from logitless.train.learn.score import scores_of
from logitless.types import Completion, Prompt


def test_scores_come_back_in_the_blocks_order_however_the_rows_are_laid():
    config = {
        "model_type": "gpt2",
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 1,
        "vocab_size": 11,
        "n_positions": 32,
        "initializer_range": 0.5,
        **{f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")},
    }
    policy = Policy(load_model(config, random_weights=True, seed=1))
    pairs = []
    for s, (prompt, answer) in enumerate([((1,), (4, 5, 6)), ((1, 2), ()), ((3, 4, 5), (7,)), ((2,), (8, 9))]):
        pairs.append((Prompt(str(s), "", prompt), Completion(str(s), answer, "", "stop")))
    found = scores_of(policy, pack(pairs), [(3, 0), (2,)], temperature=2.0, backend="reference")
    expected = []
    for prompt, completion in pairs:
        ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
        with torch.no_grad():
            rows = (policy.model(ids).logits[0] / 2.0).log_softmax(-1)
        for j, token in enumerate(completion.token_ids):
            row = rows[len(prompt.token_ids) - 1 + j]
            expected.append((float(row[token]), float(-(row.exp() * row).sum())))
    assert found.logp.tolist() == pytest.approx([e[0] for e in expected], abs=1e-5)
    assert found.entropy.tolist() == pytest.approx([e[1] for e in expected], abs=1e-5)
