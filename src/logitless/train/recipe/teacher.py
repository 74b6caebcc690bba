"""The section ``teacher``: models that the policy learns from."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from logitless.train.recipe.rule import (
    Processes,
    Rule,
    Setting,
    given,
    needs_one_process,
    recipe_of,
    value_at,
)
from logitless.train.recipe.section import Section
from logitless.types import Divergence

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe

BASE, SELF, START = "base", "self", "start"
"""A teacher's ``source`` for LoRA's base model, for the policy, and for the policy before its first step."""

OF_POLICY = (BASE, SELF, START)


def is_address(source: str) -> bool:
    """Whether a teacher's source is the address of a server."""
    return source.startswith(("http://", "https://"))


class TeacherSection(Section):
    """Models that the policy learns from (docs/distillation.md)."""

    source: str | Annotated[Mapping[str, str], Field(min_length=1)] = Field(
        description="hub name, folder or GGUF file, with the policy's tokenizer; `base`: LoRA's base; `self`, `start`: "
        "the policy now, or before its first step; a vLLM server's address; or several, by `column`"
    )
    column: str | None = Field(
        None, description="whose value names a prompt's teacher; None: the name of its source of data"
    )
    template: str | None = Field(
        None, description="Jinja: the last message of the teacher's prompt; None: the policy's"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: as `model.trained_dtype: auto`"
    )
    layers: Literal["auto", "transformers", "row_invariant"] = Field("auto", description="see `model.layers`")
    place: str = Field("device", description="`host`: its weights wait there between uses; `cuda:1`: it runs there")
    divergence: Divergence | None = Field(None, description="a term of the loss; None: no term")
    top_k: int | None = Field(None, ge=1, description="how many likeliest tokens a server's divergence tells apart")
    beta: float | None = Field(
        None, ge=0, le=1, description="the teacher's share of the mixture under `jensen_shannon`; None: 0.5"
    )
    weight: PositiveFloat = Field(1.0, description="of the divergence")
    advantage: NonNegativeFloat = Field(
        0.0, description="coefficient of `logp_teacher - logp_sampler` in advantages; `true` is 1, 0: none"
    )
    gamma: NonNegativeFloat = Field(
        0.0, description="how much more the first token's advantage counts than the last one's"
    )
    alone: bool = Field(False, description="rewards are measured, and give no advantages")
    temperature: PositiveFloat | None = Field(None, description="divides the teacher's logits; None: that of sampling")

    @property
    def sources(self) -> dict[str, str]:
        """Where each teacher comes from, by the value that names it; one alone has no name."""
        return {"": self.source} if isinstance(self.source, str) else dict(self.source)

    @property
    def models(self) -> dict[str, str]:
        """``sources`` with weights in this process, of their own."""
        return {
            name: source for name, source in self.sources.items() if source not in OF_POLICY and not is_address(source)
        }

    @property
    def has_server(self) -> bool:
        """Whether a teacher is on a server."""
        return any(map(is_address, self.sources.values()))

    @property
    def device(self) -> str | None:
        """The device of its own, by name; None: the policy's."""
        return None if self.place in ("device", "host") else self.place

    def has(self, source: str) -> bool:
        """Whether it is the source of a teacher."""
        return source in self.sources.values()


# --- rules ----------------------------------------------------------------------------------------------------------


def _teacher(recipe: "Recipe") -> TeacherSection:
    assert recipe.teacher is not None
    return recipe.teacher


def _own(recipe: "Recipe") -> dict[str, str]:
    """How weights of its own are held."""
    return {key: str(getattr(_teacher(recipe), key)) for key in ("dtype", "layers", "place")}


def _teaches_alone(recipe: "Recipe") -> bool:
    """Whether no reward enters the advantages."""
    return recipe.teacher is not None and (recipe.teacher.alone or not recipe.scores)


def _temperature(recipe: "Recipe") -> float:
    return _teacher(recipe).temperature or recipe.rollout.sampling.temperature


def _has(source: str) -> Setting["Recipe"]:
    return Setting(f"teacher.source {source}", lambda recipe: recipe.teacher is not None and recipe.teacher.has(source))


