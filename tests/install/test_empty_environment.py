"""The wheel in environments that are really empty: built, installed and run where there is no repository. Minutes.

``tests/test_package.py`` and ``tests/test_library_alone.py`` show the same with packages kept out of this environment,
in seconds; here nothing is simulated, and packages are downloaded.
"""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.test_library_alone import CORE

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = [
    *(f"{key}.size=400" for key in ("data.train", "data.held_out", "warm_start.data")),
    *("warm_start.steps=20", "train.blocks=3", "evaluation.every_blocks=2", "rollout.zero_signal=keep"),
]


class Environment:
    """A new virtual environment, and a folder to work in that has nothing to do with the repository."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=True)
        self.programs, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir()
        kept = ("HOME", "LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
        passed = {name: value for name, value in os.environ.items() if name in kept or name.startswith("PIP_")}
        self.variables = {**passed, "PATH": f"{self.programs}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

    def run(self, program: str, *arguments: str, status: int = 0) -> str:
        """What a program of this environment prints."""
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            cwd=self.work,
            env=self.variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def install(self, *requirements: str) -> None:
        """By pip, at the versions that the tests ran against."""
        options = ("--quiet", "--disable-pip-version-check", "--no-input")
        self.run(
            "python", "-m", "pip", "install", *options, "--constraint", str(ROOT / "constraints.txt"), *requirements
        )

    def packages(self) -> set[str]:
        """Names of what is installed."""
        listed = self.run("python", "-m", "pip", "list", "--format", "freeze")
        return {line.partition("==")[0].lower().replace("_", "-") for line in listed.splitlines()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Of ``python -m build``, from a copy of the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("src", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    builder = Environment(tmp_path_factory.mktemp("builder"))
    builder.install("build")
    builder.run("python", "-m", "build", "--outdir", str(out), str(source))  # sdist, and from it the wheel
    assert len(list(out.glob("*.tar.gz"))) == 1
    (built,) = out.glob("*.whl")
    return built


def test_the_quickstart_runs_where_nothing_but_the_wheel_and_what_it_requires_is_installed(wheel, tmp_path):
    empty = Environment(tmp_path)
    empty.install("torch")
    empty.install(f"{wheel}[rewards]")
    assert not {"pytest", "hypothesis", "ruff", "mypy", "peft", "trl", "datasets", "beartype"} & empty.packages()
    assert "quickstart" in empty.run("logitless", "recipes", "list")
    empty.run("logitless", "recipes", "copy", "quickstart")
    printed = empty.run("logitless", "train", "recipes/quickstart.yaml", *(f"--set={value}" for value in SMALL))
    assert "finished: runs/quickstart" in printed.replace(f"{empty.work}/", "")
    run = empty.work / "runs" / "quickstart"
    assert (run / "model" / "config.json").is_file()
    assert (run / "report.html").is_file()
    assert "1 of 16" in empty.run("logitless", "show", "runs/quickstart", "--block", "2", "--group", "1")
    empty.run("logitless", "sample", "runs/quickstart", "--prompt", "a, b, a")
    empty.run("logitless", "export", "runs/quickstart")
    empty.run("logitless", "doctor", "recipes/quickstart.yaml", "--no-measure")


def test_head_and_objectives_run_where_torch_jaxtyping_and_numpy_alone_are_installed(wheel, tmp_path):
    empty = Environment(tmp_path)
    empty.install("torch", "jaxtyping", "numpy")
    empty.install("--no-deps", str(wheel))
    trainers = {"transformers", "pydantic", "pyyaml", "pyarrow", "rich", "safetensors", "matplotlib", "tensorboard"}
    assert not trainers & empty.packages()
    assert empty.run("python", "-c", CORE) == "ran\n"
    empty.run("python", "-c", "import logitless.train.run", status=1)


def test_the_environment_of_these_tests_is_not_seen_by_the_empty_one(tmp_path):
    empty = Environment(tmp_path)
    assert empty.packages() <= {"pip", "setuptools"}
    assert str(Path(sys.prefix)) not in empty.run("python", "-c", "import sys; print(sys.path)")
