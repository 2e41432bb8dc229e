"""A backend with one fault fails the suite with a message that names the fault; without it, the same backend passes."""

from __future__ import annotations

import pytest
from conformance import faults
from conformance.candidates import KERNELS, failures

from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch import Heads, IndexWidth
from dsa_dispatch._capability import FLOATS
from dsa_dispatch._registry.availability import resolve_reference
from dsa_dispatch.testing import ConformanceError, FakeBackend, conformance_checks, isolated_registry


@pytest.mark.parametrize("stage", KERNELS)
def test_without_a_fault_every_check_passes(stage):
    assert failures(stage, "") == {}


# fault: the check that must find it, and words of its message
NAMED = [
    ("attention_forward", "reads id -1", "holes", "memory outside the keys was read (id -1"),
    ("attention_forward", "ignores topk_length", "length", "length is ignored"),
    ("attention_forward", "base-2 lse", "lse", "a logarithm of base 2"),
    ("attention_forward", "counts a hole as key 0", "holes", "a hole counted as key 0"),
    (
        "attention_forward",
        "writes past a padded head",
        "guard rows",
        "bytes past its end. The call has 3 heads",
    ),
    ("attention_forward", "mutates its input", "inputs unmodified", "it changed q"),
    ("attention_forward", "bf16 accumulation", "long rows", "sums over 1024 keys run in fp32"),
    ("attention_forward", "right for 16 heads only", "accepts heads 32", "declared, but the answer is wrong"),
    ("attention_forward", "raises above 16 heads", "accepts heads 32", "raised ValueError: no kernel for 32"),
    ("attention_forward", "multiplies what a hole holds by zero", "holes", "read and not masked"),
    ("attention_forward", "counts a duplicate once", "duplicates", "named twice counted once"),
    ("attention_forward", "NaN for an empty row", "empty rows", "a softmax over nothing must give 0"),
    ("attention_forward", "no maximum subtracted", "large scores", "subtract the maximum"),
    ("attention_forward", "keeps an earlier result", "values float64", "relative error"),
    ("attention_forward", "reads the neighbour", "chunks and batch", "do not depend on the neighbour"),
    ("attention_backward", "overwrites dkv", "accumulators", "dkv overwritten instead of added to"),
    ("attention_backward", "sums dkv in bf16", "many rows on one key", "over 4096 queries is summed in fp32"),
    ("attention_backward", "computes dq always", "unneeded gradients", "dq was returned, expected None"),
    ("indexer_topk", "wrong tie rule", "ties float32", "wrong tie rule: row 0 chose key"),
    ("indexer_topk", "ignores the bounds", "values float32", "outside its range"),
    ("indexer_topk", "scores in bf16", "values float32", "the declared score_error allows"),
    ("indexer_target", "normalises the mass", "values float32", "mass: relative error"),
    ("attention_forward", "skips rows without a key", "guard rows", "a value is left unwritten"),
    # An lse that is right beside ordinary keys and wrong elsewhere.
    ("attention_forward", "lse without the maximum subtracted", "large scores", "lse: inf"),
    ("attention_forward", "lse multiplies what a hole holds by zero", "holes", "lse: NaN in rows"),
    ("attention_forward", "lse of the row before in a slice", "chunks and batch", "lse: off by"),
    ("attention_forward", "lse of packed queries", "strided rows", "lse: NaN in rows"),
    ("indexer_topk", "causal in the first batch item alone", "causal rows", "outside its range"),
    ("indexer_topk", "causal without first_row", "causal rows", "in a slice that begins at `rows.first_row`"),
    ("indexer_target", "causal in the first batch item alone", "dense form, causal", "mass: relative error"),
    ("indexer_target", "causal without first_row", "dense form, causal", "at `rows.first_row`: mass"),
    ("indexer_loss", "divides by a zero mass", "rows without mass, sparse", "0 / 0 is NaN"),
    ("indexer_loss", "a uniform teacher for zero mass", "rows without mass, dense", "for a uniform teacher"),
    (
        "attention_forward",
        "drops what is left of a tile of 64 slots",
        "beyond a tile, width 67",
        "out: relative",
    ),
    ("attention_forward", "one tile of 64 rows", "beyond a tile, rows 67", "sizes beyond one tile: rows 67"),
    ("attention_forward", "looks at 64 channels", "beyond a tile, channels 80/64", "channels 80/64: out"),
    ("attention_forward", "NaN after a tile of holes", "tiles of holes", "-inf - -inf is NaN"),
    ("indexer_topk", "looks at 2048 keys", "beyond a tile, keys 2100", "a rejected key scores"),
    ("gqa_forward", "values no wider than keys", "beyond a tile, channels 32/67", "channels 32/67: out"),
]


