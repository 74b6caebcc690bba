"""Checkable instructions: IFEval, IFTrain and IFBench, each official id with its repaired twin where the two differ."""

from logitless.rewards.instructions.ifbench import IFBENCH
from logitless.rewards.instructions.ifeval import IFEVAL
from logitless.rewards.instructions.iftrain import IFTRAIN
from logitless.rewards.instructions.instruction import Argument, Instruction

INSTRUCTIONS: dict[str, Instruction] = {**IFEVAL, **IFTRAIN, **IFBENCH}
"""Every instruction by id."""

__all__ = ["IFBENCH", "IFEVAL", "IFTRAIN", "INSTRUCTIONS", "Argument", "Instruction"]
