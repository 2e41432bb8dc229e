"""Generated calls against the formulas: every mixture of ids, bounds, sizes, layouts and gradient needs."""

from __future__ import annotations

import torch
from contract import formulas, make
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_dispatch import (
    run_fused_absorbed_sparse_attention,
    run_fused_gqa_sparse_attention,
    run_fused_qk_topk,
    run_fused_qk_topk_with_loss,
    use_backend,
)
from dsa_dispatch.testing import assert_backend_ran

EXACT = {"rtol": 1e-10, "atol": 1e-11}  # fp64: only the order of sums differs
LAYOUTS = ("plain", "transposed", "sliced", "expanded")


@st.composite
def laid_out(draw, shape, seed, kinds=LAYOUTS):
    """The values a layout stands for, and the leaf that has it: contiguous, permuted, a slice, or repeated rows."""
    kind = draw(st.sampled_from(kinds))
    if kind == "expanded":
        return make.normal(1, *shape[1:], seed=seed).expand(shape)
    if kind == "sliced":
        wide = make.normal(*(size + 2 for size in shape), seed=seed)
        return wide[tuple(slice(1, 1 + size) for size in shape)]
    if kind == "transposed":
        order = draw(st.permutations(range(len(shape))))
        stored = make.normal(*(shape[axis] for axis in order), seed=seed)
        return stored.permute(*(order.index(axis) for axis in range(len(shape))))
    return make.normal(*shape, seed=seed)


def snapshot(tensors):
    return [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors if tensor is not None]


def unmodified(before):
    for tensor, version, content in before:
        assert tensor._version == version
        assert torch.equal(tensor.detach(), content)


@st.composite
def id_tensors(draw, batch, rows, keys):
    width = draw(st.integers(0, 6))
    strange = st.sampled_from([-1, -7, keys, keys + 3, 2**31 - 1, -(2**31)])
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    if dtype == torch.int64:
        strange = st.one_of(strange, st.sampled_from([2**32, 2**32 + 3, -(2**33), 2**62]))
    one = st.one_of(st.integers(0, max(keys - 1, 0)), strange)
    count = batch * rows * width
    values = draw(st.lists(one, min_size=count, max_size=count))
    indices = torch.tensor(values, dtype=torch.int64).view(batch, rows, width).to(dtype)
    if draw(st.booleans()):
        indices = indices.transpose(1, 2).contiguous().transpose(1, 2)
    length = None
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(-2, width + 2), min_size=batch * rows, max_size=batch * rows))
        length = torch.tensor(lengths, dtype=draw(st.sampled_from([torch.int32, torch.int64]))).view(
            batch, rows
        )
    return indices, length


sizes = st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 1, 2, 3]), st.integers(0, 7))
chunks = st.sampled_from(["off", "auto", 1, 2, 3])


@st.composite
def attention_calls(draw, grouped):
    rows, batch, keys = draw(sizes)
    if grouped:
        kv_heads = draw(st.integers(1, 2))
        tensors = [draw(laid_out((rows, batch, kv_heads * draw(st.integers(1, 3)), 3), 1))]
        tensors += [draw(laid_out((keys, batch, kv_heads, size), seed)) for size, seed in ((3, 2), (2, 3))]
    else:
        tensors = [draw(laid_out((rows, batch, draw(st.integers(1, 3)), 4), 1))]
        tensors += [draw(laid_out((keys, batch, 1, 4), 2))]
    need = draw(st.tuples(*(st.booleans() for _ in tensors)))
    return tensors, need, *draw(id_tensors(batch, rows, keys)), draw(chunks)


def attention_agrees(call, run, formula):
    tensors, need, indices, length, query_chunk = call
    leaves = [tensor.detach().requires_grad_(it) for tensor, it in zip(tensors, need, strict=True)]
    before = snapshot([*leaves, indices, length])
    with use_backend("torch_dense", query_chunk=query_chunk), assert_backend_ran("torch_dense"):
        out, lse = run(leaves, indices, length)
    counts = formulas.naming_counts(indices, length, tensors[1].shape[0])
    wanted_leaves = [
        tensor.detach().clone().requires_grad_(it) for tensor, it in zip(tensors, need, strict=True)
    ]
    if counts.numel():
        wanted, wanted_lse = formula(wanted_leaves, counts)
        torch.testing.assert_close(out, wanted, **EXACT)
        torch.testing.assert_close(lse, wanted_lse, **EXACT)
    else:
        wanted = None
        assert not out.any()
        assert (lse == -torch.inf).all()
    assert out.requires_grad == any(need)
    if any(need):
        dout = make.normal(*out.shape, seed=9)
        out.backward(dout)
        if wanted is not None:
            wanted.backward(dout)
    for leaf, reference, it in zip(leaves, wanted_leaves, need, strict=True):
        assert (leaf.grad is not None) == it
        if it:
            expected = torch.zeros_like(leaf.grad) if wanted is None else reference.grad
            torch.testing.assert_close(leaf.grad, expected, **EXACT)
    unmodified(before)


@settings(max_examples=120)
@given(attention_calls(grouped=False))
def test_absorbed_attention(call):
    attention_agrees(
        call,
        lambda leaves, ids, length: run_fused_absorbed_sparse_attention(
            None, *leaves, ids, 0.7, 3, length, return_lse=True
        ),
        lambda leaves, counts: formulas.absorbed(*leaves, counts, 0.7, 3),
    )


@settings(max_examples=120)
@given(attention_calls(grouped=True))
def test_grouped_attention(call):
    attention_agrees(
        call,
        lambda leaves, ids, length: run_fused_gqa_sparse_attention(
            None, *leaves, ids, 0.7, length, return_lse=True
        ),
        lambda leaves, counts: formulas.grouped(*leaves, counts, 0.7),
    )


