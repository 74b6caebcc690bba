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
    combine_rewards,
)
from logitless.objective.advantage.by_column import Hierarchical, OptimalValue, Rae
from logitless.objective.advantage.estimator import (
    AdvantageInputs,
    AdvantageOutput,
    Estimator,
    OnePerCompletion,
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
    has_signal,
)
from logitless.objective.advantage.token_baseline import OptimalToken
from logitless.objective.advantage.token_returns import Gae, ReinforcePP
from logitless.objective.advantage.turns import GroupTurns
from logitless.objective.ranges import turn_index

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
    "combine_rewards",
    "has_signal",
    "num_clipped",
    "turn_index",
]
