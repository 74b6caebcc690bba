"""Parts of a decoding step: which kernel is what, and rows that share their prompts' pages."""

import json
import sys

from benchmarks import decode_step
from logitless.models.row_invariant import install_row_invariant
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.steps import Drawing
from tests.head.interpreter import complete_interpreter, interpreted
from tests.rollout.test_gpu import model_of

if interpreted():
    complete_interpreter()


def test_kernels_are_told_apart_by_their_names_and_products_by_their_turn():
    layer = ["norm_kernel", "nvjet", "rotary_kernel", "decode_shared", "decode_own", "merge_splits", "product_kernel"]
    layer += ["norm_kernel", "gated_product_kernel", "Memset (Unknown)", "nvjet"]
    names = [
        "begin_kernel",
        "index",
        *layer,
        *layer,
        "norm_kernel",
        "nvjet",
        "draw_kernel",
        "finish_kernel",
        "end_kernel",
    ]
    found = list(decode_step.parts(names, 2))
    assert len(found) == len(names)
    assert found.count("logits") == 1
    assert {part: found.count(part) for part in (*decode_step.PRODUCTS, decode_step.GATED, "norms", "draw")} == {
        "query, key, value product": 2, "output product": 2, "gate and up product": 0, "down product": 2,
        decode_step.GATED: 2, "norms": 5, "draw": 2,
    }  # fmt: skip


def test_rows_that_share_pages_are_decoded_at_the_position_asked_for():
    model = model_of(end_bias=-1e4)
    install_row_invariant(model)
    steps, place = decode_step.rows_of(model, 8, 500)
    log = steps.run(place, steps.place(place), Drawing(SamplingOptions(max_new_tokens=72), (2,)))()
    assert log.token.shape == (decode_step.STEPS, 8)
    assert steps.slot_position[:8].tolist() == [500 + decode_step.STEPS] * 8


def test_the_picture_is_drawn_from_the_result_file_alone(tmp_path, monkeypatch):
    document = {"model": "m", "environment": {"gpu": "x"}, "rows": [{"num_rows": 8, "part": "a", "microseconds": 1.0}]}
    (tmp_path / "decode-step-X.json").write_text(json.dumps(document))
    words = ["--draw", "--output", str(tmp_path), "--picture", str(tmp_path / "made.svg")]
    monkeypatch.setattr(sys, "argv", ["decode_step.py", *words])
    decode_step.main()
    assert "8 rows" in (tmp_path / "made.svg").read_text()
