"""The recipes that come with logitless: at ``recipes/`` in the repository, beside the modules in an installed copy."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from logitless.errors import ConfigurationError

_PACKAGED = Path(__file__).parents[2] / "recipes"
_IN_REPOSITORY = Path(__file__).parents[4] / "recipes"


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe and the folders that it reads.

    Example:
        >>> shipped_recipes()["qwen2.5-0.5b-gsm8k"].summary
        'GRPO on grade-school mathematics: every weight of Qwen2.5-0.5B-Instruct, on one GPU with 24 GB.'
    """

    path: Path

    @property
    def text(self) -> str:
        """The YAML, with its comments."""
        return self.path.read_text(encoding="utf-8")

    @property
    def summary(self) -> str:
        """The first sentence of its comment."""
        comment = re.match(r"(?:#.*\n)+", self.text)
        words = " ".join(line.removeprefix("#").strip() for line in comment[0].splitlines()) if comment else ""
        return words.split(". ")[0].removesuffix(".") + "."

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders beside it that its text mentions, in a value or in the commands of its comment."""
        beside = sorted(path for path in self.path.parent.iterdir() if path.is_dir())
        return tuple(path for path in beside if re.search(rf"(?<![\w.-]){re.escape(path.name)}/", self.text))

    @property
    def preparation(self) -> str | None:
        """The script that writes what the recipe reads; None where it needs none."""
        return next((f"{each.name}/prepare.py" for each in self.folders if (each / "prepare.py").is_file()), None)

    def copy_to(self, folder: Path) -> Path:
        """Copy the recipe and its folders; a file that is there already and is the same is left alone.

        Returns:
            The recipe's new path.

        Raises:
            ConfigurationError: a different file is in the place of one of them; nothing was copied.

        Example:
            >>> import tempfile
            >>> copied = shipped_recipes()["length-toy"].copy_to(Path(tempfile.mkdtemp()))
            >>> copied.name, sorted(path.name for path in copied.parent.iterdir())
            ('length-toy.yaml', ['length-toy.yaml', 'quickstart'])
        """
        files = [self.path, *(file for each in self.folders for file in sorted(each.rglob("*")) if _is_needed(file))]
        targets = [folder / file.relative_to(self.path.parent) for file in files]
        for file, target in zip(files, targets, strict=True):
            if target.exists() and not (target.is_file() and target.read_bytes() == file.read_bytes()):
                raise ConfigurationError(
                    needed=f"no other file at {target}",
                    given="one that differs from the recipe's",
                    remedy="Name another folder, or move the file away.",
                )
        try:
            for file, target in zip(files, targets, strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        except OSError as error:
            raise ConfigurationError(
                needed=f"a folder that can be written at {folder}", given=str(error), remedy="Name another folder."
            ) from error
        return targets[0]


def shipped_recipes() -> dict[str, ShippedRecipe]:
    """Every recipe by its name.

    Raises:
        ConfigurationError: the installed package has none.

    Example:
        >>> "quickstart" in shipped_recipes()
        True
    """
    folder = _PACKAGED if _PACKAGED.is_dir() else _IN_REPOSITORY
    found = {path.stem: ShippedRecipe(path) for path in sorted(folder.glob("*.yaml"))}
    if not found:
        raise ConfigurationError(
            needed=f"recipes at {folder}", given="none", remedy="Install logitless from its wheel, or from a clone."
        )
    return found


def _is_needed(file: Path) -> bool:
    """Whether a run needs the file; ``make_data.py`` made data that is shipped and is not needed any more."""
    return file.is_file() and file.suffix != ".pyc" and file.name != "make_data.py"
