"""Advantages from rewards, a file a family; the interface is in ``estimator``.

``group_relative`` and ``batch_relative`` compare the completions of one prompt, ``token_returns`` sums rewards along a
sequence, ``turns`` and ``token_baseline`` do both, ``by_column`` reads columns of the data. Groups are found by id. NaN
marks an unscored completion: its advantage is 0, and it enters no statistic. Standard deviations are Bessel-corrected,
plus ``EPSILON``. Nothing is differentiated.
"""

from logitless.objective.advantage.batch_relative import (
    BatchStandardized,
    Gdpo,
    Gpg,
    ReinforcePPBaseline,
    batch_standardized,
    combine_rewards,
    gdpo,
    gpg,
    reinforce_pp_baseline,
    whiten,
)
from logitless.objective.advantage.by_column import (
    Hierarchical,
    OptimalValue,
    Rae,
    hierarchical,
    optimal_value,
    rae,
)
from logitless.objective.advantage.estimator import (
    EPSILON,
    AdvantageInputs,
    AdvantageOutput,
    Estimator,
    OnePerCompletion,
    clip,
    num_clipped,
)
from logitless.objective.advantage.group_relative import (
    GroupCentered,
    GroupStandardized,
    LeaveOneOut,
    LengthWeighted,
    MaxRl,
    PassAtK,
    Percentile,
    Raw,
    Remax,
    Robust,
    group_centered,
    group_standardized,
    has_signal,
    leave_one_out,
    length_weighted,
    max_rl,
    pass_at_k,
    percentile,
    raw,
    remax,
    robust,
)
from logitless.objective.advantage.token_baseline import OptimalToken, optimal_token
from logitless.objective.advantage.token_returns import Gae, ReinforcePP, gae, reinforce_pp
from logitless.objective.advantage.turns import GroupTurns, group_turns
from logitless.objective.ranges import discounted_returns, pay_at_last_token, turn_index

Advantage = (
    Raw
    | Remax
    | GroupCentered
    | GroupStandardized
    | BatchStandardized
    | LeaveOneOut
    | LengthWeighted
    | Percentile
    | Robust
    | MaxRl
    | PassAtK
    | ReinforcePPBaseline
    | Gdpo
    | Gpg
    | ReinforcePP
    | OptimalToken
    | GroupTurns
    | Gae
    | Rae
    | Hierarchical
    | OptimalValue
)

__all__ = [
    "EPSILON",
    "Advantage",
    "AdvantageInputs",
    "AdvantageOutput",
    "BatchStandardized",
    "Estimator",
    "Gae",
    "Gdpo",
    "Gpg",
    "GroupCentered",
    "GroupStandardized",
    "GroupTurns",
    "Hierarchical",
    "LeaveOneOut",
    "LengthWeighted",
    "MaxRl",
    "OnePerCompletion",
    "OptimalToken",
    "OptimalValue",
    "PassAtK",
    "Percentile",
    "Rae",
    "Raw",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "Remax",
    "Robust",
    "batch_standardized",
    "clip",
    "combine_rewards",
    "discounted_returns",
    "gae",
    "gdpo",
    "gpg",
    "group_centered",
    "group_standardized",
    "group_turns",
    "has_signal",
    "hierarchical",
    "leave_one_out",
    "length_weighted",
    "max_rl",
    "num_clipped",
    "optimal_token",
    "optimal_value",
    "pass_at_k",
    "pay_at_last_token",
    "percentile",
    "rae",
    "raw",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "robust",
    "turn_index",
    "whiten",
]
