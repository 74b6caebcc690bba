"""The wheel also carries ``recipes/``, as ``logitless/recipes``; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPES = Path("recipes")


class BuildWithRecipes(build_py):
    """Copies the recipes beside the modules; an editable install reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._recipes():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(target) for _, target in self._recipes())]

    def _recipes(self) -> list[tuple[Path, Path]]:
        """Each file and its place in the package; scripts that made its data, and what users prepare, stay here."""
        files = sorted(path for path in RECIPES.rglob("*") if path.is_file() and path.suffix != ".pyc")
        kept = [path for path in files if path.name != "make_data.py" and "prepared" not in path.parts]
        return [(path, Path(self.build_lib) / "logitless" / path) for path in kept]


setup(cmdclass={"build_py": BuildWithRecipes})
