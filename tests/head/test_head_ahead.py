"""The head's kernels compile for GPUs that are not here, within their shared memory."""

import pytest

from tests.models.kernels.ahead import CAPABILITIES, SHARED_MEMORY, Kernel, run

pytest.importorskip("triton")

ONE_PASS = {"tile_sums", "tile_gradient"}
TWO_STREAMS = {"pair_sums", "pair_terms", "pair_gradient"}
FUSED = {
    "target_logits", "anchored_exp_product", "partial_sums", "row_scores", "logit_gradient_product", "row_product",
    "column_product", "move_rows", "clear_rows", "gather_rows", "add_entropy_gradient", "sum_parts",
}  # fmt: skip


def compiled(capability, *arguments):
    found = [Kernel(*kernel) for kernel in run("tests.head.head_ahead", str(capability), *arguments)]
    limit = SHARED_MEMORY.get(capability, 64) * 1024
    assert {kernel.name for kernel in found if kernel.shared_memory > limit or kernel.spilled > 0} == set()
    return {kernel.name for kernel in found}


@pytest.mark.slow
def test_one_pass_over_a_tile_compiles_for_gpus_that_the_fused_head_does_not_take():
    assert compiled(75) == ONE_PASS


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_of_two_streams_compile_without_spilling_a_register(capability):
    assert compiled(capability, "pairs") == TWO_STREAMS


def test_the_fused_head_compiles_within_99_kib():
    assert compiled(120, "bfloat16") == FUSED


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_all_that_a_head_may_have_compiles_within_the_shared_memory_of(capability, dtype):
    assert compiled(capability, dtype, "--everything") == FUSED | {"low_rows"}
