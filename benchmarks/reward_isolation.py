"""The cost of isolating completions in rewards: verdicts a second, with and without a process for each text.

python benchmarks/reward_isolation.py --out benchmarks/results/reward-isolation.json

``kept`` scores all completions in the same workers, as if their texts were harmless; ``apart`` is what the rewards do.
Both are timed in turn, and the fastest round counts, because other processes can only slow one down.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logitless.rewards.code import Code
from logitless.rewards.user_function import Function
from logitless.rewards.workers.pool import shared_pool
from logitless.rewards.workers.pooled import MEBIBYTE
from logitless.rewards.workers.sandbox import sandbox_of
from script import RESULTS, command_line, record

RESULT = RESULTS / "reward-isolation.json"
SOLUTION = (
    "Each clip costs $\\frac{3}{4}$ of a dollar (so 48 + 24 = 72 clips cost $72 \\cdot \\frac{3}{4}$), "
    "therefore the answer is $\\boxed{%d}$."
)
ADDER = "a, b = map(int, input().split())\nprint(a + b)"


def cases(count: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """By name, ways of judging that many completions."""
    entry = {"question": "?", "answer": "a(b)ba", "metadata": {"letters": ["a", "b", "b", "a"]}}
    limits: dict[str, Any] = {"deadline_seconds": 60.0, "memory_bytes": 1024 * MEBIBYTE}

    def library(task: str, items: Callable[[], list[Any]], ways: Any) -> Callable[[], Any]:
        warm = "warm_math" if task == "grade_math" else "warm_reasoning_gym"
        pool = shared_pool(task)
        pool.load(f"logitless.rewards.workers.tasks:{warm}", call=True)
        return lambda: pool.run(f"logitless.rewards.workers.tasks:{task}", items(), ways=ways, **limits)

    numbers = iter(range(10**9))  # no text twice: parsers remember what they have read

    def solutions() -> list[tuple[str, str]]:
        return [("54", SOLUTION % next(numbers)) for _ in range(count)]

    words = [("palindrome_generation", "{}", entry, "abba")] * count
    lists = [("string_insertion", "{}", entry, "['a', 'b']")] * count
    texts = [said for _, said in solutions()]
    programs = max(8, count // 10)
    columns = {"tests": [[{"input": "1 2", "output": "3"}]] * programs}

    def function(process: Any) -> Callable[[], Any]:
        reward = Function(path="tests.rewards.functions:length", process=process)
        return lambda: reward.verdicts(["p"] * count, texts, {})

    def code(sandbox: Any) -> Callable[[], Any]:
        reward = Code(sandbox=sandbox)
        return lambda: reward.verdicts(["p"] * programs, [ADDER] * programs, columns)

    return {
        "math": {
            name: library("grade_math", solutions, way) for name, way in (("kept", "kept"), ("apart", "confined"))
        },
        "reasoning_gym, words": {"kept": library("grade_reasoning_gym", lambda: words, "kept")},
        "reasoning_gym, other texts": {
            name: library("grade_reasoning_gym", lambda: lists, way)
            for name, way in (("kept", "kept"), ("apart", "confined"))
        },
        "function": {"kept": function("kept"), "apart": function("fresh"), "confined": function("confined")},
        "code": {"kept": code("none"), "apart": code("required")},
    }


def seconds(judge: Callable[[], Any]) -> float:
    """Wall clock of one call."""
    start = time.perf_counter()
    judge()
    return time.perf_counter() - start


def main() -> None:
    """Time every case, print a table and write a file."""
    parser = command_line(__doc__)
    parser.add_argument("--count", type=int, default=400, help="completions a call; a tenth of it for programs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = []
    for name, ways in cases(options.count).items():
        items = max(8, options.count // 10) if name == "code" else options.count
        best = {way: float("inf") for way in ways}
        for judge in ways.values():
            judge()
        for _ in range(options.rounds):
            for way, judge in ways.items():
                best[way] = min(best[way], seconds(judge))
        rates = {way: round(items / spent, 1) for way, spent in best.items()}
        runs.append({"reward": name, "completions": items, "verdicts_per_second": rates})
        print(f"{name:28s}" + "  ".join(f"{way} {rate:9.1f}/s" for way, rate in rates.items()), flush=True)
    setting = {
        "workers": len(os.sched_getaffinity(0)),
        "walls": str(sandbox_of("program")),
        "load_average": round(os.getloadavg()[0], 1),
    }
    record([setting | run for run in runs], options.out)


if __name__ == "__main__":
    main()
