"""Advantages that read columns of the data: who plays, what is compared, what the reference earns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.errors import ConfigurationError, InputError
from logitless.objective.advantage.estimator import (
    AdvantageInputs,
    AdvantageOutput,
    OnePerCompletion,
    check_discount,
    refuse_infinite,
)
from logitless.objective.advantage.group_relative import group_centered
from logitless.objective.inputs import shaped
from logitless.objective.over_ranks import SumOverRanks, one_rank


@shaped
def rae(
    rewards: Float[Tensor, "B"], role: Sequence[str], baselines: Mapping[str, float], decay: float = 0.95
) -> tuple[Float[Tensor, "B"], dict[str, float]]:
    """Reward minus a moving average of its role's rewards, one completion after the other.

    ``A_i = r_i - b[role_i], then b[role_i] = decay * b[role_i] + (1 - decay) * r_i``, b from 0

    Args:
        rewards: [B], in the order in which they are counted; NaN = unscored, counted nowhere.
        role: B roles, such as a game and a player.
        baselines: of the roles so far; 0 for any other.
        decay: from 0 to 1.

    Returns:
        [B], 0 for unscored completions; and the baselines afterwards.

    Source: role-conditioned advantage estimation, SPIRAL, arXiv:2506.24119: spiral-rl/spiral a02d0ed, ``EMA`` in
        spiral/utils.py and ``prepare_trajectories`` in train_spiral.py; prime-rl 559b447, orchestrator/algo/rae.py.

    Example:
        >>> rae(torch.tensor([1.0, 1.0, -1.0]), ["first", "first", "second"], {"second": -0.5}, decay=0.75)
        (tensor([ 1.0000,  0.7500, -0.5000]), {'second': -0.625, 'first': 0.4375})
    """
    refuse_infinite(rewards)
    now, found = dict(baselines), []
    for reward, name in zip(rewards.tolist(), role, strict=True):
        baseline = now.get(name, 0.0)
        if reward == reward:  # not NaN
            now[name] = decay * baseline + (1 - decay) * reward
        found.append(reward - baseline)
    return torch.tensor(found, dtype=rewards.dtype, device=rewards.device).nan_to_num(nan=0.0), now


@dataclass(frozen=True)
class Rae(OnePerCompletion):
    """See ``rae``. Baselines last over blocks, and are in checkpoints.

    Args:
        columns: of the data, which together name a role: ``[game, player]``.
        decay: of a baseline for each completion, from 0 to 1.

    Raises:
        ConfigurationError: no column, or a decay outside of 0 to 1.
    """

    columns: tuple[str, ...] = ("role",)
    decay: float = 0.95
    name: Literal["rae"] = "rae"
    compares_group: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_named(self.name, columns=self.columns)
        check_discount("decay", self.decay)

    @property
    def reads_columns(self) -> tuple[str, ...]:
        return self.columns

    def __call__(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> AdvantageOutput:
        del sum_over_ranks  # every rank has all completions
        advantage, state = self._found(inputs)
        return AdvantageOutput(self._clipped(advantage)[inputs.sequence], state=state)

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        return self._found(inputs)[0]

    def _found(self, inputs: AdvantageInputs) -> tuple[Tensor, dict[str, float]]:
        return rae(inputs.completion_rewards(), _joined(inputs, self.columns), inputs.state, self.decay)


@shaped
def hierarchical(
    rewards: Float[Tensor, "B"],
    role: Sequence[str],
    task: Sequence[str],
    problem: Sequence[str],
    solvers: Sequence[str] = ("solver",),
) -> Float[Tensor, "B"]:
    """Reward minus the mean of its peers: a solver's are those of its problem, a proposer's those of its task.

    ``A_i = r_i - mean(r_j, role_j = role_i, task_j = task_i, and problem_j = problem_i where role_i is a solver)``

    Args:
        rewards: [B], NaN = unscored.
        role: B roles, of which those in ``solvers`` are compared within a problem.
        task: B names of what problems were proposed for.
        problem: B names of what solvers solve; of a proposer it is not read.

    Returns: as ``group_centered``.

    Source: prime-rl 559b447, orchestrator/algo/hierarchical_grpo.py, whose group is a task and whose episode a problem.

    Example:
        >>> hierarchical(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.5, 0.25]), ["solver"] * 4 + ["proposer"] * 2, ["t"] * 6,
        ...              ["a", "a", "a", "b", "a", "b"])
        tensor([ 0.3333,  0.3333, -0.6667,  0.0000,  0.1250, -0.1250])
    """
    peers: dict[tuple[str, ...], int] = {}
    keys = [(r, t, p if r in solvers else "") for r, t, p in zip(role, task, problem, strict=True)]
    group = torch.tensor([peers.setdefault(key, len(peers)) for key in keys], device=rewards.device, dtype=torch.long)
    return group_centered(rewards, group)


@dataclass(frozen=True)
class Hierarchical(OnePerCompletion):
    """See ``hierarchical``.

    Args:
        role, task, problem: columns of the data; a proposer's problem may be null.
        solvers: roles that are compared within a problem.

    Raises:
        ConfigurationError: no role is a solver.
    """

    role: str = "role"
    task: str = "task"
    problem: str = "problem"
    solvers: tuple[str, ...] = ("solver",)
    name: Literal["hierarchical"] = "hierarchical"
    compares_group: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_named(self.name, solvers=self.solvers)

    @property
    def reads_columns(self) -> tuple[str, ...]:
        return self.role, self.task, self.problem

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        role, task, problem = (_joined(inputs, (each,)) for each in self.reads_columns)
        return hierarchical(inputs.completion_rewards(), role, task, problem, self.solvers)


@shaped
def optimal_value(
    rewards: Float[Tensor, "B"], of_reference: Float[Tensor, "B K"], beta: float = 0.5
) -> Float[Tensor, "B"]:
    """Reward minus the value of the best policy near the reference, estimated from the reference's rewards.

    ``A_i = r_i - beta * log(mean_k(exp(r_ref_k / beta)))`` over the K completions of the reference

    Args:
        rewards: [B], NaN = unscored.
        of_reference: [B, K] rewards of K completions of the same prompt by the reference; NaN where one has fewer.
        beta: temperature of the KL to the reference, positive.

    Returns:
        [B]; 0 for unscored completions.

    Source: A*-PO, arXiv:2505.20686, as in TRL 1.16, experimental/a2po/a2po_trainer.py, ``_estimate_optimal_values``.

    Example:
        >>> optimal_value(torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        tensor([ 0.0000, -0.7169])
    """
    refuse_infinite(rewards)
    known = ~of_reference.isnan()
    total = torch.where(known, of_reference / beta, -torch.inf).logsumexp(1)
    return (rewards - beta * (total - known.sum(1).log())).nan_to_num(nan=0.0)


@dataclass(frozen=True)
class OptimalValue(OnePerCompletion):
    """See ``optimal_value``.

    Args:
        column: of the data: a list of rewards of the reference's completions.
        beta: temperature of the KL to the reference.

    Raises:
        ConfigurationError: a temperature that is not positive.
    """

    column: str = "reference_rewards"
    beta: float = 0.5
    name: Literal["optimal_value"] = "optimal_value"
    compares_group: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise ConfigurationError(needed="a positive beta", given=str(self.beta), remedy="Use 0.5.")

    @property
    def reads_columns(self) -> tuple[str, ...]:
        return (self.column,)

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        rewards = inputs.completion_rewards()
        if not len(rewards):
            return rewards
        rows = [torch.tensor(_numbers(self.column, row), dtype=rewards.dtype) for row in inputs.column(self.column)]
        of_reference = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
        return optimal_value(rewards, of_reference.to(rewards.device), self.beta)


def _joined(inputs: AdvantageInputs, columns: Sequence[str]) -> list[str]:
    """One name a completion, of all these columns."""
    return ["/".join(map(str, row)) for row in zip(*map(inputs.column, columns), strict=True)]


def _numbers(column: str, row: Any) -> list[float]:
    """A row's list of numbers.

    Raises:
        InputError: it is none, or empty.
    """
    given = row.tolist() if hasattr(row, "tolist") else row
    if not isinstance(given, list | tuple) or not given or not all(isinstance(each, int | float) for each in given):
        raise InputError(
            needed=f"a list of rewards in column {column!r} of each row",
            given=repr(row)[:100],
            remedy="Sample the reference (`logitless sample --samples 8`), score what it says and add the rewards.",
        )
    return [float(each) for each in given]


def _check_named(name: str, **names: tuple[str, ...]) -> None:
    """Raises ConfigurationError for an empty list."""
    for what, given in names.items():
        if not given:
            raise ConfigurationError(needed=f"{what} of {name!r}", given="none", remedy="Name at least one.")
