"""The kernels with warps that only gather, in the machine code of compute capability 9.0."""

from __future__ import annotations

import pytest
from machine import compiled

from dsa_backends.triton_kernels import tiles
from dsa_backends.triton_kernels.hopper_backward_few_kernel import hopper_backward_few_kernel
from dsa_backends.triton_kernels.hopper_backward_kernels import hopper_pairs_kernel, hopper_query_kernel
from dsa_backends.triton_kernels.hopper_forward_kernels import (
    hopper_forward_few_kernel,
    hopper_forward_kernel,
)
from dsa_backends.triton_kernels.hopper_mass_kernel import hopper_mass_kernel

STACK = 64
"""A few registers more than there are, at the edge of a loop."""
STACK_OF_32_HEADS = 512
"""Their dQ alone takes 144 registers a thread. Half the time of the kernels that do not spill (7.1 ms for 14.1)."""


def machine_of(kernel, tile, **constants):
    return compiled(
        kernel,
        {"BLOCK_H": tile.heads, **constants},
        capability=90,
        warps=tile.warps,
        registers=tile.registers,
    )


def check(machine, *, products, stack=STACK):
    assert machine.shared <= tiles.SHARED_MEMORY["sm90"]
    assert machine.stack <= stack
    assert machine.narrow_copies == 0
    assert machine.wide_copies > 30
    assert machine.count("HGMMA") >= products
    # The assembler serialises products whose registers are touched too early: then each has a wait of its own.
    assert machine.count("WARPGROUP.DEPBAR") < 8
    # Each warp group's share of the registers is set, and the barriers in shared memory are there to wait at.
    assert machine.count("USETMAXREG") >= 2
    assert machine.count("SYNCS") > 0


@pytest.mark.parametrize("tail", tiles.HOPPER_TAILS)
@pytest.mark.parametrize("heads", ["few", "some", "many"])
def test_forward_rows_fit(heads, tail):
    tile = tiles.HOPPER_FORWARD[heads]
    kernel = hopper_forward_kernel if heads == "many" else hopper_forward_few_kernel
    machine = machine_of(kernel, tile, DV=512, TAIL=tail, BUFFERS=tile.buffers)
    check(machine, products=36)
    if heads == "few":
        # Two programs share a multiprocessor: 228 KiB, 1 KiB of them reserved for each, and 65,536 registers.
        assert 2 * (machine.shared + 1024) <= 228 * 1024
        assert 2 * machine.registers * (tile.warps + 4) * 32 <= 65_536


@pytest.mark.parametrize("tail", tiles.HOPPER_TAILS)
def test_backward_rows_of_64_heads_fit(tail):
    check(machine_of(hopper_pairs_kernel, tiles.HOPPER_PAIRS, DV=512, TAIL=tail), products=64)
    check(machine_of(hopper_query_kernel, tiles.HOPPER_QUERY, DV=512, TAIL=tail), products=4)


@pytest.mark.parametrize("tail", [0, 64])
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("heads", ["few", "some"])
def test_backward_rows_of_few_heads_fit_and_scatter_sixteen_bytes_at_a_time(heads, atomic, tail):
    tile = tiles.HOPPER_WHOLE[heads]
    machine = machine_of(
        hopper_backward_few_kernel, tile, DV=512, TAIL=tail, NEED_DQ=True, ATOMIC=atomic, BUFFERS=tile.buffers
    )
    check(machine, products=100, stack=STACK if heads == "few" else STACK_OF_32_HEADS)
    assert (machine.count("REDG.E.ADD.F32x4") > 0) == atomic
    assert machine.count("RED") == machine.count("REDG.E.ADD.F32x4")


@pytest.mark.parametrize("tail", tiles.HOPPER_TAILS)
@pytest.mark.parametrize("find_lse", [True, False])
def test_mass_row_fits(find_lse, tail):
    machine = machine_of(hopper_mass_kernel, tiles.HOPPER_MASS, MAIN=512, TAIL=tail, FIND_LSE=find_lse)
    check(machine, products=32, stack=0)
