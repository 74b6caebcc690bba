"""Checkable instructions: IFEval, IFTrain and IFBench, and repaired forms (``<id>@fixed``) of faulty checks."""

from logitless.rewards.instructions.ifbench import IFBENCH
from logitless.rewards.instructions.ifeval import IFEVAL
from logitless.rewards.instructions.iftrain import IFTRAIN
from logitless.rewards.instructions.instruction import Argument, Instruction

INSTRUCTIONS: dict[str, Instruction] = {**IFEVAL, **IFTRAIN, **IFBENCH}
"""Every instruction by id."""

__all__ = ["IFBENCH", "IFEVAL", "IFTRAIN", "INSTRUCTIONS", "Argument", "Instruction"]
