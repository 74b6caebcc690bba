"""Engines for whole small runs: one that says what it is told, one that keeps weights of its own."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from logitless.rollout.engine import Weights
from logitless.rollout.transformers import TransformersEngine
from logitless.train.assembly.engines import Engines, open_engines
from logitless.types import Completion
from tests.train.tiny import ALPHABET


class FakeEngine:
    """An engine without weights."""

    def load(self, weights: Weights, version: int) -> None:
        self.version = version

    def close(self) -> None:
        """Nothing to give back."""


@dataclass
class Scripted(FakeEngine):
    """An engine that says what ``answers`` gives for a prompt's text, and notes what it was asked for."""

    answers: Callable[[str, int], str]

    def __post_init__(self):
        self.asked, self.version = [], None

    def sample(self, prompts, num_samples, options, *, seed):
        self.asked.append(([p.text for p in prompts], num_samples, options, seed))
        out = []
        for p in prompts:
            texts = [self.answers(p.text, i) for i in range(num_samples)]
            ids = [tuple(3 + ALPHABET.index(c) for c in t) for t in texts]
            ends = ["length" if len(t) == 6 else "stop" for t in texts]
            said = zip(ids, texts, ends, strict=True)
            out.append([Completion(p.id, i, t, e, weights_version=self.version) for i, t, e in said])
        return out


def trained_with(engine):
    """What opens engines, with another one for training."""
    return lambda *arguments: replace(open_engines(*arguments), training=engine)


class Copying:
    """An engine with a model of its own, built from the named tensors alone, and nothing until it is given some.

    Args:
        recipe: of the run.
        model: for its class and configuration; its weights are not read.
        tokenizer: of the model.
    """

    def __init__(self, recipe, model, tokenizer):
        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        self.model = type(inner)(copy.deepcopy(inner.config))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(torch.nan)
        self.inner = TransformersEngine(self.model, tokenizer, max_rows=recipe.rollout.max_rows)
        self.loaded, self.closed = [], False

    def load(self, weights: Weights, version: int) -> None:
        parameters = dict(self.model.named_parameters())
        named = dict(weights.tensors())
        assert named.keys() == parameters.keys()
        with torch.no_grad():
            for name, tensor in named.items():
                parameters[name].copy_(tensor)
        self.inner.load(Weights.of(self.model), version)
        self.loaded.append(version)

    def sample(self, prompts, num_samples, options, *, seed):
        assert self.loaded, "sampled before there were weights"
        return self.inner.sample(prompts, num_samples, options, seed=seed)

    def close(self) -> None:
        self.closed = True


def copying(*arguments) -> Engines:
    """Two engines, each with a copy of its own."""
    return Engines(training=Copying(*arguments), evaluation=Copying(*arguments))
