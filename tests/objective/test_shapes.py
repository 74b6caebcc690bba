"""Tensors of a wrong rank are refused at once, as users run: a column beside a vector must not broadcast."""

import importlib
import inspect
import pkgutil

import pytest
import torch

from logitless import objective
from logitless.errors import InputError
from logitless.objective.advantage import AdvantageInputs
from logitless.objective.inputs import check_shapes, shapes_of
from logitless.objective.objective import Objective
from logitless.objective.surrogate import Nll
from logitless.objective.surrogate.unclipped import importance_loss
from logitless.types import TokenBatch

NOT_A_FORMULA = ("inputs", "groups", "over_ranks")


def formulas():
    """Every public function of the package that takes tensors of known shapes."""
    for module in pkgutil.walk_packages(objective.__path__, "logitless.objective."):
        if module.name.rpartition(".")[2] not in NOT_A_FORMULA:
            for name, function in vars(importlib.import_module(module.name)).items():
                own = inspect.isfunction(function) and function.__module__ == module.name
                if own and not name.startswith("_") and shapes_of(inspect.unwrap(function).__annotations__):
                    yield pytest.param(function, id=f"{module.name.removeprefix('logitless.objective.')}.{name}")


@pytest.mark.parametrize("function", list(formulas()))
def test_every_formula_refuses_a_tensor_with_one_more_dimension(function, without_shape_checks):
    shapes = shapes_of(inspect.unwrap(function).__annotations__)
    given = dict.fromkeys(inspect.signature(function).parameters)
    given |= {name: torch.ones([3] * len(letters[0])) for name, letters in shapes.items()}
    for name, letters in shapes.items():
        wrong = given | {name: given[name].unsqueeze(-1)}
        with pytest.raises(InputError, match=rf"needed {name} \[{', '.join(letters[0])}\].*given a tensor"):
            function(**wrong)


def test_vectors_of_two_lengths_are_refused_by_position_and_by_name(without_shape_checks):
    with pytest.raises(InputError, match=r"needed advantage \[N\] with N = 3; given a tensor \[1\]"):
        importance_loss(torch.zeros(3), torch.ones(1))
    with pytest.raises(InputError, match="advantage"):
        importance_loss(torch.zeros(3), advantage=torch.ones(2))
    assert importance_loss(torch.zeros(2), advantage=torch.ones(2)).tolist() == [-1, -1]


def test_one_of_several_shapes_will_do_and_what_is_no_tensor_is_not_looked_at():
    shapes = {"rewards": (("B",), ("B", "F")), "weights": (("F",),)}
    check_shapes({"rewards": torch.ones(2, 3), "weights": torch.ones(3)}, shapes)
    check_shapes({"rewards": torch.ones(2), "weights": None}, shapes)
    with pytest.raises(InputError, match=r"weights \[F\] with F = 3"):
        check_shapes({"rewards": torch.ones(2, 3), "weights": torch.ones(2)}, shapes)


@pytest.mark.parametrize(
    "wrong", [{"rewards": torch.ones(2, 1)}, {"group": torch.zeros(3, dtype=torch.long)}, {"kl": torch.ones(4, 1)}]
)
def test_an_advantage_is_not_made_of_columns(wrong, without_shape_checks):
    given = {"rewards": torch.ones(2), "group": torch.tensor([0, 0]), "sequence": torch.tensor([0, 0, 1, 1])}
    with pytest.raises(InputError, match=next(iter(wrong))):
        AdvantageInputs(**given | wrong)


def test_a_batch_and_an_objective_are_not_made_of_columns(without_shape_checks):
    vectors = {"sequence": torch.tensor([0, 0]), "advantage": torch.ones(2), "token_weight": torch.ones(2)}
    for name in vectors:
        with pytest.raises(InputError, match=rf"{name} \[2, 1\]"):
            TokenBatch(num_sequences=1, **vectors | {name: vectors[name][:, None]})
    with pytest.raises(InputError, match=r"as vectors; given \[2, 1\]"):
        Objective(surrogate=Nll())(torch.zeros(2, 1), None, TokenBatch(num_sequences=1, **vectors))
