"""The wheel: what is in it, and that an installed copy runs recipes where there is no repository."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.absent import keep_out, modules_of

ROOT = Path(__file__).parents[1]

RUN = """
import importlib.util
from pathlib import Path
import logitless
from logitless.cli.main import main
assert Path(logitless.__file__).is_relative_to({installed!r}), logitless.__file__
assert importlib.util.find_spec("hypothesis") is None  # an environment without what tests need
assert main(["recipes", "copy", "quickstart"]) == 0
few = [f"--set={{key}}.size=40" for key in ("data.train", "data.held_out", "warm_start.data")]
small = ["warm_start.steps=1", "train.blocks=1", "rollout.prompts_per_block=2", "rollout.completions_per_prompt=2"]
rest = [*small, "rollout.zero_signal=keep", "writers=[]"]
assert main(["train", "recipes/quickstart.yaml", *few, *(f"--set={{value}}" for value in rest)]) == 0
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the repository stays as it is, with the setuptools that is installed."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=unwanted)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    _pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


def _pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_every_module_and_every_file_that_a_recipe_reads(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {path for path in (ROOT / "src" / "logitless").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    recipes = {f"logitless/{path.relative_to(ROOT)}" for path in (ROOT / "recipes").rglob("*") if path.is_file()}
    assert {str(path.relative_to(ROOT / "src")) for path in files} <= held
    left_out = ("/make_data.py", ".pyc")  # and what the repository's user has prepared
    assert {name for name in recipes if not name.endswith(left_out) and "/prepared/" not in name} == {
        name for name in held if name.startswith("logitless/recipes/")
    }


@pytest.mark.slow
def test_an_installed_copy_with_what_it_requires_alone_runs_the_quickstart_outside_the_repository(wheel, tmp_path):
    installed = tmp_path / "installed"
    _pip("install", "--no-deps", "--target", str(installed), str(wheel))
    (tmp_path / "work").mkdir()
    environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*requirements["dependencies"], *requirements["optional-dependencies"]["rewards"]]
    program = keep_out(modules_of(*needed)) + RUN.format(installed=str(installed))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "work" / "runs" / "quickstart" / "model" / "config.json").is_file()
    assert "finished" in done.stdout


def test_training_and_the_tinker_service_are_imported_without_triton():
    code = "import sys; sys.modules['triton'] = None; import logitless.train.entry, logitless.tinker.trainer"
    subprocess.run([sys.executable, "-c", code], check=True)
