"""Gated delta nets are refused where flash-linear-attention's gradients are wrong, and nowhere else."""

import importlib.util

import pytest
import torch

from logitless.errors import UnavailableError
from logitless.models import delta_gradients
from logitless.models.delta_gradients import check_delta_gradients
from logitless.models.loading import load_model
from tests.models.families import FAMILY

GPU = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch):
    """Says what it has, of which nothing is here."""

    def has(*, capability=(9, 0), triton="3.6.0", packages=("fla",)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(delta_gradients, "version_of", {"triton": triton}.get)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in packages else None)

    return has


def tiny(name):
    return load_model(FAMILY[name].config, random_weights=True)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "olmo_hybrid"])
@pytest.mark.parametrize("triton", ["3.4.0", "3.6.0", "3.7.0"])
def test_a_gated_delta_net_on_hopper_with_a_triton_that_miscompiles_its_gradients_is_refused(name, triton, machine):
    model = tiny(name)
    machine(triton=triton)
    with pytest.raises(UnavailableError, match=rf"given Triton {triton}, which miscompiles them.*3\.7\.1 or newer"):
        check_delta_gradients(model, GPU)


@pytest.mark.parametrize(
    "has",
    [
        {"triton": "3.7.1"},
        {"triton": "3.3.1"},
        {"triton": None},
        {"packages": ()},
        {"packages": ("fla", "tilelang")},
        {"capability": (8, 0)},
        {"capability": (10, 0)},
    ],
    ids=str,
)
def test_it_is_not_where_one_of_these_is_otherwise(has, machine):
    model = tiny("qwen3_5_text")
    machine(**has)
    check_delta_gradients(model, GPU)


def test_other_models_and_other_devices_are_not_refused(machine):
    models = {name: tiny(name) for name in ("llama", "lfm2", "nemotron_h", "qwen3_5_text")}
    hybrid = models.pop("qwen3_5_text")
    machine()
    for model in models.values():
        check_delta_gradients(model, GPU)
    check_delta_gradients(hybrid, torch.device("cpu"))
