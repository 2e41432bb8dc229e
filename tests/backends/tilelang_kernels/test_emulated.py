"""The very source that a GPU would run, run on the CPU: the contract, larger cases, and faults that must be found.

``emulator/cuda_on_cpu.h`` says what is emulated. What it cannot show: speed, registers, a write that overtakes a read
of another thread between two barriers, and missing fences between kinds of memory access.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import fake_kernels
import pytest
import torch
from emulator import emulated

from dsa_backends.tilelang_kernels import compiler
from dsa_backends.tilelang_kernels.indexer_topk import select_from_scores
from dsa_backends.tilelang_kernels.spec import SPEC
from dsa_dispatch._registry.availability import resolve_reference
from dsa_dispatch.testing.accuracy import large_scores
from dsa_dispatch.testing.checks import softmax_checks
from dsa_dispatch.testing.judge import ConformanceError, NotHere
from dsa_dispatch.testing.operands import Subject, make
from dsa_dispatch.testing.selection import selection_checks
from dsa_dispatch.testing.stage_run import judge_stage, run_stage
from dsa_dispatch.testing.tiles import one_size

HOPPER = (9, 0)
REASON = emulated.available()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(REASON), reason=REASON),
    # TileLang's own.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def run_as():
    """``run_as(gpu, late, seed)``: how the kernels run until the test ends."""
    before = (emulated.HOW.late, emulated.HOW.seed, emulated.HOW.arch, emulated.HOW.changed)

    def change(gpu=HOPPER, late=True, seed=1, changed=None):
        emulated.HOW.late, emulated.HOW.seed = late, seed
        emulated.HOW.arch, emulated.HOW.changed = compiler.target_of(gpu), changed
        return fake_kernels.installed(gpu, kernel=emulated.kernel)

    yield change
    emulated.HOW.late, emulated.HOW.seed, emulated.HOW.arch, emulated.HOW.changed = before


def subject(stage):
    capability = dataclasses.replace(SPEC.stages[stage].capability, devices=None)
    function = resolve_reference(SPEC.stages[stage].function)
    return Subject(SPEC.name, stage, capability, function, torch.device("cpu"))


def checks():
    for stage in SPEC.stages:
        chosen = subject(stage)
        for name, check in selection_checks(chosen) if stage == "indexer_topk" else softmax_checks(chosen):
            yield pytest.param(check, id=f"{stage}-{name}".replace(" ", "_"))


@pytest.mark.parametrize("check", list(checks()))
def test_the_contract_holds_on_a_hopper_gpu(check, run_as):
    before = len(emulated.HOW.launches)
    with run_as():
        try:
            check()
        except NotHere as reason:
            pytest.skip(str(reason))
    assert len(emulated.HOW.launches) > before


@pytest.mark.parametrize("gpu", [(8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("stage", ["attention_forward", "indexer_topk"])
def test_the_contract_holds_elsewhere(gpu, stage, run_as):
    chosen = subject(stage)
    with run_as(gpu):
        found = dict(selection_checks(chosen) if stage == "indexer_topk" else softmax_checks(chosen))
        for name in (
            "holes",
            "ids outside the keys",
            "tiles of holes",
            "large scores",
            "ties bfloat16",
            "ranges",
        ):
            if name in found:
                found[name]()
        for name, check in found.items():
            if name.startswith(("beyond a tile, heads", "beyond a tile, width 67", "values")):
                check()


WIDE = [
    # heads, channels, width, rows: blocks of heads, two calls of the key kernel, tiles whole and not.
    *((17, 576, 131, 3), (64, 576, 67, 3), (65, 512, 64, 2), (128, 576, 129, 2), (160, 576, 70, 2)),
    *((16, 576, 131, 3), (1, 512, 1, 2), (5, 576, 64, 3)),
]


@pytest.mark.parametrize(("late", "seed"), [(True, 2), (False, 3)])
@pytest.mark.parametrize(("heads", "channels", "width", "rows"), WIDE)
@pytest.mark.parametrize("stage", ["attention_forward", "attention_backward"])
def test_any_heads_and_width_in_any_order_of_threads(stage, heads, channels, width, rows, late, seed, run_as):
    chosen = subject(stage)
    sizes = dataclasses.replace(
        chosen.sizes, heads=heads, qk=channels, width=width, keys=width + 5, rows=rows
    )
    with run_as(late=late, seed=seed):
        one_size(chosen, f"{heads} heads", sizes)


@pytest.mark.parametrize("heads", [3, 16, 17, 128])
def test_gradients_of_sharp_rows_keep_their_precision(heads, run_as):
    """Of keys that tie, gradients cancel."""
    chosen = subject("attention_backward")
    with run_as():
        large_scores(dataclasses.replace(chosen, capability=_with_heads(chosen.capability, heads)))


def _with_heads(capability, count):
    return dataclasses.replace(capability, heads=dataclasses.replace(capability.heads, minimum=count))


def test_the_emulator_shows_what_a_gpu_showed_of_the_sum_before_rounding(run_as):
    """An H200 gave 0.0062 for the kernel that summed dS before it was rounded."""
    read_back = re.compile(
        r"(\(\(float2\*\)\(&__\d+\)\)\[([01])\] = )__bfloat1622float2\(\(reinterpret_cast<__nv_bfloat162\*>\(&(__\d+)"
    )

    def unrounded(name, source):
        if name != "hopper_few_backward":
            return source
        assert read_back.search(source)
        return re.sub(
            read_back.pattern + r"[^;]*;",
            lambda match: f"{match[1]}((float2*)(&{before(source, match[3])}))[{match[2]}];",
            source,
        )

    def before(source, rounded):
        return re.search(
            rf"\(&{rounded}\)\)\[0\] = __float22bfloat162_rn\(\(\(float2\*\)\(&(v__\d+)", source
        )[1]

    with run_as(changed=unrounded), pytest.raises(ConformanceError, match=r"dq: relative error 0.0062"):
        large_scores(subject("attention_backward"))


def bits(rows, columns, low, high):
    return torch.randint(low, high, (rows, columns), dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("topk", [64, 5000])
@pytest.mark.parametrize("kind", ["one bin", "monotone", "zeros of both signs", "minus infinity"])
def test_no_candidate_is_dropped_and_ties_fall_to_the_lower_id(kind, topk, run_as):
    """More candidates in the bin of the cut than the list in shared memory holds."""
    columns = 9000
    scores = {
        "one bin": lambda: bits(2, columns, 0x3F900000, 0x3F900400),
        "monotone": lambda: torch.arange(columns).float().repeat(2, 1) / columns,
        "zeros of both signs": lambda: torch.randn(2, columns).clamp(max=0.0).neg().neg(),
        "minus infinity": lambda: torch.where(torch.rand(2, columns) < 0.9, -torch.inf, 1.0),
    }[kind]()
    scores[:, ::2] = torch.where(scores[:, ::2] == 0, -0.0, scores[:, ::2])
    starts = torch.tensor([3, 0], dtype=torch.int32)
    ends = torch.tensor([columns - 5, columns], dtype=torch.int32)
    with run_as():
        ids, length = select_from_scores(scores, starts, ends, topk)
    for row in range(2):
        inside = scores[row, starts[row] : ends[row]] + 0.0
        wanted = (torch.sort(-inside, stable=True).indices[:topk] + starts[row]).sort().values
        assert int(length[row]) == len(wanted)
        assert torch.equal(ids[row, : len(wanted)].long().sort().values, wanted.long())
        assert bool((ids[row, len(wanted) :] == -1).all())


def test_the_same_bits_come_out_in_any_order_of_threads(run_as):
    def results(late, seed):
        with run_as(late=late, seed=seed):
            return run_stage(subject("attention_forward"), make(subject("attention_forward")))

    first = results(True, 1)
    for late, seed in ((True, 5), (False, 9)):
        for name, tensor in results(late, seed).items():
            assert torch.equal(tensor, first[name]), name


PLANTED = [
    # kernel, what is taken out, which of its places, and what shows it.
    ("hopper_pairs", r"got_p\[\(n_1 & 1\)\]\.wait[^;]*;", 0, 64, ConformanceError),
    ("hopper_pairs", r"tl::wait_wgmma<0>\(\);", 0, 64, emulated.EmulatedFault),
    ("hopper_pairs", r"free\[[^\]]*\]\.wait[^;]*;", 0, 64, ConformanceError),
    ("hopper_pairs", r"free\[[^\]]*\]\.arrive\(\);", 0, 64, emulated.EmulatedFault),
    ("hopper_key_gradient", r"tl::cp_async_wait<0>\(\);", 0, 64, ConformanceError),
    ("hopper_query_gradient", r"stored\[0\]\.wait[^;]*;", 0, 64, ConformanceError),
    ("hopper_few_backward", r"got_left\[0\]\.wait[^;]*;", 0, 16, ConformanceError),
    ("hopper_few_backward", r"tl::__sync_thread_partial\(4, 128\);", 0, 16, ConformanceError),
]


@pytest.mark.parametrize(("kernel", "pattern", "which", "heads", "shown"), PLANTED)
def test_a_missing_wait_is_found(kernel, pattern, which, heads, shown, run_as):
    chosen = subject("attention_backward")
    sizes = dataclasses.replace(chosen.sizes, heads=heads, width=300, keys=305, rows=2)

    def without(name, source):
        if name != kernel:
            return source
        places = list(re.finditer(pattern, source))
        assert len(places) > which
        return source[: places[which].start()] + source[places[which].end() :]

    with run_as(changed=without), pytest.raises(shown):
        judge_stage(chosen, "planted", make(chosen, sizes=sizes))


def test_a_read_past_the_end_of_a_tensor_stops_the_process():
    """One key more than there are is told to the kernel, so that the id behind the last one counts as valid."""
    code = (
        "import sys; sys.path[:0] = [{folder!r}]\n"
        "import torch, fake_kernels\n"
        "from emulator import emulated\n"
        "sound = emulated.emulated('hopper_few_forward_kernel:hopper_few_forward', (0, 'bfloat16'), 'sm_90a')\n"
        "place = sound.names.index('keys')\n"
        "def kernel(device, where, *static):\n"
        "    return lambda *a: sound(*(value + {more} if i == place else value for i, value in enumerate(a)))\n"
        "from dsa_backends.tilelang_kernels.attention_forward import attention_forward\n"
        "from dsa_dispatch._call import RowLayout, StageOptions\n"
        "kv = torch.zeros(4, 512).bfloat16()\n"
        "with fake_kernels.installed(kernel=kernel):\n"
        "    attention_forward(torch.zeros(1, 3, 512).bfloat16(), kv, torch.full((1, 1), 4, dtype=torch.int32),\n"
        "        torch.ones(1, dtype=torch.int32), scale=1.0, v_channels=512, rows=RowLayout(1, 1, 4, 'ranges'),\n"
        "        options=StageOptions())\n"
        "print('reached the end')\n"
    )

    def run(more):
        text = code.format(folder=str(Path(__file__).parent), more=more)
        return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)

    assert "reached the end" in run(0).stdout
    broken = run(1)
    assert broken.returncode < 0
    assert "reached the end" not in broken.stdout
