"""Checkable instructions: IFEval, IFTrain and IFBench, each official id with its repaired twin where the two differ."""

from logitless.rewards.instructions.ifeval import IFEVAL
from logitless.rewards.instructions.instruction import Argument, Case, Instruction, Quirk

INSTRUCTIONS: dict[str, Instruction] = {**IFEVAL}
"""Every instruction by id."""

__all__ = ["IFEVAL", "INSTRUCTIONS", "Argument", "Case", "Instruction", "Quirk"]
