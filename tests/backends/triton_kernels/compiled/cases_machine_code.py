"""Every row of the tile tables, compiled for its architecture without a GPU."""

from __future__ import annotations

import pytest
from machine import TARGETS, compiled

from dsa_backends.triton_kernels import tiles
from dsa_backends.triton_kernels.backward_kernels import (
    key_gradient_kernel,
    query_gradient_kernel,
    query_product_kernel,
    row_shift_kernel,
)
from dsa_backends.triton_kernels.forward_kernels import forward_kernel, merge_kernel
from dsa_backends.triton_kernels.indexer_kernels import score_kernel, select_kernel
from dsa_backends.triton_kernels.loss_kernels import loss_gradient_kernel, loss_score_kernel, mass_kernel
from dsa_backends.triton_kernels.ordered_sum import ordered_sum_kernel

HEADS = {"few": 16, "some": 32, "many": 128}
WIDE = {"DV": 512, "TAIL": 64, "BLOCK_TAIL": 64, "PRECISION": "tf32"}

# Bytes of stack a row may use: a few registers more than 255 per thread at the edge of a loop. A tile without them was
# smaller and slower on the H200.
STACK = 256
LOOSE_STACK = 512
"""Of the "small" rows, which are what fits on devices that nobody measured, and of the deterministic forms."""
FP32_STACK = 1 << 20
"""No bound: exact products are unrolled into single multiplications. fp32 is there to be right."""


def check(machine, arch, *, copies=True, wgmma=False, stack=None):
    assert machine.shared <= tiles.SHARED_MEMORY[arch]
    assert machine.stack <= (stack or (LOOSE_STACK if arch == "small" else STACK))
    if copies:
        # Ids travel four bytes at a time; keys must not, and two-byte loads mean that the alignment was lost. A tile of
        # one stage loads into registers.
        assert machine.wide_copies > machine.narrow_copies or (
            machine.narrow_copies == 0 and machine.count("LDG.E.128") > 0
        )
    assert machine.count("LDG.E.U16") == 0
    if wgmma:
        assert machine.count("HGMMA") > 0


def rows(heads_classes=("few", "some", "many")):
    # The "small" rows are one and the same for every head count.
    return [
        (arch, capability, heads)
        for arch, capability in TARGETS
        for heads in heads_classes
        if arch != "small" or heads == "many"
    ]


def test_small_rows_are_the_same_for_every_head_count():
    for table in (tiles._FORWARD, tiles._MASS):
        assert len({table["small", heads] for heads in HEADS}) == 1
    assert len({tiles.backward_tiles("small", heads, 576, 512, 2) for heads in HEADS.values()}) == 1


def test_every_row_of_the_tables_is_compiled():
    assert {(arch, heads) for arch, _, heads in rows()} | {("small", heads) for heads in HEADS} == {
        *tiles._FORWARD
    }
    assert (
        tiles._FORWARD.keys()
        == tiles._MASS.keys()
        == tiles._BACKWARD.keys() | {("small", heads) for heads in HEADS}
    )
    assert {arch for arch, _ in TARGETS} == {*tiles._SCORE} == {*tiles.SHARED_MEMORY}


