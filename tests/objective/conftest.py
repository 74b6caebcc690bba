"""Shared by the objective's tests."""

import jaxtyping
import pytest


@pytest.fixture
def without_shape_checks():
    """As users run: jaxtyping's import hook, which would catch a wrong string first, switched off."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
