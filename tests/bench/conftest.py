"""Kernels run under Triton's interpreter where there is no GPU."""

from tests.head.interpreter import complete_interpreter, interpreted

if interpreted():
    complete_interpreter()
