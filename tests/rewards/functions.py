"""Reward functions as users write them for TRL."""

import asyncio
import os
import time


def length(prompts, completions, completion_ids=None, **columns):
    return [float(len(completion)) for completion in completions]


def strict_length(completions):
    return [float(len(completion)) for completion in completions]


def matches(completions, answer, **columns):
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


async def patient_matches(completions, answer, **columns):
    await asyncio.sleep(0)
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def content_length(prompts, completions, **columns):
    return [float(len(messages[0]["content"])) for messages in completions]


def num_tokens(completion_ids, **columns):
    assert all(type(ids) is list and type(token) is int for ids in completion_ids for token in ids)
    return [float(len(ids)) for ids in completion_ids]


def sums_of_columns(prompts, completions, completion_ids=None, **columns):
    return [float(sum(row)) for row in zip(*columns.values(), strict=True)]


def as_told(completions, **columns):
    """Misbehaves as the completion asks."""
    return [_obeyed(completion) for completion in completions]


def _obeyed(order):
    match order:
        case "none":
            return None
        case "raise":
            raise RuntimeError("asked to")
        case "hang":
            time.sleep(1000)
        case "exit":
            os._exit(1)
        case "nan" | "inf" | "-inf" | "1e300":
            return float(order)
        case "text":
            return "many"
        case "fork":
            if os.fork() == 0:
                time.sleep(1000)
    return 1.0


def too_many(completions, **columns):
    return [1.0] * (len(completions) + 1)


def none_at_all(completions, **columns):
    return []


def not_a_list(completions, **columns):
    return 1.0


def evaluates(completions, answer, **columns):
    """What no reward should do: evaluates the completion as Python."""
    return [float(equal(eval(completion), expected)) for completion, expected in zip(completions, answer, strict=True)]


def equal(given, expected):
    return given == expected


def says_what_it_saw(completions, **columns):
    """1 where the completion, evaluated, is true."""
    return [float(bool(eval(completion))) for completion in completions]
