"""A call padded, compacted or cleaned for a kernel gives what the kernel would give without: to 1e-12 in fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract import make

from dsa_dispatch import (
    Channels,
    Heads,
    IndexWidth,
    run_fused_absorbed_sparse_attention,
    run_fused_gqa_sparse_attention,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
    use_backend,
)
from dsa_dispatch.errors import NoBackendError
from dsa_dispatch.testing import FakeBackend, assert_backend_ran, isolated_registry
from dsa_dispatch.testing.fakes import reference_capability

STRICT = 1e-12
"""Of the largest entry: every step is exact but for the order of sums, in fp64."""

ATTENTION = ("attention_forward", "attention_backward")


def close(got, wanted):
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert torch.equal(got.isfinite(), wanted.isfinite())
    got, wanted = (tensor.nan_to_num(neginf=0.0) for tensor in (got, wanted))
    assert float((got - wanted).abs().max()) <= STRICT * float(wanted.abs().max())


def compare(run, inputs, fake, stages, **policy):
    """``run`` on the fake and on the reference: results and gradients of every input agree."""
    results = []
    with isolated_registry(fake.spec, installed=True):
        for backend in ("torch_dense", "fake"):
            leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
            policy["backend"] = dict.fromkeys(stages, backend)
            with use_backend(fallback="error", **policy), assert_backend_ran(backend, *stages):
                outputs = run(*leaves)
                value = next(output for output in outputs if output.requires_grad)
                upstream = make.normal(*value.shape, seed=99)
                gradients = torch.autograd.grad(value, leaves, upstream)
            results.append((*(output.detach() for output in outputs), *gradients))
    for got, wanted in zip(results[1], results[0], strict=True):
        if got.is_floating_point():
            close(got, wanted)
        else:
            assert torch.equal(got.sort(-1).values, wanted.sort(-1).values)


def shapes(fake, stage):
    return [found for name, found in fake.calls if name == stage]


def absorbed(heads=3, channels=6, v_channels=4, width=5, batch=1, rows=4, keys=7, ids=None, length=None):
    indices = make.ids(batch, rows, width, keys) if ids is None else ids

    def run(query, key):
        return run_fused_absorbed_sparse_attention(
            None, query, key, indices, 0.3, v_channels, length, return_lse=True
        )

    return run, (
        make.normal(rows, batch, heads, channels, seed=1), make.normal(keys, batch, 1, channels, seed=2)
    )  # fmt: skip


HEAD_RULES = [
    (Heads(power_of_two=True, minimum=16, pad=True), lambda heads: max(16, 1 << (heads - 1).bit_length())),
    (Heads(multiple_of=64, pad=True), lambda heads: -(-heads // 64) * 64),
    (Heads(values=frozenset({16, 64, 128, 192}), pad=True),
     lambda heads: next(count for count in (16, 64, 128, 192) if count >= heads)),
]  # fmt: skip


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 15, 16, 17, 31, 48, 63, 64, 65, 96, 127, 128, 129, 130])
@pytest.mark.parametrize("rule", range(3), ids=["powers of two", "multiples of 64", "a set"])
def test_heads(heads, rule):
    capability, padded = HEAD_RULES[rule]
    fake = FakeBackend("fake", ATTENTION, heads=capability)
    run, inputs = absorbed(heads=heads)
    compare(run, inputs, fake, ATTENTION)
    for stage in ATTENTION:
        assert {found[0][1] for found in shapes(fake, stage)} == {padded(heads)}


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 127, 128, 200, 640, 2048, 2049, 2112])
@pytest.mark.parametrize("multiple", [64, 128])
def test_index_width(width, multiple):
    fake = FakeBackend("fake", ATTENTION, width=IndexWidth(multiple_of=multiple, pad=True))
    run, inputs = absorbed(width=width, rows=2)
    compare(run, inputs, fake, ATTENTION)
    for stage in ATTENTION:
        assert {found[2][1] for found in shapes(fake, stage)} == {-(-width // multiple) * multiple}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("query_chunk", ["off", 3])
def test_512_channels_to_a_kernel_of_576(batch, query_chunk):
    fake = FakeBackend("fake", ATTENTION, channels=Channels(pairs=((576, 512),), pad=True))
    run, inputs = absorbed(channels=512, v_channels=512, batch=batch)
    compare(run, inputs, fake, ATTENTION, query_chunk=query_chunk)
    for stage in ATTENTION:
        for query, key, *_ in shapes(fake, stage):
            assert (query[2], key[1]) == (576, 576)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("query_chunk", ["off", 3])
def test_heads_channels_and_width_at_once_in_every_chunk(batch, query_chunk):
    fake = FakeBackend(
        "fake", ATTENTION, heads=Heads(multiple_of=8, pad=True), channels=Channels(multiple_of=16, pad=True),
        width=IndexWidth(power_of_two=True, pad=True), index_form="prefix",
    )  # fmt: skip
    run, inputs = absorbed(batch=batch, length=torch.full((batch, 4), 4))
    compare(run, inputs, fake, ATTENTION, query_chunk=query_chunk)
    assert {found[0][1:] for found in shapes(fake, "attention_backward")} == {(8, 16)}
    assert {found[2][1] for found in shapes(fake, "attention_backward")} == {8}
    assert len(shapes(fake, "attention_forward")) == (1 if query_chunk == "off" else -(-4 * batch // 3))


DIRTY = torch.tensor(
    [[[5, -1, 5, 900, 3], [-7, 9, 2, 2, 0], [-1, -1, -1, -1, -1], [6, 7, 2**31 - 1, -(2**31), 1]]], dtype=torch.int32
)  # fmt: skip


def cleaned(reference, form, seen):
    """A kernel that refuses ids a capability of this ``form`` must never be given."""

    def stage(q, kv, *tensors, **kwargs):
        at = next(place for place, tensor in enumerate(tensors) if tensor.dtype == torch.int32)
        ids, length = tensors[at], tensors[at + 1]
        assert ((ids >= -1) & (ids < kv.shape[0])).all()
        if form == "prefix":
            valid = ids >= 0
            assert torch.equal(valid, torch.arange(ids.shape[1]) < length[:, None])
        seen.append(ids)
        return reference(q, kv, *tensors, **kwargs)

    return stage


@pytest.mark.parametrize("form", ["holes", "prefix"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("length", [None, torch.tensor([[5, 4, 2, 99]])])
def test_ids_are_cleaned_and_compacted_for_kernels_that_need_it(form, batch, dtype, length):
    from dsa_backends.torch_dense.attention_backward import attention_backward
    from dsa_backends.torch_dense.attention_forward import attention_forward

    seen = []
    fake = FakeBackend(
        "fake", ATTENTION, index_form=form,
        replace={
            "attention_forward": cleaned(attention_forward, form, seen),
            "attention_backward": cleaned(attention_backward, form, seen),
        },
    )  # fmt: skip
    length = None if length is None else length.expand(batch, 4)
    run, inputs = absorbed(batch=batch, ids=DIRTY.to(dtype).expand(batch, 4, 5), length=length)
    compare(run, inputs, fake, ATTENTION)
    assert seen


@pytest.mark.parametrize("form", ["holes", "prefix"])
@pytest.mark.parametrize("width", [5, 9])
def test_grouped_attention(form, width):
    stages = ("gqa_forward", "gqa_backward")
    fake = FakeBackend(
        "fake", stages, channels=Channels(multiple_of=16, pad=True), width=IndexWidth(multiple_of=8, pad=True),
        index_form=form,
    )  # fmt: skip
    ids = make.ids(2, 4, width, 7)

    def run(query, key, value):
        return run_fused_gqa_sparse_attention(None, query, key, value, ids, 0.3, return_lse=True)

    inputs = (
        make.normal(4, 2, 6, 5, seed=1), make.normal(7, 2, 3, 5, seed=2), make.normal(7, 2, 3, 4, seed=3)
    )  # fmt: skip
    compare(run, inputs, fake, stages)
    for stage in stages:
        for query, key, value, indices, *_ in shapes(fake, stage):
            assert (query[1:], key[1:], value[1:]) == ((6, 16), (3, 16), (3, 4))
            assert indices[1] == -(-width // 8) * 8


def best_first(q, k, w, starts, ends, *, rows, topk, use_relu, options):
    """The reference's selection in the order of the contract's preference."""
    from dsa_backends.torch_dense.indexer_topk import indexer_topk

    asked.append(topk)
    ids, length = indexer_topk(
        q, k, w, starts, ends, rows=rows, topk=topk, use_relu=use_relu, options=options
    )
    dots = torch.einsum("thd,sd->ths", q, k)
    scores = ((dots.relu() if use_relu else dots) * w[..., None]).sum(1)
    scores = torch.where(ids >= 0, scores.gather(1, ids.clamp_min(0).long()), -torch.inf)
    order = scores.argsort(
        dim=1, descending=True, stable=True
    )  # ids come ascending, so ties stay in their order
    return ids.gather(1, order), length


asked = []


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 3, 16, 17])
@pytest.mark.parametrize("topk", [1, 3, 40])
def test_the_indexer_selects_the_same(topk, heads, batch):
    fake = FakeBackend(
        "fake", ("indexer_topk",), heads=Heads(multiple_of=16, pad=True),
        channels=Channels(multiple_of=32, pad=True), width=IndexWidth(multiple_of=8, pad=True), sorted=True,
        replace={"indexer_topk": best_first},
    )  # fmt: skip
    # Small integers: every score is exact, whatever the order of its sums, and full of ties.
    q, k, w = (
        torch.randint(-2, 3, shape, generator=make.generator(seed)).double()
        for seed, shape in enumerate([(9, batch, heads, 5), (12, batch, 5), (9, batch, heads)])
    )
    results = []
    with isolated_registry(fake.spec, installed=True):
        for backend in ("torch_dense", "fake"):
            with use_backend(backend, fallback="error"), assert_backend_ran(backend, "indexer_topk"):
                results.append(run_fused_qk_topk(None, q, k, w, topk))
    (wanted, wanted_length), (got, length) = results
    assert asked.pop() == -(-topk // 8) * 8
    assert got.shape == wanted.shape == (batch, 9, topk)
    assert torch.equal(length, wanted_length)
    assert torch.equal(got.sort(-1).values, wanted.sort(-1).values)
    padded = -(-heads // 16) * 16
    assert {found[:3] for found in shapes(fake, "indexer_topk")} == {
        ((9 * batch, padded, 32), (12 * batch, 32), (9 * batch, padded))
    }


def test_a_selection_in_no_order_is_never_widened():
    fake = FakeBackend("fake", ("indexer_topk",), width=IndexWidth(multiple_of=8, pad=True))
    q, k, w = make.normal(9, 1, 2, 3), make.normal(12, 1, 3, seed=1), make.normal(9, 1, 2, seed=2)
    with isolated_registry(fake.spec, installed=True), use_backend("fake", fallback="error"):
        run_fused_qk_topk(None, q, k, w, 8)
        with pytest.raises(NoBackendError, match="INDEX_WIDTH index_topk: got 3, supports multiples of 8"):
            run_fused_qk_topk(None, q, k, w, 3)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("query_chunk", ["off", 3])
def test_the_loss_and_its_gradients(sparse, batch, query_chunk):
    wide = dataclasses.replace(
        reference_capability(),
        channels=Channels(multiple_of=16, pad=True),
        width=IndexWidth(multiple_of=8, pad=True),
    )
    fake = FakeBackend(
        "fake",
        # A zero head would enter the teacher's mass, so the target is never given one.
        {
            "indexer_target": wide,
            "indexer_loss": dataclasses.replace(wide, heads=Heads(multiple_of=8, pad=True)),
        },
    )
    query, key = make.normal(5, batch, 3, 6, seed=4), make.normal(9, batch, 1, 6, seed=5)
    valid = torch.tensor([True, True, False, True, True])

    def run(q, k, w):
        return run_fused_qk_topk_with_loss(
            None,
            q,
            k,
            w,
            3,
            None,
            None,
            None,
            query,
            key,
            0.4,
            0.7,
            query_valid_rows=valid,
            sparse_loss=sparse,
        )

    inputs = make.normal(5, batch, 2, 3), make.normal(9, batch, 3, seed=1), make.normal(5, batch, 2, seed=2)
    compare(run, inputs, fake, ("indexer_target", "indexer_loss"), query_chunk=query_chunk)
    assert {found[0][1:] for found in shapes(fake, "indexer_loss")} == {(8, 16)}
    assert {found[1][1] for found in shapes(fake, "indexer_loss")} == {16}
    assert {found[1][1] for found in shapes(fake, "indexer_target")} == {16}
    assert {found[0][1] for found in shapes(fake, "indexer_target")} == {3}


def test_every_stage_pads_for_itself_and_the_unpadded_is_saved():
    forward = FakeBackend("forward", ("attention_forward",), heads=Heads(multiple_of=64, pad=True))
    backward = FakeBackend("backward", ("attention_backward",), heads=Heads(multiple_of=16, pad=True))
    run, inputs = absorbed(heads=3)
    saved = []
    with (
        isolated_registry(forward.spec, backward.spec),
        use_backend({"attention_forward": "forward", "attention_backward": "backward"}, fallback="error"),
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor.shape) or tensor, lambda it: it
        ),
    ):
        leaves = [tensor.requires_grad_() for tensor in inputs]
        out, _ = run(*leaves)
        out.sum().backward()
    assert shapes(forward, "attention_forward")[0][0][1] == 64
    assert shapes(backward, "attention_backward")[0][0][1] == 16
    assert set(saved) == {(4, 1, 3, 6), (7, 1, 1, 6), (1, 4, 5), (4, 1, 3, 4), (1, 4, 3), ()}