@st.composite
def bounds(draw, batch, rows, keys):
    kind = draw(st.sampled_from(["causal", "shared", "expanded", "per item"]))
    if kind == "causal":
        return None, None
    count = rows * batch if kind == "per item" else rows
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    values = [
        torch.tensor(draw(st.lists(st.integers(-3, keys + 3), min_size=count, max_size=count)), dtype=dtype)
        for _ in range(2)
    ]
    if kind == "per item":
        values = [value.view(batch, rows) for value in values]
    if kind == "expanded":
        values = [value.expand(batch, rows) for value in values]
    return values


def binary(shape, seed):
    """Scores of small integers: every product and sum is exact, and nearly all of them are ties."""
    return torch.randint(0, 2, shape, generator=make.generator(seed)).double()


@st.composite
def selection_calls(draw):
    rows, batch, keys = draw(sizes)
    heads, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shapes = (rows, batch, heads, channels), (keys, batch, channels), (rows, batch, heads)
    if draw(st.booleans()):
        seed = draw(st.integers(0, 99))
        tensors = [binary(shape, seed + place) for place, shape in enumerate(shapes)]
        tensors[2] = tensors[2] * draw(st.sampled_from([1.0, -1.0]))
        dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
        tensors = [tensor.to(dtype) for tensor in tensors]
    else:
        kinds = ("plain", "transposed", "sliced")
        tensors = [draw(laid_out(shape, place, kinds)) for place, shape in enumerate(shapes)]
    return (
        tensors, draw(bounds(batch, rows, keys)), draw(st.integers(1, 9)), draw(st.booleans()), draw(chunks),
        draw(st.sampled_from([None, 1, 3])), draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=250)
@given(selection_calls())
def test_selection(call):
    tensors, (starts, ends), topk, use_relu, query_chunk, block_size, grad = call
    tensors = [tensor.detach().requires_grad_(grad) for tensor in tensors]
    before = snapshot([*tensors, starts, ends])
    with (
        use_backend("torch_dense", query_chunk=query_chunk),
        assert_backend_ran("torch_dense", "indexer_topk"),
    ):
        indices, length = run_fused_qk_topk(None, *tensors, topk, starts, ends, block_size, use_relu)
    rows, batch, keys = tensors[0].shape[0], tensors[0].shape[1], tensors[1].shape[0]
    formulas.check_form(indices, length, batch, rows, topk)
    mask = formulas.bounds_mask(starts, ends, rows, batch, keys)
    scores = formulas.index_scores(*(tensor.detach() for tensor in tensors), use_relu)
    for item in range(batch):
        for row in range(rows):
            chosen = indices[item, row, : int(length[item, row])].tolist()
            wanted = formulas.best_keys(scores[item, row].tolist(), mask[item, row].tolist(), topk)
            assert set(chosen) == wanted, (item, row)
    unmodified(before)


@st.composite
def loss_calls(draw):
    rows, batch, keys = draw(sizes)
    kinds = ("plain", "transposed", "sliced")
    indexer = [
        draw(laid_out(shape, seed, kinds))
        for seed, shape in enumerate([(rows, batch, 2, 3), (keys, batch, 3), (rows, batch, 2)])
    ]
    teacher = draw(laid_out((rows, batch, 2, 4), 5)), draw(laid_out((keys, batch, 1, 4), 6))
    valid = draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=rows, max_size=rows)))
    need = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    flags = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    return (
        indexer, teacher, need, draw(bounds(batch, rows, keys)), draw(st.integers(1, 9)), valid, flags, draw(chunks)
    )  # fmt: skip


@settings(max_examples=120)
@given(loss_calls())
def test_loss(call):
    tensors, teacher, need, (starts, ends), topk, valid, (per_token, use_relu, sparse), query_chunk = call
    leaves = [tensor.detach().requires_grad_(it) for tensor, it in zip(tensors, need, strict=True)]
    valid = None if valid is None else torch.tensor(valid, dtype=torch.bool)
    before = snapshot([*leaves, *teacher, starts, ends, valid])
    with use_backend("torch_dense", query_chunk=query_chunk), assert_backend_ran("torch_dense"):
        got = run_fused_qk_topk_with_loss(
            None, *leaves, topk, starts, ends, None, *teacher, 0.6, 0.8, query_valid_rows=valid,
            calculate_per_token_loss=per_token, use_relu=use_relu, sparse_loss=sparse,
        )  # fmt: skip
    rows, batch, keys = tensors[0].shape[0], tensors[0].shape[1], tensors[1].shape[0]
    copies = [tensor.detach().clone().requires_grad_(it) for tensor, it in zip(tensors, need, strict=True)]
    support = formulas.bounds_mask(starts, ends, rows, batch, keys)
    if sparse:
        scores = formulas.index_scores(*(tensor.detach() for tensor in tensors), use_relu)
        support = formulas.chosen_mask(scores, support, topk)
    wanted = formulas.loss(*copies, *teacher, support, valid, 0.6, 0.8, per_token, use_relu)
    torch.testing.assert_close(got.loss.detach(), wanted.detach(), **EXACT)
    assert got.loss.requires_grad == any(need)
    if any(need):
        got.loss.backward()
        wanted.backward()
    for leaf, copy, it in zip(leaves, copies, need, strict=True):
        assert (leaf.grad is not None) == it
        if it:
            torch.testing.assert_close(leaf.grad, copy.grad, **EXACT)
    unmodified(before)
