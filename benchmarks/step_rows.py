"""Rows of ``benchmarks/step.py``: one optimizer step of this library's learner and of TRL's trainer, by workload.

Contenders come in two forms of the same weights. ``autocast``: float32 weights, products in bfloat16 by autocast,
activations recomputed, the layers of transformers: a recipe without options, and TRL's default. ``row-invariant``:
bfloat16 weights with float32 masters and the fused layers; at memory budget 0 the head keeps nothing, every layer keeps
its input alone, in the host's memory, and packed rows are short. Every step starts from the same weights and an
optimizer without history, and really moves the weights, which are put back outside the clock; a sample of their change
is compared with that of the autocast form.

    mfu = (6 body parameters x tokens + 6 V D x scored tokens) / seconds / rate of a large bfloat16 product

over nonzero-advantage sequences, each with its own copy of the prompt, with 4 for 6 where the base is frozen;
recomputation does not count. ``over_...`` say how many times faster than another contender a row is. TRL's trainer and
the autocast form do the same work whatever the advantages are, so that where some are zero their steps are timed on
``long`` alone and stand for themselves elsewhere; there alone such a step is compared with one of the autocast form.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from logitless.bench.machine import release
from logitless.distributed.arrangement import Arrangement
from logitless.distributed.ranks import Ranks
from logitless.errors import UnavailableError
from logitless.models.activations import set_modes
from logitless.models.lm_head import backbone, causal_lm, lm_head
from logitless.train.assembly.stages import learner_of
from logitless.train.block import ScoredBlock
from logitless.train.learn.policy import Policy
from logitless.train.learn.progress import Progress
from logitless.train.learn.score import scores_of
from logitless.train.optim.master_weights import lower_to, round_master_weights
from logitless.train.optim.optimizer import take_step
from logitless.train.recipe.config import Recipe
from shapes import WORKLOADS, Shape
from step_contenders import ALGORITHM, InstalledTRL, Rollouts
from step_profile import kernel_times

FORM = {
    "logitless": "row-invariant",
    "logitless-budget-0": "row-invariant",
    "logitless-8bit-moments": "row-invariant",
    "logitless-host-moments": "row-invariant",
    "logitless-autocast": "autocast",
    "trl": "autocast",
    "trl-without-recomputation": "autocast",
}
CONTENDERS = tuple(FORM)
MOMENTS = {"logitless-8bit-moments": "8bit", "logitless-host-moments": "host"}
"""``train.optimizer.moments`` of those that are not float32 on the device; measured at live fraction 1 on *long*."""

STAGES = (("autocast", "float32"), ("row-invariant", "float32"), ("row-invariant", "8bit"), ("row-invariant", "host"))
"""Form and moments, in the order in which they are measured: the first gives what the others are compared with."""

LIVE = (1.0, 0.5)
PROFILED = ("long", 1.0)
"""Where everyone's kernels are timed, too; those of ``logitless`` also where they are asked for."""

LEARNING_RATE = 1e-4
SHORT_ROWS = 12288
"""Most tokens of a packed row at memory budget 0: shorter rows save no memory that matters, and cost launches."""

SAMPLE = 512
"""Elements of each tensor whose change is compared."""

