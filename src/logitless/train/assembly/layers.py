"""Rules of a section ``model`` with its model: what row-invariant layers need, and a load-balancing loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from logitless.errors import LogitlessError, UnavailableError
from logitless.installed import OLDEST, too_old, without_triton
from logitless.models.lm_head import backbone
from logitless.models.router import router_loss_coefficient
from logitless.train.assembly.process import runs_kernels
from logitless.train.recipe.model import ROW_INVARIANT, ModelSection, row_invariant
from logitless.train.recipe.rule import Rule, Setting, is_installed, unmet


def no_row_invariant(reason: str, key: str = "model.layers") -> UnavailableError:
    """The error for a recipe that names row-invariant layers where they cannot run."""
    return UnavailableError(
        needed="a model and a GPU that row-invariant layers serve",
        given=reason,
        remedy=f"Set {key}: transformers, or auto. docs/bits.md lists what is covered.",
    )


SELF_CHECK = UnavailableError(
    needed="a GPU on which attention, experts and gated delta nets are bitwise identical in any batch",
    given="the self-check on this GPU, whose details `logitless doctor` shows",
    remedy="docs/bits.md says what it compares.",
)
"""Why a model that they cover has none."""


@dataclass(frozen=True)
class Fitted:
    """A model with transformers' own layers, as the subject of rules.

    Args:
        section: of the recipe.
        model: on any device.
        device: that it will run on.
    """

    section: ModelSection
    model: nn.Module
    device: torch.device

    @property
    def router_loss(self) -> float:
        """Coefficient of the load-balancing loss; see ``router_loss_coefficient`` for the errors."""
        return router_loss_coefficient(self.model, self.section.router.loss)

    @property
    def uncovered(self) -> str:
        """Parts of the model that row-invariant layers do not cover, in words; empty if they cover all."""
        if not is_installed("triton"):
            return ""
        from logitless.models.row_invariant.coverage import uncovered

        return "; ".join(uncovered(self.model))

    @property
    def is_slow(self) -> bool:
        """Whether it has float32 weights, which tensor cores do not multiply, on a GPU that computes in bfloat16."""
        weight = backbone(self.model).get_input_embeddings().weight  # type: ignore[operator]
        return self.device.type != "cpu" and weight.dtype == torch.float32 and not too_old(self.device)


def _section(fitted: Fitted) -> ModelSection:
    return fitted.section


_named = row_invariant.on(_section)
_OLDEST = "{}.{}".format(*OLDEST)

_automatic = Setting[Fitted]("model.layers auto: row_invariant", lambda fitted: fitted.section.layers == "auto")


LAYER_RULES: tuple[Rule[Fitted], ...] = (
    _named.needs(
        "Triton, with a C compiler and Python's headers",
        given=lambda fitted: without_triton() if runs_kernels(fitted.device) else "",
        remedy="Install what is missing.",
    ),
    *(rule.on(_section) for rule in ROW_INVARIANT),
    _named.needs(
        "a covered model (docs/bits.md)",
        given=lambda fitted: fitted.uncovered,
        remedy="docs/bits.md lists what they cover.",
        kind=UnavailableError,
    ),
    _named.needs(
        f"compute capability from {_OLDEST}, or Triton's interpreter for tests",
        holds=lambda fitted: runs_kernels(fitted.device) and not too_old(fitted.device),
        given=lambda fitted: too_old(fitted.device) or "a model on the CPU",
        remedy=f"Use a GPU of compute capability {_OLDEST} or newer.",
        kind=UnavailableError,
    ),
)
"""What row-invariant layers need, set by name or by ``auto``; unavailable is what no other recipe changes."""


AUTO_LAYER_RULES: tuple[Rule[Fitted], ...] = (
    _automatic.needs(
        "a GPU",
        holds=lambda fitted: fitted.device.type != "cpu",
        given=lambda _: "a model on the CPU",
        remedy="Set model.device: auto on a machine with a GPU.",
    ),
    _automatic.needs(
        "model.trained_dtype: bfloat16",
        holds=lambda fitted: fitted.section.lora is not None or not fitted.is_slow,
        given=lambda _: "float32 weights (model.trained_dtype: bfloat16 would serve)",
        remedy="Leave model.trained_dtype out where the GPU computes in bfloat16.",
    ),
    _automatic.needs(
        "model.dtype: bfloat16 under LoRA",
        holds=lambda fitted: fitted.section.lora is None or not fitted.is_slow,
        given=lambda _: "float32 weights (model.dtype: bfloat16 would serve)",
        remedy="Leave model.dtype out where the GPU computes in bfloat16.",
    ),
)
"""What ``auto`` needs besides: otherwise they run, but slowly."""


ROUTER_RULES: tuple[Rule[Fitted], ...] = (
    Setting[Fitted]("a load-balancing loss", lambda fitted: fitted.router_loss > 0).needs(
        "no model.lora.dropout, for experts are counted and trained on in several passes of one function",
        holds=lambda fitted: fitted.section.lora is None or fitted.section.lora.dropout == 0,
        given=lambda fitted: f"coefficient {fitted.router_loss:g} (model.router.loss), and dropout",
        remedy="Leave dropout out, or set model.router.loss: 0.",
    ),
)


def against_row_invariant(
    section: ModelSection, model: nn.Module, device: torch.device | None = None
) -> list[LogitlessError]:
    """Reasons against giving a model row-invariant layers; empty where they run.

    Args:
        model: with transformers' own layers.
        device: that it will run on; None for the model's.
    """
    fitted = Fitted(section, model, device or next(model.parameters()).device)
    return unmet((*LAYER_RULES, *(AUTO_LAYER_RULES if section.layers == "auto" else ())), fitted)


def layers_in_words(name: str, reason: str) -> str:
    """A model's layers, with the reason why it has not the row-invariant ones."""
    chosen = {"row_invariant": "row-invariant: bitwise identical in any batch"}
    return chosen.get(name, "transformers' own") + (f", for {reason}" if reason else "")


def in_words(against: Sequence[LogitlessError]) -> str:
    """What the errors were given, each once; empty without errors."""
    return "; ".join(dict.fromkeys("; ".join(each.given for each in against).split("; ")))
