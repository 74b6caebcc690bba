"""Real vLLM servers on tiny models, one at a time, each for a whole file of tests. ``make test-vllm`` runs them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from logitless.http_client import HttpClient, Patience
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.vllm.api import VllmServer
from logitless.rollout.vllm.probe import Probe, probe_prompt
from logitless.rollout.vllm.server import VllmServerEngine
from logitless.rollout.vllm.weight_sync import FolderSync
from vllm_process import VllmProcess, vllm_server

VLLM = Path(sys.executable).parent / "vllm"
TOKENIZER = character_tokenizer("abcdefghijklmnopqrstuvwxyz .,?")
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KEY = "only-for-tests"
PATIENCE = Patience(give_up_seconds=300.0, first_wait_seconds=0.2, longest_wait_seconds=2.0)
PROMPT = probe_prompt(TOKENIZER, 200)  # longer than a block of the cache, which on CPUs has 128 tokens


def pytest_collection_modifyitems(items):
    """All tests of this folder need vLLM."""
    folder = str(Path(__file__).parent) + "/"
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))


def tiny_model(seed: int = 0, *, tied: bool = True, **options):
    """A model of the servers' shape."""
    return load_model(SHAPE | {"tie_word_embeddings": tied}, random_weights=True, seed=seed, **options).eval()


@contextmanager
def tiny_server(folder: Path, *flags: str, tied: bool = True, dtype: str = "float32") -> Iterator[VllmProcess]:
    """A server that was started with weights of seed 99."""
    model = tiny_model(99, tied=tied)
    model.save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(str(folder / "model"))
    given = ("--dtype", dtype, "--max-model-len", "512", "--enforce-eager", "--api-key", KEY, *flags)
    with vllm_server(folder / "model", VLLM, folder / "server.log", given) as process:
        yield process


def server_at(url: str, *, key: str | None = KEY) -> VllmServer:
    """What logitless asks of it."""
    return VllmServer(HttpClient(url, api_key=key, seconds=120.0))


def engine_at(url: str, *, sync=None, max_difference: float = 1e-3, **options) -> VllmServerEngine:
    """An engine of one server, with a narrow probe."""
    probe = Probe(PROMPT, max_difference=max_difference)
    sync = FolderSync("policy", PATIENCE, **options) if sync is None else sync
    return VllmServerEngine([server_at(url)], sync, TOKENIZER, probe=probe, patience=PATIENCE)


@pytest.fixture(autouse=True)
def nondeterministic_kernels_are_vllms_own_business():
    """vLLM's workers are other processes; here nothing is forbidden but what ``tests.conftest`` forbids."""
    torch.set_num_threads(1)