OUT_OF_MEMORY = "out of memory"

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One step to take: who, on what."""

    contender: str
    workload: str
    live: float

    def names(self, row: Row) -> bool:
        """Whether a row is of this case."""
        return (row["contender"], row["workload"], row["live"]) == (self.contender, self.workload, self.live)


def cases(
    workloads: Sequence[str], contenders: Sequence[str] = CONTENDERS, fractions: Sequence[float] = LIVE
) -> list[Case]:
    """Every case worth a run.

    Example:
        >>> len(cases(["long", "512/64-256"], ["logitless", "trl"]))
        7
    """
    return [
        Case(contender, workload, live)
        for workload in workloads
        for live in fractions
        for contender in contenders
        if live == 1.0 or workload == "long" or FORM[contender] == "row-invariant"
        if contender not in MOMENTS or (workload, live) == PROFILED
    ]


def measure(
    shape: Shape,
    device: str,
    todo: Sequence[Case],
    references: Path,
    *,
    steps: int,
    keep: Callable[[str, list[Row]], None],
    in_time: Callable[[], bool],
    profiles: Sequence[str] = (),
) -> None:
    """Measures cases and hands out each row as soon as it is there.

    Args:
        shape: of the model.
        device: ``cuda``, or ``cpu`` to try the tool.
        todo: what is missing.
        references: folder with what the autocast form gave: log-probs of the policy and a sample of one step's change.
        steps: timed steps of a case, fewer of a slow one.
        keep: takes ``rows`` or ``profile`` and rows.
        in_time: whether another case may start.
        profiles: workloads on which kernels of ``logitless`` are timed, besides ``PROFILED``.
    """
    rate = product_rate(device)
    for form, moments in STAGES:
        mine = [
            case for case in todo if (FORM[case.contender], MOMENTS.get(case.contender, "float32")) == (form, moments)
        ]
        unknown = [case for case in todo if case not in mine and not _reference_path(references, shape, case).exists()]
        unknown = list({(case.workload, _compared(case)): case for case in unknown}.values())
        if not (mine or (form == "autocast" and unknown)):
            continue
        try:
            stage = Stage(shape, device, form, moments)
        except Exception as error:  # moments that this machine cannot hold
            timed = Timed(failure=_first_line(error))
            for case in mine:
                drawn = Rollouts.draw(shape.workload(case.workload), shape.vocabulary).with_live(case.live)
                keep("rows", [_row(shape, case, drawn, timed, Reference(torch.empty(0), {}, None, None), rate)])
            continue
        for case in [*mine, *unknown] if form == "autocast" else mine:
            if not in_time():
                return
            drawn = Rollouts.draw(shape.workload(case.workload), shape.vocabulary)
            rollouts, path = drawn.with_live(case.live), _reference_path(references, shape, case)
            if not path.exists():
                stage.record(drawn.with_live(_compared(case)), path)
            if case not in mine:
                continue
            reference = Reference.load(path)
            if _compared(case) != case.live:
                reference = replace(reference, change={}, loss=None, grad_norm=None)
            stepper = stage.stepper(case.contender, rollouts)
            if isinstance(stepper, str):
                keep("rows", [_row(shape, case, rollouts, Timed(failure=stepper), reference, rate)])
                continue
            timed = stage.timed(stepper, rollouts, reference, steps=steps)
            keep("rows", [_row(shape, case, rollouts, timed, reference, rate)])
            asked = case.contender == "logitless" and case.workload in profiles
            shown = asked or (case.workload, case.live) == PROFILED
            if shown and timed.failure is None and device == "cuda":
                found = kernel_times(partial(stepper.step, rollouts, reference), before=stage.restore)
                named = {"contender": case.contender, "workload": case.workload, "live": case.live}
                keep("profile", [{**named, **each} for each in found])
        del stage
        release(device)


@dataclass(frozen=True)
class Reference:
    """What the autocast form says of a step.

    Args:
        logp: [N] of the policy, with which ``logp_old`` is made.
        change: sampled change of the weights by name.
        loss, grad_norm: of the step; None where it was another.
    """

    logp: Tensor
    change: dict[str, Tensor]
    loss: float | None
    grad_norm: float | None

    def save(self, path: Path) -> None:
        """Write it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        numbers = {"loss": repr(self.loss), "grad_norm": repr(self.grad_norm)}
        save_file({"logp": self.logp, **{f"change.{n}": t for n, t in self.change.items()}}, path, metadata=numbers)

    @classmethod
    def load(cls, path: Path) -> "Reference":
        """Read it."""
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            numbers = file.metadata()
        change = {n.removeprefix("change."): t for n, t in tensors.items() if n.startswith("change.")}
        return cls(tensors["logp"], change, float(numbers["loss"]), float(numbers["grad_norm"]))


def _reference_path(folder: Path, shape: Shape, case: Case) -> Path:
    return folder / f"{shape.name}-{case.workload.replace('/', '_')}-{_compared(case):g}.safetensors"


def _compared(case: Case) -> float:
    """The live fraction of the step whose log-probs a case takes."""
    return case.live if case.workload == "long" else 1.0


