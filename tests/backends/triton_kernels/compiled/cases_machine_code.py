"""Every row of the tile tables, compiled for its architecture without a GPU."""

from __future__ import annotations

import pytest
from machine import CAPABILITY, compiled

from dsa_backends.triton_kernels import tiles
from dsa_backends.triton_kernels.backward_kernels import (
    key_gradient_kernel,
    query_gradient_kernel,
    query_product_kernel,
)
from dsa_backends.triton_kernels.forward_kernels import forward_kernel
from dsa_backends.triton_kernels.hopper_backward_kernels import hopper_pairs_kernel
from dsa_backends.triton_kernels.hopper_forward_kernels import (
    hopper_forward_few_kernel,
    hopper_forward_kernel,
)
from dsa_backends.triton_kernels.hopper_mass_kernel import hopper_mass_kernel
from dsa_backends.triton_kernels.indexer_kernels import score_kernel, select_kernel
from dsa_backends.triton_kernels.loss_kernels import loss_gradient_kernel, loss_score_kernel, mass_kernel

ARCHITECTURES = ("small", "sm80", "sm90", "sm100")
HEADS = {"few": 16, "some": 32, "many": 128}
WIDE = {"DV": 512, "TAIL": 64, "BLOCK_TAIL": 64, "PRECISION": "tf32"}

# Bytes of stack a row may use: a few registers more than 255 per thread at the edge of a loop. A tile without them was
# smaller and slower on the H200.
STACK = 256


def check(machine, arch, *, copies=True, wgmma=False, stack=STACK):
    assert machine.shared <= tiles.SHARED_MEMORY[arch]
    assert machine.stack <= stack
    if copies:
        # Ids travel four bytes at a time; keys must not, and two-byte loads mean that the alignment was lost.
        assert machine.wide_copies > machine.narrow_copies
    assert machine.count("LDG.E.U16") == 0
    if wgmma:
        assert machine.count("HGMMA") > 0


def rows(heads_classes=("few", "some", "many")):
    # The "small" rows are one and the same for every head count.
    return [
        (arch, heads)
        for arch in ARCHITECTURES
        for heads in heads_classes
        if arch != "small" or heads == "many"
    ]