teacher, divergence, top_k = given("teacher"), given("teacher.divergence"), given("teacher.top_k")
server = given("teacher.has_server", "teacher.source of a server")
of_server = Setting["Recipe"](
    "teacher.divergence from a server", lambda recipe: server.when(recipe) and divergence.when(recipe)
)

RULES: tuple[Rule["Recipe"], ...] = (
    teacher.needs(
        "divergence, advantage or both",
        holds=lambda recipe: _teacher(recipe).divergence is not None or _teacher(recipe).advantage > 0,
        given=lambda _: "neither, so that nothing is learnt from it",
        remedy="Set teacher.divergence: reverse_kl, or teacher.advantage: true.",
    ),
    Setting["Recipe"]("teacher.weight", lambda recipe: value_at(recipe, "teacher.weight") not in (None, 1)).requires(
        "teacher.divergence",
        ", which it multiplies",
        remedy="Set it; the coefficient of the advantage is teacher.advantage itself.",
    ),
    given("teacher.gamma").requires(
        "teacher.advantage", remedy="Set teacher.advantage: true, or leave teacher.gamma out."
    ),
    Setting["Recipe"]("teacher.beta", lambda recipe: value_at(recipe, "teacher.beta") is not None).keeps(
        "teacher.divergence",
        "jensen_shannon",
        ", which mixes student and teacher",
        remedy="Leave beta out, or choose jensen_shannon.",
    ),
    Setting["Recipe"]("a teacher alone", _teaches_alone).keeps(
        "rollout.zero_signal", "keep", ", for rewards do not say what there is to learn"
    ),
    _has(BASE).requires("model.lora", ", whose base it is", remedy="Name the teacher's folder or hub name."),
    _has(START).excludes("model.lora", remedy="Set teacher.source: base."),
    _has(SELF).requires(
        "teacher.template",
        ", for without one it says what the policy says",
        remedy="Set teacher.template, for example to '{{ solution }} {{ prompt }}', or teacher.source: start.",
    ),
    Setting["Recipe"](
        "teacher.source base, self, start or a server",
        lambda recipe: recipe.teacher is not None and not recipe.teacher.models,
    ).needs(
        "neither dtype, layers nor place",
        holds=lambda recipe: _own(recipe) == {"dtype": "auto", "layers": "auto", "place": "device"},
        given=lambda recipe: ", ".join(f"{key}: {value}" for key, value in _own(recipe).items()),
        remedy="Leave them out; it has the weights of the policy or of the server.",
    ),
    of_server.requires(
        "teacher.top_k",
        "; all other tokens count as one",
        remedy="Set teacher.top_k: 20, the most that vLLM gives without --max-logprobs; or set teacher.advantage: true "
        "instead, or load the teacher in this process.",
    ),
    top_k.needs(
        "a divergence from a server",
        holds=of_server.when,
        given=lambda recipe: f"divergence: {_teacher(recipe).divergence}, source: {_teacher(recipe).source}",
        remedy="Leave teacher.top_k out: other teachers are compared over the whole vocabulary.",
    ),
    top_k.about(
        "train.training_backend",
        "no fused training_backend, which has no kernel for it",
        lambda backend: backend != "fused",
        "Leave train.training_backend at auto.",
    ),
    server.needs(
        "temperature 1, at which it gives log-probs",
        holds=lambda recipe: _temperature(recipe) == 1,
        given=lambda recipe: str(_temperature(recipe)),
        remedy="Set teacher.temperature: 1.",
    ),
    given("teacher.column").needs(
        "several teachers",
        holds=lambda recipe: not isinstance(_teacher(recipe).source, str),
        given=lambda recipe: f"source: {_teacher(recipe).source}",
        remedy="Leave column out, or give teacher.source as a mapping from its values to models.",
    ),
)

PROCESS_RULES: tuple[Rule[Processes], ...] = (
    divergence.on(recipe_of).needs(
        "whole sequences on every process, for the teacher's hidden states are not cut",
        holds=lambda processes: processes.arrangement.sequence == 1,
        given=lambda processes: f"sequences shared by {processes.arrangement.sequence}",
        remedy="Leave parallel.sequence at 1, or set teacher.advantage in place of divergence.",
    ),
    needs_one_process(
        given("teacher.device", "teacher.place of a device"),
        ", for other processes train on the other devices",
        "Set teacher.place: device or host.",
    ),
)