@pytest.mark.parametrize(("stage", "fault", "check", "words"), NAMED, ids=[fault for _, fault, _, _ in NAMED])
def test_fault_is_found_and_named(stage, fault, check, words):
    found = failures(stage, fault)
    assert words in found[check], found
    assert f"candidate {stage} on cpu: " in found[check]


ALONE = [
    ("attention_forward", "writes past a padded head"),
    ("attention_forward", "right for 16 heads only"),
    ("attention_forward", "raises above 16 heads"),
    ("attention_backward", "computes dq always"),
]


@pytest.mark.parametrize(("stage", "fault"), ALONE)
def test_a_fault_that_no_value_shows_is_blamed_on_one_claim_only(stage, fault):
    claims = {name.removesuffix(f" {dtype}") for name in failures(stage, fault) for dtype in FLOATS}
    assert len([claim for claim in claims if not claim.endswith(tuple(FLOATS))]) == 1


@pytest.mark.parametrize(
    "fault", ["ignores topk_length", "counts a hole as key 0", "counts a duplicate once", "base-2 lse"]
)
def test_a_fault_of_slots_or_lse_is_not_blamed_on_plain_values(fault):
    assert not [check for check in failures("attention_forward", fault) if check.startswith("values")]


def test_a_count_of_heads_beyond_one_tile_is_found():
    found = failures("attention_forward", "one tile of 16 heads", heads=Heads())
    assert "sizes beyond one tile: heads 17" in found["beyond a tile, heads 17"]
    assert {"accepts heads 17", "accepts heads 20", "beyond a tile, heads 20"} <= set(found)


def test_a_declared_order_is_checked():
    found = failures("indexer_topk", "claims an order it has not", sorted=True)
    assert "sorted is declared" in found["ties float32"]


def test_a_wrong_tie_rule_passes_where_it_is_declared_arbitrary():
    assert failures("indexer_topk", "wrong tie rule", tie_rule="arbitrary") == {}


def test_a_capability_that_declares_a_width_its_kernel_lacks_is_found():
    def narrow(q, kv, indices, length, **rest):
        assert indices.shape[1] <= 16, f"no kernel for width {indices.shape[1]}"
        return faults.forward()(q, kv, indices, length, **rest)

    fake = FakeBackend(
        "candidate",
        ["attention_forward"],
        replace={"attention_forward": narrow},
        width=IndexWidth(multiple_of=8, maximum=64),
    )
    with isolated_registry(fake.spec, installed=True):
        (check,) = [check for check in conformance_checks("candidate") if check.name == "accepts width 64"]
        with pytest.raises(
            ConformanceError, match="width 64 is declared, but the call raised AssertionError"
        ):
            check.run()


@pytest.mark.parametrize("stage", ["attention_forward", "indexer_topk"])
def test_a_buffer_returned_every_time_is_found(stage):
    right = resolve_reference(SPEC.stages[stage].function)
    buffers = {}

    def static(*args, **kwargs):
        results = right(*args, **kwargs)
        for index, result in enumerate(results):
            buffers.setdefault((index, tuple(result.shape), result.dtype), result).copy_(result)
        return tuple(
            buffers[index, tuple(result.shape), result.dtype] for index, result in enumerate(results)
        )

    fake = FakeBackend("candidate", [stage], replace={stage: static})
    with isolated_registry(fake.spec, installed=True):
        (check,) = [check for check in conformance_checks("candidate") if check.name == "earlier calls"]
        with pytest.raises(ConformanceError, match="of an earlier call changed in a later one"):
            check.run()