@pytest.mark.parametrize(("arch", "capability", "heads"), rows())
def test_forward_row_fits_and_copies_16_bytes(arch, capability, heads):
    tile = tiles._FORWARD[arch, heads]
    machine = compiled(
        forward_kernel,
        {**WIDE, "BLOCK_PART": 512 // tile.parts, "PARTS": tile.parts, "BLOCK_H": tile.heads, "BLOCK_N": tile.keys,
         "CHAIN": arch != "sm100"},
        capability=capability, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    check(machine, arch, wgmma=tile.wgmma)


@pytest.mark.parametrize(("arch", "capability", "heads"), rows())
def test_backward_rows_fit_and_scatter_with_vector_reductions(arch, capability, heads):
    row = tiles.backward_tiles(
        arch, HEADS[heads], 576, 500, 2
    )  # 500: not the channels of the hand-placed kernels
    pairs, key, query = row.pairs, row.key, row.query
    machine = compiled(
        query_gradient_kernel,
        {**WIDE, "BLOCK_PART": 512 // pairs.parts, "PARTS": pairs.parts, "BLOCK_H": pairs.heads, "BLOCK_N": pairs.keys,
         "NEED_DQ": row.fused, "NEED_PAIRS": True},
        capability=capability, warps=pairs.warps, stages=pairs.stages,
    )  # fmt: skip
    check(machine, arch, wgmma=pairs.wgmma)
    if query is not None:
        machine = compiled(
            query_product_kernel,
            {**WIDE, "BLOCK_C": query.parts, "SLICES": 512 // query.parts, "BLOCK_TAIL": 64 * query.parts // 512,
             "BLOCK_H": query.heads, "BLOCK_N": query.keys},
            capability=capability, warps=query.warps, stages=query.stages,
        )  # fmt: skip
        check(machine, arch, wgmma=query.wgmma)
    slices = 512 // key.parts
    machine = compiled(
        key_gradient_kernel,
        {**WIDE, "BLOCK_C": key.parts, "SLICES": slices, "BLOCK_TAIL": max(16, 64 // slices), "BLOCK_H": HEADS[heads],
         "BLOCK_N": key.keys, "ATOMIC": True, "ADD": False},
        capability=capability, warps=key.warps, stages=key.stages,
    )  # fmt: skip
    check(machine, arch, copies=False, wgmma=key.wgmma)
    check_reductions(machine, capability)


def check_reductions(machine, capability):
    vector = machine.count("REDG.E.ADD.F32x") + machine.count("RED.E.ADD.F32x")
    scalar = machine.count("RED") - vector - machine.count("REDUX")
    if capability >= 90:  # vector reductions are Hopper's: earlier devices have none
        assert vector > 0
        assert scalar == 0
    else:
        assert scalar > 0


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(("arch", "capability"), TARGETS)
def test_score_rows_fit_and_never_spill(arch, capability, heads):
    tile = tiles.score_tile(arch, heads, 2)
    machine = compiled(
        score_kernel,
        {"DIM": 128, "BLOCK_D": 128, "BLOCK_H": heads, "BLOCK_N": tile.keys, "ROWS": tile.rows, "RELU": True,
         "PRECISION": "tf32"},
        capability=capability, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    check(machine, arch, wgmma=tile.wgmma)


@pytest.mark.parametrize(("columns", "carry"), [(1024, False), (32768, False), (32768, True)])
@pytest.mark.parametrize(("arch", "capability"), [("sm80", 80), ("sm90", 90), ("small", 120)])
def test_selection_keeps_a_row_in_registers(arch, capability, columns, carry):
    machine = compiled(
        select_kernel,
        {"BLOCK": columns, "BLOCK_K": 2048, "CHUNK": min(columns, 8192), "RANKED": 32, "HAS_CARRY": carry},
        capability=capability, warps=tiles.select_warps(columns), score_row="i64",
    )  # fmt: skip
    check(machine, arch, copies=False)


@pytest.mark.parametrize(("arch", "capability", "heads"), rows())
def test_target_rows_fit(arch, capability, heads):
    tile = tiles._MASS[arch, heads]
    machine = compiled(
        mass_kernel,
        {"MAIN": 512, "TAIL": 64, "BLOCK_PART": 256, "PARTS": 2, "BLOCK_TAIL": 64, "BLOCK_H": tile.heads,
         "BLOCK_N": tile.keys, "PRECISION": "tf32", "FIND_LSE": False},
        capability=capability, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    check(machine, arch, wgmma=tile.wgmma)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(("arch", "capability"), TARGETS)
def test_loss_rows_fit(arch, capability, heads):
    row = tiles.loss_tiles(arch, heads, 2)
    shape = {"DIM": 128, "BLOCK_D": 128, "BLOCK_H": heads, "RELU": True, "PRECISION": "tf32"}
    score = compiled(
        loss_score_kernel, {**shape, "BLOCK_N": row.score.keys},
        capability=capability, warps=row.score.warps, stages=row.score.stages,
    )  # fmt: skip
    gradient = compiled(
        loss_gradient_kernel,
        {**shape, "BLOCK_N": row.gradient.keys, "UPCAST": False, "NEED_DQ": True, "NEED_DW": True, "DK": "atomic"},
        capability=capability, warps=row.gradient.warps, stages=row.gradient.stages, dq="*fp32",
    )  # fmt: skip
    check(score, arch)
    check(gradient, arch)
    check_reductions(gradient, capability)


FP32 = [("small", 86), ("sm90", 90)]
"""The rows are the same on every device; the shared memory is not."""


@pytest.mark.parametrize(("arch", "capability"), FP32)
def test_fp32_rows_fit_the_least_and_the_most_shared_memory(arch, capability):
    target = {"capability": capability, "dtype": "fp32"}
    exact = {**WIDE, "PRECISION": "ieee"}
    tile = tiles.forward_tile(arch, 64, 576, 512, 4)
    forward = compiled(
        forward_kernel,
        {**exact, "BLOCK_H": tile.heads, "BLOCK_N": tile.keys, "BLOCK_PART": 512 // tile.parts, "PARTS": tile.parts,
         "CHAIN": True},
        warps=tile.warps, stages=tile.stages, **target,
    )  # fmt: skip
    check(forward, arch, copies=False)
    key = tiles.backward_tiles(arch, 128, 576, 512, 4).key
    gradient = compiled(
        key_gradient_kernel,
        {**exact, "BLOCK_C": key.parts, "SLICES": 512 // key.parts, "BLOCK_TAIL": 16, "BLOCK_H": 128,
         "BLOCK_N": key.keys, "ATOMIC": True, "ADD": False},
        warps=key.warps, stages=key.stages, **target,
    )  # fmt: skip
    tile = tiles.mass_tile(arch, 64, 576, 4)
    mass = compiled(
        mass_kernel,
        {"MAIN": 512, "TAIL": 64, "BLOCK_PART": 256, "PARTS": tile.parts, "BLOCK_TAIL": 64, "BLOCK_H": tile.heads,
         "BLOCK_N": tile.keys, "PRECISION": "ieee", "FIND_LSE": False},
        warps=tile.warps, stages=tile.stages, **target,
    )  # fmt: skip
    for machine in (gradient, mass):
        check(machine, arch, copies=False, stack=FP32_STACK)


@pytest.mark.parametrize(("arch", "capability"), FP32)
def test_fp32_row_of_the_first_backward_kernel_fits(arch, capability):
    row = tiles.backward_tiles(arch, 64, 576, 512, 4)
    machine = compiled(
        query_gradient_kernel,
        {**WIDE, "PRECISION": "ieee", "BLOCK_H": row.pairs.heads, "BLOCK_N": row.pairs.keys,
         "BLOCK_PART": 512 // row.pairs.parts, "PARTS": row.pairs.parts, "NEED_DQ": row.fused, "NEED_PAIRS": True},
        warps=row.pairs.warps, stages=row.pairs.stages, pairs="*fp32", capability=capability, dtype="fp32",
    )  # fmt: skip
    check(machine, arch, copies=False, stack=FP32_STACK)
    row = row.query
    machine = compiled(
        query_product_kernel,
        {**WIDE, "BLOCK_C": row.parts, "SLICES": 512 // row.parts, "BLOCK_TAIL": 64 // (512 // row.parts),
         "PRECISION": "ieee", "BLOCK_H": row.heads, "BLOCK_N": row.keys},
        warps=row.warps, stages=row.stages, pairs="*fp32", capability=capability, dtype="fp32",
    )  # fmt: skip
    check(machine, arch, copies=False, stack=FP32_STACK)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(("arch", "capability"), FP32)
def test_fp32_indexer_rows_fit_the_least_and_the_most_shared_memory(arch, capability, heads):
    target = {"capability": capability, "dtype": "fp32"}
    shape = {"DIM": 128, "BLOCK_D": 128, "BLOCK_H": heads, "RELU": True, "PRECISION": "ieee"}
    tile = tiles.score_tile(arch, heads, 4)
    row = tiles.loss_tiles(arch, heads, 4)
    machines = (
        compiled(
            score_kernel, {**shape, "BLOCK_N": tile.keys, "ROWS": tile.rows},
            warps=tile.warps, stages=tile.stages, **target,
        ),
        compiled(
            loss_score_kernel, {**shape, "BLOCK_N": row.score.keys},
            warps=row.score.warps, stages=row.score.stages, **target,
        ),
        compiled(
            loss_gradient_kernel,
            {**shape, "BLOCK_N": row.gradient.keys, "UPCAST": False, "NEED_DQ": True, "NEED_DW": True, "DK": "atomic"},
            warps=row.gradient.warps, stages=row.gradient.stages, dq="*fp32", **target,
        ),
    )  # fmt: skip
    for machine in machines:
        check(machine, arch, copies=False, stack=FP32_STACK)


@pytest.mark.parametrize(("arch", "capability"), [("small", 120), ("sm90", 90)])
def test_forms_of_the_deterministic_gradient_and_of_a_split_forward_fit(arch, capability):
    row = tiles.backward_tiles(arch, 128, 576, 512, 2)
    slices = 512 // row.key.parts
    target = {"capability": capability}
    loss = tiles.loss_tiles(arch, 64, 2).gradient
    mass = tiles._MASS[arch, "many"]
    machines = {
        "partial key gradients": compiled(
            key_gradient_kernel,
            {**WIDE, "BLOCK_C": row.key.parts, "SLICES": slices, "BLOCK_TAIL": 16, "BLOCK_H": 128,
             "BLOCK_N": row.key.keys, "ATOMIC": False, "ADD": True},
            warps=row.key.warps, stages=row.key.stages, **target,
        ),
        "partial index key gradients": compiled(
            loss_gradient_kernel,
            {"DIM": 128, "BLOCK_D": 128, "BLOCK_H": 64, "RELU": True, "PRECISION": "tf32", "BLOCK_N": loss.keys,
             "UPCAST": False, "NEED_DQ": True, "NEED_DW": True, "DK": "rows"},
            warps=loss.warps, stages=loss.stages, dq="*fp32", **target,
        ),
        "lse of the teacher": compiled(
            mass_kernel,
            {"MAIN": 512, "TAIL": 64, "BLOCK_PART": 256, "PARTS": 2, "BLOCK_TAIL": 64, "BLOCK_H": mass.heads,
             "BLOCK_N": mass.keys, "PRECISION": "tf32", "FIND_LSE": True},
            warps=mass.warps, stages=mass.stages, **target,
        ),
        "sum in order": compiled(ordered_sum_kernel, {"BLOCK": 256}, warps=2, **target),
        "merge": compiled(merge_kernel, {"DV": 512, "BLOCK_DV": 512}, warps=4, **target),
        "shift": compiled(row_shift_kernel, {"DV": 512, "BLOCK_DV": 512}, warps=1, **target),
    }  # fmt: skip
    for machine in machines.values():
        check(machine, arch, copies=False, stack=LOOSE_STACK)
        # Nothing here may depend on the order in which programs run.
        assert machine.count("RED") - machine.count("REDUX") == 0
        assert machine.count("ATOM") == 0
