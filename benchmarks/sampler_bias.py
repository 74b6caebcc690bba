"""Bias of a float32 policy's gradient if it is sampled in bfloat16, with and without a sampler correction.

The model is so small that every completion can be enumerated. So the expected gradient under the bfloat16 copy's
probabilities is exact, and its difference from the gradient under the policy's own probabilities is bias. Both
gradients are followed in training.

    python benchmarks/sampler_bias.py    # benchmarks/results/sampler_bias.json and docs/objectives/sampler_bias.svg
"""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logitless.bench.machine import environment, write_result
from logitless.models.loading import load_model
from logitless.objective.correction import SamplerCorrection
from logitless.objective.objective import Objective
from logitless.objective.surrogate import Reinforce
from logitless.types import TokenBatch
from script import RESULTS, ROOT, command_line

RESULT = RESULTS / "sampler_bias.json"
PLOT = ROOT / "docs" / "objectives" / "sampler_bias.svg"
VOCABULARY = 6
CORRECTIONS: dict[str, SamplerCorrection | None] = {
    "none": None,
    "token": SamplerCorrection("token", max=2.0),
    "sequence": SamplerCorrection("sequence", max=2.0),
}


def tiny_policy(seed: int) -> nn.Module:
    """A model whose logits spread over several nats, as trained ones do."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = {"model_type": "llama", "num_hidden_layers": 2, "initializer_range": 0.3, **shape}
    return load_model(config, random_weights=True, seed=seed, attention="eager")


def completions(length: int) -> Tensor:
    """Every completion of a length, [M, length]."""
    return torch.tensor(list(itertools.product(range(VOCABULARY), repeat=length)))


def token_logp(model: nn.Module, tokens: Tensor) -> Tensor:
    """Log-probs [M, length] of completions after a prompt of one token."""
    prompt = torch.zeros(len(tokens), 1, dtype=torch.long)
    logits = model(input_ids=torch.cat([prompt, tokens[:, :-1]], 1)).logits.float()
    return logits.log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]


def sampler_logp(model: nn.Module, tokens: Tensor) -> Tensor:
    """The same by the copy in bfloat16 that samples."""
    with torch.no_grad():
        return token_logp(copy.deepcopy(model).to(torch.bfloat16), tokens)


def expected_gradient(
    model: nn.Module, tokens: Tensor, reward: Tensor, correction: SamplerCorrection | None, *, exact: bool
) -> tuple[Tensor, float]:
    """The gradient [parameters] of a block with every completion in it, and the expected reward of the policy.

    Args:
        model: the policy.
        tokens: [M, length].
        reward: [M].
        correction: or None.
        exact: weigh completions by the policy's own probability and not by the sampler's.
    """
    logp = token_logp(model, tokens)
    old = logp.detach()
    drawn = old if exact else sampler_logp(model, tokens)
    probability = drawn.sum(1).double().exp()
    num, length = tokens.shape
    batch = TokenBatch(
        sequence=torch.arange(num).repeat_interleave(length),
        num_sequences=num,
        advantage=(reward - (probability * reward).sum() / probability.sum()).float().repeat_interleave(length),
        token_weight=(probability / probability.sum()).float().repeat_interleave(length),
        logp_old=old.flatten(),
        logp_sampler=drawn.flatten(),
    )
    output = Objective(surrogate=Reinforce(), correction=correction)(logp.flatten(), None, batch)
    gradient = torch.autograd.grad(output.loss, list(model.parameters()))
    expected = float((old.sum(1).double().exp() * reward).sum())
    return torch.cat([each.flatten() for each in gradient]), expected


def rewards_of(tokens: Tensor, seed: int) -> Tensor:
    """0 or 1 a completion, without a pattern; one in four is right."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(len(tokens), generator=generator) < 0.25).double()


def relative_bias(seed: int, length: int) -> dict[str, float]:
    """``|E_sampler[g] - E_policy[g]| / |E_policy[g]|`` under each correction."""
    model, tokens = tiny_policy(seed), completions(length)
    reward = rewards_of(tokens, seed)
    truth, _ = expected_gradient(model, tokens, reward, None, exact=True)
    found = {}
    for name, correction in CORRECTIONS.items():
        gradient, _ = expected_gradient(model, tokens, reward, correction, exact=False)
        found[name] = float((gradient - truth).norm() / truth.norm())
    return found


def trained(seed: int, length: int, steps: int, learning_rate: float) -> dict[str, list[float]]:
    """Expected reward before each step, with exact gradients and with each correction of the sampler's."""
    tokens = completions(length)
    reward, curves = rewards_of(tokens, seed), dict[str, list[float]]()
    for name in ("exact", *CORRECTIONS):
        model, curves[name] = tiny_policy(seed), []
        for _ in range(steps):
            gradient, expected = expected_gradient(model, tokens, reward, CORRECTIONS.get(name), exact=name == "exact")
            curves[name].append(expected)
            sizes = [p.numel() for p in model.parameters()]
            with torch.no_grad():
                for parameter, part in zip(model.parameters(), gradient.split(sizes), strict=True):
                    parameter -= learning_rate * part.view_as(parameter)
    return curves


def measured(seeds: int, steps: int) -> dict[str, Any]:
    """All numbers of the plot."""
    bias = [
        {"seed": seed, "length": length, **relative_bias(seed, length)} for length in (2, 3, 4) for seed in range(seeds)
    ]
    return {"bias": bias, "training": [trained(seed, 3, steps, 0.05) for seed in range(seeds)]}


def draw(result: dict[str, Any], path: Path) -> None:
    """Bias by length, and how far training strays from exact gradients."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "logitless", "svg.fonttype": "path"}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        labels = {"none": "no correction", "token": "token weights", "sequence": "sequence weights"}
        for name, label in labels.items():
            lengths = sorted({row["length"] for row in result["bias"]})
            means = [_mean([row[name] for row in result["bias"] if row["length"] == length]) for length in lengths]
            left.plot(lengths, means, marker="o", label=label)
            gaps = [
                _mean([abs(run[name][step] - run["exact"][step]) for run in result["training"]])
                for step in range(len(result["training"][0]["exact"]))
            ]
            right.plot(range(len(gaps)), gaps, label=label)
        left.set(yscale="log", xlabel="tokens of a completion", ylabel="bias of the gradient, relative", xticks=lengths)
        right.set(yscale="log", xlabel="step", ylabel="|expected reward - with exact gradients|")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend()
        figure.savefig(path, metadata={"Date": None})


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    """Measure and draw."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--plot", type=Path, default=PLOT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measured(options.seeds, options.steps)
    write_result(options.out, {"machine": environment("cpu", ("transformers",)), **result})
    draw(json.loads(options.out.read_text()), options.plot)


if __name__ == "__main__":
    main()
