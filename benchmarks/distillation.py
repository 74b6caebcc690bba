"""Students taught by trained models, beside GRPO alone; and the price of a step under a teacher of 8 billion weights.

    python benchmarks/distillation.py --seeds 1 2 3                          # students of the quickstart's size, a CPU
    python benchmarks/distillation.py --task smollm2 --at-once 3             # SmolLM2-135M on sums, a GPU
    python benchmarks/distillation.py --task step                            # 0.5B under 8B: time, memory, the head
    python benchmarks/distillation.py --task step --places device,cuda:1     # and with it on a second GPU; or host
    python benchmarks/distillation.py --task step --student tiny --device cpu    # tries it; writes to --output
    python benchmarks/distillation.py --table                                # the tables of docs/distillation.md

A student of ``smollm2`` begins with the weights of the GGUF file (``recipes/smollm2/prepare.py``); its teacher is
the same model after its recipe. ``step`` measures the second of two blocks, with and without a teacher, in one process;
``digest`` is of all weights and optimizer states after both blocks.
"""

import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from script import (
    command_line,
    digest,
    metrics_of,
    needs_gpu,
    parsed,
    record,
    short_name,
    short_name_of,
    summary_of,
    trained,
)

RESULT = "distillation-cpu.json"
_ALONE = ["rollout.zero_signal=keep", "teacher.alone=true"]
WAYS = {
    "GRPO, without a teacher": ["teacher=null", "rollout.zero_signal=drop"],
    "`teacher.divergence: reverse_kl`": [*_ALONE, "teacher.divergence=reverse_kl"],
    "`teacher.advantage: true`": [*_ALONE, "teacher.divergence=null", "teacher.advantage=1"],
}


class Task(NamedTuple):
    """What students learn.

    Args:
        recipe, teacher: recipes of both.
        teacher_blocks, blocks, every: of the teacher and of students, and between a student's evaluations.
        device: where they run.
        title: of the students, for the page.
    """

    recipe: str
    teacher: str
    teacher_blocks: int
    blocks: int
    every: int
    device: str
    title: str


TASKS = {
    "quickstart": Task(
        "distillation",
        "quickstart",
        240,
        20,
        5,
        "cpu",
        "Students of the quickstart's size, {}, sampled at temperature 1",
    ),
    "smollm2": Task(
        "smollm2-addition", "smollm2-addition", 120, 40, 10, "cuda", "SmolLM2-135M-Instruct on sums, {}, greedy"
    ),
}


def run(task: Task, output: Path, teacher: Path, way: str, seed: int) -> dict[str, Any]:
    """One student: tokens sampled and held-out accuracy at each evaluation. Students of a seed share a warm start."""
    begun = output / f"0-{seed}" / "warm_start"
    sizes = [f"train.blocks={task.blocks}", f"evaluation.every_blocks={task.every}"]
    sizes += [f"checkpoint.every_blocks={task.blocks}", f"model.device={task.device}"]
    settings = [f"teacher.source={teacher}", *WAYS[way], *sizes, "writers=[]", f"seed={seed}"]
    if begun.exists():
        settings += ["warm_start=null", "model.random_weights=false", f"model.source={begun}"]
    folder = trained(task.recipe, f"{list(WAYS).index(way)}-{seed}", output, *settings)
    tokens, points = 0.0, []
    for line in metrics_of(folder):
        tokens += 512 * line.get("length/mean", 0.0)  # of 32 prompts with 16 completions
        if "evaluation/accuracy" in line:
            points.append({"tokens": round(tokens), "accuracy": line["evaluation/accuracy"]})
    seconds = {phase: round(took, 1) for phase, took in summary_of(folder)["seconds"].items()}
    return {"way": way, "seed": seed, "points": points, "seconds": seconds}