@dataclass
class Timed:
    """Steps of one case, or why there are none."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    weights_difference: float | None = None
    failure: str | None = None


Step = Callable[[Rollouts, Reference], tuple[float, float]]
"""One whole step on recorded rollouts: its loss and gradient norm."""


@dataclass(frozen=True)
class Stepper:
    """How a contender steps.

    Args:
        step: what is timed.
        warm_up: what is done once before, on the same rollouts: kernels are built and memory is taken.
    """

    step: Step
    warm_up: Step


class Stage:
    """A model in one form, its learner, and the weights that every step starts from.

    Args:
        shape: of the model.
        device: ``cuda`` or ``cpu``; on the CPU, to try the tool, both forms are the layers of transformers in float32.
        form: ``autocast`` or ``row-invariant``.
        moments: of the optimizer, as in a recipe.
    """

    def __init__(self, shape: Shape, device: str, form: str, moments: str) -> None:
        if moments == "host" and device != "cuda":
            raise UnavailableError(
                needed="a GPU for train.optimizer.moments: host", given=device, remedy="Leave the contender out."
            )
        self.shape, self.device, self.form = shape, device, form
        self.model = shape.build(device)
        fused = device == "cuda" and form == "row-invariant"
        if fused:
            from logitless.models.row_invariant.layers import install_row_invariant
            from logitless.models.row_invariant.self_check import self_check

            lower_to(torch.bfloat16, self.model.parameters())
            install_row_invariant(self.model)
            self_check(self.model)
        recipe = _recipe(
            shape,
            "row_invariant" if fused else "transformers",
            autocast="bfloat16" if device == "cuda" and form == "autocast" else None,
            saves=form == "row-invariant",
            moments=moments,
        )
        self.learner, _ = learner_of(recipe, ALGORITHM, self.model, Arrangement(), Ranks.alone())
        held = {name: p for name, p in self.policy.held().items() if p.requires_grad}
        self.held = held
        self.start = {name: p.detach().to("cpu", copy=True) for name, p in held.items()}
        if device == "cuda":
            self.start = {name: p.pin_memory() for name, p in self.start.items()}

    @property
    def policy(self) -> Policy:
        """As the contender uses it."""
        return self.learner.policy

    def restore(self) -> None:
        """The weights of the start, an optimizer without history."""
        with torch.no_grad():
            for name, p in self.held.items():
                p.copy_(self.start[name], non_blocking=True)
        round_master_weights(self.policy.named_parameters().values())
        for state in self.learner.optimizer.state.values():
            if any(hasattr(value, "codes") for value in state.values()):
                state.clear()
            for value in state.values():
                value.zero_()
        self.learner.progress = Progress()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def change(self) -> dict[str, Tensor]:
        """Sampled change of the weights since the start, on the CPU."""
        return {name: _sample(p.detach()).cpu() - _sample(self.start[name]) for name, p in self.held.items()}

    def record(self, rollouts: Rollouts, path: Path) -> None:
        """Take the step that others are compared with."""
        self.use("logitless-autocast")
        plan = rollouts.plan.micro_batches
        logp = scores_of(self.policy, rollouts.packed, plan, temperature=1.0, backend="auto").logp
        reference = Reference(logp, {}, 0.0, 0.0)
        loss, norm = self._learn(rollouts, reference)
        Reference(logp, self.change(), loss, norm).save(path)
        self.restore()

    def stepper(self, contender: str, rollouts: Rollouts) -> Stepper | str:
        """How a contender steps, or why it cannot."""
        self.use(contender)
        if not contender.startswith("trl"):
            return Stepper(self._learn, warm_up=self._learn)
        try:
            recomputation = contender == "trl"
            trainer = InstalledTRL(
                self.model,
                self.learner.optimizer,
                rollouts.workload,
                autocast=self.device == "cuda",
                recomputation=recomputation,
            )
            _recompute(self.model, on=recomputation)
        except Exception as error:  # a peer that cannot run here is a result, not the end of the run
            return _first_line(error)

        def step(rollouts: Rollouts, reference: Reference, *, most: int | None = None) -> tuple[float, float]:
            trainer.load(rollouts.with_old(reference.logp))
            loss = trainer.gradients(most)
            norm, _ = take_step(self.learner.optimizer, rate=LEARNING_RATE, max_grad_norm=1.0)
            return loss, float(norm)

        return Stepper(step, warm_up=partial(step, most=1))  # all of its micro-batches have one shape

    def timed(self, stepper: Stepper, rollouts: Rollouts, reference: Reference, *, steps: int) -> Timed:
        """Steps until ``steps`` are timed, or 2 s have passed."""
        found = Timed()
        release(self.device)
        try:
            stepper.warm_up(rollouts, reference)
            self.restore()
            while not found.seconds or (len(found.seconds) < steps and sum(found.seconds) < 2.0):
                if self.device == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                found.loss, found.grad_norm = stepper.step(rollouts, reference)
                if self.device == "cuda":
                    torch.cuda.synchronize()
                    found.peak_bytes = torch.cuda.max_memory_allocated()
                    found.reserved_bytes = torch.cuda.max_memory_reserved()
                found.seconds.append(time.perf_counter() - start)
                if len(found.seconds) == 1:
                    found.weights_difference = _difference(self.change(), reference.change)
                self.restore()
        except torch.OutOfMemoryError:
            found.failure = OUT_OF_MEMORY
        except Exception as error:  # as above
            found.failure = _first_line(error)
        if found.failure is not None:
            self.learner.end_block()
            self.learner.optimizer.zero_grad(set_to_none=True)
            self.model.zero_grad(set_to_none=True)
            release(self.device)
            self.restore()
        return found

    def use(self, contender: str, **settings: Any) -> None:
        """Memory as the contender uses it.

        Args:
            contender: of ``CONTENDERS``.
            **settings: of ``train`` in a recipe, besides.
        """
        short = contender == "logitless-budget-0"
        settings["head_memory_budget"] = 0 if short else None
        settings["tokens_per_micro_batch"] = SHORT_ROWS if short else WORKLOADS["long"].tokens_per_micro_batch
        recipe = self.learner.recipe
        self.learner = self.learner.under(recipe.model_copy(update={"train": recipe.train.model_copy(update=settings)}))
        if short:
            set_modes(self.model, ["host"] * len(backbone(self.model).layers))
        else:
            _recompute(self.model, on=contender in ("logitless-autocast", "trl"))

    def _learn(self, rollouts: Rollouts, reference: Reference) -> tuple[float, float]:
        """The learner's own step, its plan and its diagnostics included."""
        leave_out = self.learner.recipe.train.skip_zero_advantage
        self.learner.begin(_block(rollouts.with_old(reference.logp), skip_zero_advantage=leave_out))
        numbers = self.learner.step()
        return float(numbers["loss/total"] or 0.0), float(numbers["optimizer/grad_norm"] or 0.0)


