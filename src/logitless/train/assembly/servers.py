"""The servers that a recipe names, each asked once before anything is sampled: no run waits for one in vain."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from logitless.errors import EngineError
from logitless.http_client import HttpClient, PassingFault, Patience
from logitless.rewards.judge import Judge
from logitless.rollout.vllm.api import VllmServer
from logitless.train.assembly.engines import served_model, servers_of
from logitless.train.learn.teacher_server import ServedTeacher
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.engine import AdapterWeightsSection, VllmServerEngineSection
from logitless.train.recipe.teacher import is_address
from logitless.types import Prompt

PROBE_SECONDS = 10.0
"""The most time of each request to a vLLM server; a judge has that of its replies."""

_ONCE = Patience(give_up_seconds=0.0)


def check_servers(recipe: Recipe, prompts: Sequence[Prompt]) -> None:
    """Refuse a server of the engine, a teacher or a judge that is down or slow, or serves something else.

    Args:
        prompts: to train on; a teacher's server must read the first as the policy does.

    Raises:
        EngineError: it does not answer, or has another model; a teacher's has several.
        ConfigurationError: a teacher's server has another tokenizer.
    """
    section = recipe.rollout.engine
    if isinstance(section, VllmServerEngineSection):
        # An adapter is loaded under a name of its own: the base model may have any.
        model = None if isinstance(section.weights, AdapterWeightsSection) else served_model(recipe, section)
        for server in servers_of(section, seconds=PROBE_SECONDS):
            with _answering("rollout.engine.urls", server.url):
                _ONCE.until_done(partial(server.context, model), what="a list of models", where=server.url)
    sources = () if recipe.teacher is None else dict.fromkeys(recipe.teacher.sources.values())
    for url in filter(is_address, sources):
        with _answering("teacher.source", url):
            ServedTeacher(VllmServer(HttpClient(url, seconds=PROBE_SECONDS)), patience=_ONCE).check(prompts[0])
    for reward in recipe.rewards:
        if isinstance(reward, Judge):
            reward.probe()


@contextmanager
def _answering(key: str, url: str) -> Iterator[None]:
    """Inside, a server that does not answer is an error that names its key in the recipe."""
    try:
        yield
    except EngineError as error:
        if type(error.__cause__) is not PassingFault:
            raise
        raise EngineError(
            needed=f"the server at {url} ({key}), before anything is sampled",
            given=error.given,
            remedy="Start it, and begin once it answers.",
        ) from error