def learn(task: Task, taught_by: Path | None, seeds: Sequence[int], at_once: int, out: Path) -> None:
    """The teacher, then every student, so many at a time; each seed's one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        if taught_by is None:
            rare = [f"{key}.every_blocks={task.teacher_blocks}" for key in ("evaluation", "checkpoint")]
            settings = [f"train.blocks={task.teacher_blocks}", *rare, f"model.device={task.device}", "writers=[]"]
            taught_by = trained(task.teacher, "teacher", output, *settings)
        summary = summary_of(taught_by)
        more: dict[str, Any] = {"teacher": {"blocks": summary["blocks"], "accuracy": summary["accuracy_after"]}}
        if task.device != "cpu":
            more |= {"gpu": _gpu(), "at_once": at_once}
        runs: list[dict[str, Any]] = []

        def students(seed: int) -> None:
            for way in WAYS:
                runs.append(found := run(task, output, taught_by / "model", way, seed))
                print(f"{way}, seed {seed}: {[point['accuracy'] for point in found['points']]}", flush=True)
                in_order = sorted(runs, key=lambda each: (each["seed"], list(WAYS).index(each["way"])))
                record(in_order, out, **more)

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(students, seeds))


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


# --- a step


TEACHER = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Qwen3-8B."""


HEAD_BUDGET = 24 * 2**30
"""Bytes, the same on every GPU: gradients depend on what the head keeps within it."""


def step_rows(
    student: str, device: str, kinds: Sequence[str], places: Sequence[str] = ("device",)
) -> list[dict[str, Any]]:
    """A block with GRPO alone, and one with each divergence from a teacher at each place: seconds of its phases,
    memory, the head's part.

    The head's seconds are those of ``token_divergence`` forward and backward at a micro-batch's number of tokens, times
    the number of micro-batches.
    """
    import torch

    import divergence
    from logitless.bench.machine import release
    from logitless.distributed.ranks import Ranks
    from logitless.models.lm_head import backbone
    from rollout_contenders import TOKENS_PER_MICRO_BATCH, block_recipe
    from rollout_workloads import Workload
    from scale_block import block_over_ranks
    from script import milliseconds
    from shapes import SHAPES, TINY, random_model

    [shape] = [each for each in SHAPES if each.name == student]
    work = Workload.parse("2x2-4-6" if shape is TINY else "64x8-512-1:512")
    config = {**shape.config, "hidden_size": 32} if shape is TINY else TEACHER
    train = block_recipe(work, lora=False, gpu=False)["train"] | {"head_memory_budget": HEAD_BUDGET}
    rows = list[dict[str, Any]]()
    for kind, place in ((None, "device"), *itertools.product(kinds, places)):
        teacher, changes = None, {"train": train}
        if kind is not None:
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            teacher = random_model(config, dtype, device, seed=1).requires_grad_(False).eval()
            teacher = teacher if place in ("device", "host") else teacher.to(place)
            changes["teacher"] = {"source": "in memory", "divergence": kind, "alone": True, "place": place}
        found = block_over_ranks(
            *(Ranks.alone(), shape, "replicate", work, device),
            changes=changes,
            teacher=teacher,
            noted=lambda learner: {"digest": digest(learner.tensors())},
        )
        row = {
            "student": student,
            "divergence": kind,
            "place": place,
            "engine": found["engine"],
            "new_tokens": found["tokens"],
            "read_tokens": found["drawn_tokens"] + work.prompts * work.prompt_tokens,
            "optimizer_steps": found["optimizer_steps"],
            "seconds": found["seconds"],
            "peak_bytes": found["peak_bytes"],
            "digest": found["digest"],
            "row_invariant_teacher": teacher is not None and hasattr(backbone(teacher), "row_invariant"),
            "teacher_bytes": 0 if teacher is None else sum(p.nbytes for p in teacher.parameters()),
        }
        del teacher
        release(device)
        if kind is not None:
            micro_batches = max(1, round(row["read_tokens"] / TOKENS_PER_MICRO_BATCH))
            given = divergence.Streams.draw(
                row["new_tokens"] // micro_batches, shape.config["hidden_size"], config["hidden_size"],
                shape.vocabulary, device,
            )  # fmt: skip
            once = partial(divergence.logitless, given, kind, "auto", None)
            times = [milliseconds(once, device) / 1000 for _ in range(4)]
            row["head_seconds"] = statistics.median(times[1:]) * micro_batches
            del given, once
            release(device)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


# --- tables