def _recompute(model: torch.nn.Module, *, on: bool) -> None:
    inner = causal_lm(model)
    layers = list(backbone(model).layers)
    if hasattr(layers[0], "row_invariant_form"):
        set_modes(model, ["recompute" if on else "keep"] * len(layers))
    elif on:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        inner.gradient_checkpointing_disable()


def _block(rollouts: Rollouts, *, skip_zero_advantage: bool) -> ScoredBlock:
    """The block as scoring would leave it."""
    packed = rollouts.packed
    live = tuple(bool(advantage) for advantage in rollouts.advantages)
    assert rollouts.logp_old is not None
    return ScoredBlock(
        packed=packed,
        groups=rollouts.groups,
        truncated=(False,) * packed.num_sequences,
        logp_old=rollouts.logp_old,
        entropy_old=torch.zeros(packed.num_tokens),
        logp_ref=None,
        value_old=None,
        advantage=rollouts.advantages[packed.sequence],
        value_target=None,
        nonzero_advantage=live if skip_zero_advantage else None,
    )


def _recipe(shape: Shape, layers: str, *, autocast: str | None, saves: bool, moments: str) -> Recipe:
    """What the learner reads of a recipe; one step over everything, with every saving or with none."""
    lora = shape.lora_rank is not None
    row_invariant = layers == "row_invariant"
    model = {
        "source": dict(shape.config),
        "layers": layers,
        "dtype": "bfloat16" if lora else "float32",
        "trained_dtype": "bfloat16" if row_invariant else "float32",
        "autocast": autocast,
        "lora": {"rank": shape.lora_rank} if lora else None,
    }
    longest = max(w.prompt_tokens * 5 // 4 + w.completion_tokens for w in WORKLOADS.values())
    raw = {
        "name": "bench-step",
        "model": model,
        "data": {"train": {"name": "file", "path": "none.jsonl"}, "max_prompt_tokens": longest // 2},
        "rollout": {"sampling": {"max_new_tokens": longest // 2}},
        "rewards": [{"name": "length", "cap": longest}],
        "train": {
            "tokens_per_step": 10**9,
            "tokens_per_micro_batch": WORKLOADS["long"].tokens_per_micro_batch,
            "optimizer": {"learning_rate": LEARNING_RATE, "moments": moments},
            **dict.fromkeys(("share_prompts", "pack_by_cost", "skip_zero_advantage"), saves),
        },
    }
    return Recipe.model_validate(raw)


def _row(shape: Shape, case: Case, rollouts: Rollouts, timed: Timed, reference: Reference, rate: float | None) -> Row:
    """A case as the result file has it; ``with_ratios`` adds what depends on other rows."""
    seconds = sorted(timed.seconds)[len(timed.seconds) // 2] if timed.seconds and timed.failure is None else None
    return {
        "model": shape.name,
        "workload": case.workload,
        "contender": case.contender,
        "live": case.live,
        "seconds": seconds,
        "seconds_min": min(timed.seconds, default=None),
        "seconds_max": max(timed.seconds, default=None),
        "runs": len(timed.seconds),
        "tokens": rollouts.num_tokens,
        "scored_tokens": rollouts.packed.num_tokens,
        "tokens_per_second": None if seconds is None else rollouts.num_tokens / seconds,
        "mfu": None if seconds is None or rate is None else floating_point_operations(shape, rollouts) / seconds / rate,
        "product_flops": rate,
        "peak_bytes": timed.peak_bytes,
        "reserved_bytes": timed.reserved_bytes,
        "loss": timed.loss,
        "loss_difference": None if timed.loss is None or reference.loss is None else abs(timed.loss - reference.loss),
        "grad_norm": timed.grad_norm,
        "grad_norm_difference": _relative(timed.grad_norm, reference.grad_norm),
        "weights_difference": timed.weights_difference,
        "failure": timed.failure,
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows with their speed over that of others on the same workload, at live fraction 1 where those skip nothing.

    Example:
        >>> row = {"model": "m", "workload": "long", "live": 0.5, "contender": "logitless", "seconds": 1.0}
        >>> [trl] = with_ratios([row | {"contender": "trl", "seconds": 6.0, "live": 1.0}])
        >>> with_ratios([row, trl])[0]["over_trl"]
        6.0
    """

    def over(row: Row, contender: str, live: float) -> float | None:
        key = (row["model"], row["workload"], contender, live)
        other = next((r for r in rows if (r["model"], r["workload"], r["contender"], r["live"]) == key), None)
        if other is None or other["seconds"] is None or row["seconds"] is None:
            return None
        return float(other["seconds"] / row["seconds"])

    return [
        row
        | {
            "over_trl": over(row, "trl", 1.0),
            "over_trl_without_recomputation": over(row, "trl-without-recomputation", 1.0),
            "over_autocast": over(row, "logitless-autocast", 1.0),
            "over_all_live": None if row["live"] == 1.0 else over(row, row["contender"], 1.0),
        }
        for row in rows
    ]


def floating_point_operations(shape: Shape, rollouts: Rollouts) -> float:
    """What a step over nonzero-advantage sequences has to multiply, at 2 a multiplication; nothing shared or twice."""
    fields = dict(shape.config)
    with torch.device("meta"):
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    matrix = lm_head(model).weight.numel()
    embedded = model.get_input_embeddings().weight
    others = matrix + (0 if embedded is lm_head(model).weight else embedded.numel())
    body = sum(p.numel() for p in model.parameters()) - others
    live = rollouts.packed.take(rollouts.live_sequences)
    times = 6 if shape.lora_rank is None else 4
    return float(times * (body * live.inputs.input_ids.numel() + matrix * live.num_tokens))


def product_rate(device: str) -> float | None:
    """Floating-point operations a second of an 8192 x 8192 x 8192 product in bfloat16 on random numbers."""
    if device != "cuda":
        return None
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    times = []
    for turn in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        a @ b
        end.record()
        end.synchronize()
        if turn > 2:
            times.append(begin.elapsed_time(end) / 1000)
    return 2 * 8192**3 / sorted(times)[len(times) // 2]


def _sample(tensor: Tensor) -> Tensor:
    """Elements spread evenly over a tensor, float32."""
    flat = tensor.flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].float()


def _difference(found: dict[str, Tensor], reference: dict[str, Tensor]) -> float | None:
    """Norm of the difference of two changes over the norm of the second."""
    if found.keys() != reference.keys():
        return None
    mine, other = (torch.cat([t[name] for name in sorted(t)]).double() for t in (found, reference))
    return float((mine - other).norm() / other.norm())


def _relative(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else abs(value - reference) / abs(reference)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