@pytest.mark.parametrize(("arch", "heads"), rows())
def test_forward_row_fits_and_copies_16_bytes(arch, heads):
    tile = tiles._FORWARD[arch, heads]
    machine = compiled(
        forward_kernel,
        {**WIDE, "BLOCK_PART": 512 // tile.parts, "PARTS": tile.parts, "BLOCK_H": tile.heads, "BLOCK_N": tile.keys,
         "CHAIN": arch != "sm100"},
        capability=CAPABILITY[arch], warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    check(machine, arch, wgmma=tile.wgmma)


@pytest.mark.parametrize(("arch", "heads"), rows())
def test_backward_rows_fit_and_scatter_with_vector_reductions(arch, heads):
    row = tiles.backward_tiles(
        arch, HEADS[heads], 576, 500, 2
    )  # 500: not the channels of the hand-placed kernels
    pairs, key, query = row.pairs, row.key, row.query
    capability = CAPABILITY[arch]
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
    vector = machine.count("REDG.E.ADD.F32x") + machine.count("RED.E.ADD.F32x")
    scalar = machine.count("RED") - vector - machine.count("REDUX")
    if capability >= 90:  # vector reductions are Hopper's: earlier devices have none
        assert vector > 0
        assert scalar == 0


@pytest.mark.parametrize("tail", [0, 64])
def test_hand_placed_kernels_fit_with_warp_group_products_and_without_serialising_them(tail):
    shape = {"DV": 512, "TAIL": tail}
    machines = {
        "many": compiled(hopper_forward_kernel, {**shape, "BLOCK_H": 64}, capability=90, warps=8),
        "few": compiled(hopper_forward_few_kernel, {**shape, "BLOCK_H": 16}, capability=90, warps=4),
        "mass": compiled(
            hopper_mass_kernel, {"MAIN": 512, "TAIL": tail, "BLOCK_H": 64}, capability=90, warps=4
        ),
        "pairs": compiled(hopper_pairs_kernel, {**shape, "BLOCK_H": 64, "WARPS": 4}, capability=90, warps=4),
    }
    for name, machine in machines.items():
        check(machine, "sm90", wgmma=True)
        assert machine.narrow_copies == 0
        assert machine.count("HGMMA") > 30
        # The assembler serialises products whose registers are touched too early: then each has a wait of its own.
        assert machine.count("WARPGROUP.DEPBAR") < 6, name
        # Two programs share a multiprocessor (228 KiB, 1 KiB reserved for each): one gathers while the other computes.
    assert 2 * (machines["few"].shared + 1024) <= 228 * 1024


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_score_rows_fit_and_never_spill(arch, heads):
    tile = tiles.score_tile(arch, heads, 2)
    machine = compiled(
        score_kernel,
        {"DIM": 128, "BLOCK_D": 128, "BLOCK_H": heads, "BLOCK_N": tile.keys, "ROWS": tile.rows, "RELU": True,
         "PRECISION": "tf32"},
        capability=CAPABILITY[arch], warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    check(machine, arch, wgmma=tile.wgmma)


@pytest.mark.parametrize(("columns", "carry"), [(1024, False), (32768, False), (32768, True)])
@pytest.mark.parametrize("arch", ["sm90"])
def test_selection_keeps_a_row_in_registers(arch, columns, carry):
    machine = compiled(
        select_kernel,
        {"BLOCK": columns, "BLOCK_K": 2048, "CHUNK": min(columns, 8192), "RANKED": 32, "HAS_CARRY": carry},
        capability=CAPABILITY[arch], warps=tiles.select_warps(columns), score_row="i64",
    )  # fmt: skip
    check(machine, arch, copies=False)


@pytest.mark.parametrize(("arch", "heads"), rows())
def test_target_rows_fit(arch, heads):
    tile = tiles._MASS[arch, heads]
    machine = compiled(
        mass_kernel,
        {"MAIN": 512, "TAIL": 64, "BLOCK_PART": 256, "PARTS": 2, "BLOCK_TAIL": 64, "BLOCK_H": tile.heads,
         "BLOCK_N": tile.keys, "PRECISION": "tf32", "FIND_LSE": False},
        capability=CAPABILITY[arch], warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    check(machine, arch, wgmma=tile.wgmma)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loss_rows_fit(arch, heads):
    row = tiles.loss_tiles(arch, heads, 2)
    shape = {"DIM": 128, "BLOCK_D": 128, "BLOCK_H": heads, "RELU": True, "PRECISION": "tf32"}
    score = compiled(
        loss_score_kernel, {**shape, "BLOCK_N": row.score.keys},
        capability=CAPABILITY[arch], warps=row.score.warps, stages=row.score.stages,
    )  # fmt: skip
    gradient = compiled(
        loss_gradient_kernel,
        {**shape, "BLOCK_N": row.gradient.keys, "UPCAST": False, "NEED_DQ": True, "NEED_DW": True, "DK": "atomic"},
        capability=CAPABILITY[arch], warps=row.gradient.warps, stages=row.gradient.stages, dq="*fp32",
    )  # fmt: skip
    check(score, arch, copies=False)
    check(gradient, arch, copies=False)


def test_fp32_rows_fit_every_device_that_has_their_table():
    for arch in ("sm80", "sm90", "sm100"):
        tile = tiles.forward_tile(arch, 64, 576, 512, 4)
        machine = compiled(
            forward_kernel,
            {**WIDE, "PRECISION": "ieee", "BLOCK_PART": 256, "PARTS": 2, "BLOCK_H": 16, "BLOCK_N": 16, "CHAIN": True},
            capability=CAPABILITY[arch], warps=tile.warps, stages=tile.stages, dtype="fp32",
        )  # fmt: skip
        check(machine, arch, copies=False)
