"""The section ``writers``: where metrics go besides the run folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import yaml
from pydantic import Field

from logitless.train.recipe.rule import Machine, Rule, Setting, is_installed
from logitless.train.recipe.section import Section

if TYPE_CHECKING:
    from logitless.train.recipe.config import Recipe


class TensorBoardSection(Section):
    """Event files in the run folder; `tensorboard --logdir runs` reads them."""

    name: Literal["tensorboard"] = "tensorboard"


class WandbSection(Section):
    """Weights & Biases."""

    name: Literal["wandb"] = "wandb"
    project: str = Field("logitless", description="made if it is not there")
    entity: str | None = Field(None, description="user or team; None: the login's default")
    run_name: str | None = Field(None, description="shown there; None: the run's name")
    run_id: str | None = Field(None, description="of a run there to go on with, or to make; None: one of its own")
    group: str | None = Field(None, description="of runs that belong together")
    tags: tuple[str, ...] = Field((), description="of the run")
    notes: str | None = Field(None, description="about the run")
    mode: Literal["online", "offline", "disabled"] | None = Field(None, description="None: WANDB_MODE, or online")

    identified_by: ClassVar[str] = "id"
    """Attribute of a run there that finds it again."""

    def begin(self, run_name: str, known: str | None, folder: Path) -> dict[str, Any]:
        """Arguments of ``init``: by a run's name, what found it before, and the run folder, for local files."""
        wanted = self.run_id or known
        go_on = {"id": wanted, "resume": "allow"} if wanted else {}
        return {"name": self.run_name or run_name, "dir": str(folder), **go_on}


class TrackioSection(Section):
    """trackio, on this machine or in a Space."""

    name: Literal["trackio"] = "trackio"
    project: str = Field("logitless", description="made if it is not there")
    run_name: str | None = Field(None, description="shown there; None: the run's name")
    group: str | None = Field(None, description="of runs that belong together")
    space_id: str | None = Field(None, description="Space of the hub that gets the numbers; None: this machine")
    private: bool | None = Field(None, description="whether a Space that is made is private; None: its owner's default")

    identified_by: ClassVar[str] = "name"

    def begin(self, run_name: str, known: str | None, _folder: Path) -> dict[str, Any]:
        """Arguments of ``init``; runs are found by their names, which no other may have."""
        return {"name": known or self.run_name or run_name, "resume": "never" if known is None else "allow"}


class MlflowSection(Section):
    """MLflow."""

    name: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = Field(
        None,
        description="of a server, `http://...`, or with the whole package `mlflow` of a database, `sqlite:///...`; "
        "None: MLFLOW_TRACKING_URI, or MLflow's",
    )
    experiment: str = Field("logitless", description="made if it is not there")
    run_name: str | None = Field(None, description="shown there; None: the run's name")
    run_id: str | None = Field(None, description="of a run there to go on with; None: a new one")
    tags: dict[str, str] = Field(default_factory=dict, description="of the run")


WriterSection: TypeAlias = TensorBoardSection | WandbSection | TrackioSection | MlflowSection


# --- rules ----------------------------------------------------------------------------------------------------------


def _not_installed(recipe: "Recipe") -> list[str]:
    return [each.name for each in recipe.writers if each.name != "tensorboard" and not is_installed(each.name)]


def _without_missing_writers(machine: Machine) -> tuple[str, ...]:
    """The setting ``writers`` without those that are not installed."""
    absent = _not_installed(machine.recipe)
    left = [_short(each) for each in machine.recipe.writers if each.name not in absent]
    return (f"writers={yaml.safe_dump(left, default_flow_style=True, width=10_000).strip()}",)


def _short(section: WriterSection) -> str | dict[str, Any]:
    """A writer as a recipe writes it: the name alone where all else is a default."""
    own = section.model_dump(mode="json", exclude_defaults=True)
    return {"name": section.name, **own} if own else section.name


RULES: tuple[Rule["Recipe"], ...] = (
    Setting["Recipe"]("writers").needs(
        "each of them once",
        holds=lambda recipe: len({each.name for each in recipe.writers}) == len(recipe.writers),
        given=lambda recipe: ", ".join(each.name for each in recipe.writers),
        remedy="Leave the second one out.",
    ),
)

MACHINE_RULES: tuple[Rule[Machine], ...] = (
    Setting[Machine]("writers").needs(
        "the packages of the services that are named",
        holds=lambda machine: not _not_installed(machine.recipe),
        given=lambda machine: f"an environment without {', '.join(_not_installed(machine.recipe))}",
        remedy="pip install them, or leave them out of `writers`.",
        instead=_without_missing_writers,
    ),
)