def tables(results: Path) -> dict[str, str]:
    """The tables of docs/distillation.md, by task."""
    found = {"": _curves(results / RESULT, TASKS["quickstart"])}
    for path in sorted(results.glob("distillation-smollm2-*.json")):
        found["smollm2"] = _curves(path, TASKS["smollm2"])
    steps = [path for path in sorted(results.glob("distillation-*.json")) if "rows" in json.loads(path.read_text())]
    if steps:
        found["step"] = "\n\n".join(step_table(json.loads(path.read_text())) for path in steps)
    return found


def _curves(path: Path, task: Task) -> str:
    """Means over seeds."""
    found = json.loads(path.read_text())
    machine = found["machine"]
    count = len(found["runs"][0]["points"])
    of_way = {way: [each["points"] for each in found["runs"] if each["way"] == way] for way in WAYS}
    tokens = [
        statistics.fmean(points[i]["tokens"] for runs in of_way.values() for points in runs) for i in range(count)
    ]
    head = ["Held-out accuracy after", *("0 tokens" if not n else f"{n / 1000:.0f} thousand" for n in tokens)]
    lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * count]
    for way, runs in of_way.items():
        means = [statistics.fmean(points[i]["accuracy"] for points in runs) for i in range(count)]
        lines.append(f"| {way} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    seeds = len({each["seed"] for each in found["runs"]})
    where = found.get("gpu") or f"{machine['processor']}, {machine['threads']} threads"
    lines += [
        "",
        f"{task.title.format(f'{seeds} seeds')}; the teacher's accuracy is {found['teacher']['accuracy']:.2f}",
        f"({where}, torch {machine['torch']}; [{path.name}](../benchmarks/results/{path.name})).",
    ]
    return "\n".join(lines)


def step_table(found: Mapping[str, Any]) -> str:
    """Seconds and memory of a block by divergence, as Markdown.

    Example:
        >>> row = {"divergence": None, "seconds": {"rollout": 1.0, "training": 2.0}, "peak_bytes": 2**30}
        >>> print(step_table({"machine": {"gpu": "NVIDIA X"}, "rows": [row | {"read_tokens": 1000}]}).splitlines()[-1])
        | GRPO | 1,000 | 1.0 | 2.0 |  | 1 |
    """
    gpu = short_name_of(found["machine"]["gpu"])
    lines = [
        f"| {gpu} | tokens | sampling, s | training, s | of it divergence | GiB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for each in found["rows"]:
        seconds = each["seconds"]
        share = f"{each['head_seconds'] / seconds['training']:.0%}" if each["divergence"] else ""
        place = "" if each.get("place", "device") == "device" else f", {each['place']}"
        lines.append(
            f"| {each['divergence'] or 'GRPO'}{place} | {each['read_tokens']:,} | {seconds['rollout']:.1f} | "
            f"{seconds['training']:.1f} | {share} | {each['peak_bytes'] / 2**30:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures and writes."""
    parser = command_line(__doc__)
    parser.add_argument("--task", choices=[*TASKS, "step"], default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--at-once", type=int, default=1, help="seeds side by side")
    parser.add_argument("--teacher", type=Path, help="folder of a finished run of the teacher; default: trained here")
    parser.add_argument("--student", default="qwen2.5-0.5b", help="of --task step; tiny to try it")
    parser.add_argument("--kinds", default="reverse_kl,jensen_shannon", help="divergences of --task step, by commas")
    parser.add_argument("--places", default="device", help="teacher.place of --task step, by commas")
    parser.add_argument("--device", default="cuda", help="of --task step")
    options = parsed(parser, tables)
    if options.task != "step":
        task = TASKS[options.task]
        named = options.task == "quickstart"
        name = RESULT if named else f"distillation-{options.task}-{short_name(task.device)}.json"
        learn(task, options.teacher, options.seeds, options.at_once, options.output / name)
        return
    if options.device == "cuda":
        needs_gpu("Use --device cpu --student tiny to try the tool itself.")
    from logitless.bench.machine import environment, write_result

    rows = step_rows(options.student, options.device, options.kinds.split(","), options.places.split(","))
    machine = environment(options.device, ("triton", "transformers"))
    write_result(options.output / f"distillation-{short_name(options.device)}.json", {"machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
