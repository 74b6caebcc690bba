"""A part-of-speech tagger small enough to write down: ``Run`` is a verb, every other word a noun."""

import json

import pytest

from logitless.rewards.instructions import text

MODEL = {"weights": {"bias": {"NN": 1.0}}, "tagdict": {"Run": "VB"}, "classes": ["NN", "VB"]}


@pytest.fixture(scope="session")
def tagger(tmp_path_factory):
    nltk = pytest.importorskip("nltk")
    root = tmp_path_factory.mktemp("nltk_data")
    folder = root / "taggers" / text.TAGGER
    folder.mkdir(parents=True, mode=0o700)
    for part, content in MODEL.items():
        (folder / f"{text.TAGGER}.{part}.json").write_text(json.dumps(content), encoding="utf-8")
    nltk.data.path.insert(0, str(root))
    text._tagger.cache_clear()
    yield
    nltk.data.path.remove(str(root))
    text._tagger.cache_clear()
