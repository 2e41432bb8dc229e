"""The modules against plain formulas: RoPE in both conventions, keys in chunks, pools with their tail, the core."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from contract import formulas, make
from training.models import Layer, step

import dsa_dispatch as dsa
from dsa_dispatch import nn as dsann
from dsa_dispatch.errors import ConfigError, InvalidInputError
from dsa_dispatch.nn.row_chunks import map_rows

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture(autouse=True)
def same_weights():
    torch.manual_seed(0)


def turned(x, angle):
    """A rotation of each pair as a complex product."""
    return x * torch.polar(torch.ones_like(angle), angle)


@pytest.mark.parametrize("rope", ["half_split", "interleaved"])
def test_rotation_turns_each_pair_by_its_angle_and_leaves_the_other_channels(rope):
    x = make.normal(5, 2, 3, 10)
    angles = dsann.rope_angles(torch.arange(5), 6, theta=100.0).double()
    got = dsann.rotate(x, angles, rope)
    first, second = (x[..., 0:6:2], x[..., 1:6:2]) if rope == "interleaved" else (x[..., :3], x[..., 3:6])
    pairs = turned(torch.complex(first, second), angles[:, None, None])
    mine = got[..., :6]
    mine = (mine[..., 0::2], mine[..., 1::2]) if rope == "interleaved" else mine.chunk(2, dim=-1)
    torch.testing.assert_close(torch.complex(*mine), pairs, rtol=1e-12, atol=1e-12)
    assert torch.equal(got[..., 6:], x[..., 6:])
    assert angles[4, 2] == pytest.approx(4 * 100.0 ** (-4 / 6), rel=1e-6)


@pytest.mark.parametrize("rope", ["half_split", "interleaved"])
def test_rotated_products_depend_on_the_distance_alone(rope):
    q, k = make.normal(1, 1, 6, seed=1), make.normal(1, 1, 6, seed=2)

    def product(i, j):
        angles = dsann.rope_angles(torch.tensor([i, j]), 6).double()
        return (dsann.rotate(q, angles[:1], rope) * dsann.rotate(k, angles[1:], rope)).sum()

    # Angles are fp32: at position 1009 they are known to 1e-4.
    torch.testing.assert_close(product(9, 2), product(1009, 1002), rtol=0, atol=1e-3)


def key_of(module, hidden):
    """``IndexKey`` without RoPE, one line."""
    return F.layer_norm(hidden @ module.weight.T, (8,), module.norm_weight, module.norm_bias, module.eps)


def pooled_key_of(module, hidden):
    """``PooledIndexKey``, pool by pool."""
    key, gate = key_of(module, hidden), hidden @ module.gate_weight.T
    pools = []
    for first in range(0, hidden.shape[0] - module.pool + 1, module.pool):
        rows = slice(first, first + module.pool)
        share = (gate[rows] + module.position[:, None]).softmax(0)
        pools.append((share * key[rows]).sum(0))
    return torch.stack(pools)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("chunk", [8, 12, 1000])
def test_index_keys_in_row_chunks_equal_the_formula_with_its_gradients(pooled, chunk):
    hidden = make.normal(27, 2, 6, grad=True)
    module = (
        dsann.PooledIndexKey(6, 8, 4, row_chunk=chunk) if pooled else dsann.IndexKey(6, 8, row_chunk=chunk)
    )
    module.double()
    formula = pooled_key_of if pooled else key_of
    inputs = [hidden, *module.parameters()]
    for got, wanted in ((module(hidden), formula(module, hidden)),):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        upstream = make.normal(*wanted.shape, seed=5)
        torch.testing.assert_close(
            torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream),
            rtol=1e-11, atol=1e-11,
        )  # fmt: skip


def test_index_keys_are_projected_once_per_pass_in_chunks_and_nothing_between_is_saved():
    seen, saved = [], []

    def function(x, first, weight):
        seen.append((first, x.shape[0]))
        return (x @ weight).sin().exp()

    x, weight = make.normal(20, 1, 4), make.normal(4, 3, seed=1, grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = map_rows(function, x, (weight,), chunk=8)
    assert seen == [(0, 8), (8, 8), (16, 4)], "once forward"
    assert {tensor.data_ptr() for tensor in saved} == {x.data_ptr(), weight.data_ptr()}
    seen.clear()
    out.sum().backward()
    assert seen == [(0, 8), (8, 8), (16, 4)], "once backward"


def test_weight_gradients_of_the_chunks_accumulate_in_fp32():
    # 4096 chunks of one row that add 1e-3 each: a sum kept in bf16 stalls at about 0.5.
    x = torch.full((4096, 1, 1), 1e-3, dtype=torch.bfloat16)
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    map_rows(lambda x, first, weight: x * weight, x, (weight,), chunk=1).sum().backward()
    assert float(weight.grad) == pytest.approx(4.096, rel=4e-3)


def test_index_keys_under_autocast_are_projected_in_its_type_in_both_passes():
    module = dsann.IndexKey(6, 8, row_chunk=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        key = module(torch.randn(10, 1, 6))
    key.float().sum().backward()
    assert module.weight.grad.dtype == torch.float32
    assert module.weight.grad.isfinite().all()


def test_a_layer_under_autocast_whose_norms_are_fp32_as_on_cuda_trains_with_kernels_in_bf16(monkeypatch):
    norm, dtypes = F.layer_norm, []
    monkeypatch.setattr(F, "layer_norm", lambda *args: norm(*args).float())
    for name in ("run_fused_absorbed_sparse_attention", "run_fused_qk_topk_with_loss"):
        module = dsann.attention if "absorbed" in name else dsann.indexer
        run = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, run=run, **kw: dtypes.append(args[1].dtype) or run(*args, **kw)
        )
    layer = Layer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, selection = layer(torch.randn(9, 2, 16))
    (out.square().mean() + selection.loss).backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    assert all(value.grad.isfinite().all() for value in layer.parameters())


def expanded(pools, ends, pool, chosen):
    """Ids of one row in Python's integers: chosen pools whole, then the incomplete one, then -1."""
    ids = [key for number in pools for key in range(number * pool, number * pool + pool)]
    ids += range(ends // pool * pool, ends)
    return set(ids), len(ids), chosen * pool + pool - 1


@pytest.mark.parametrize("rows", [23, 9, 3])
def test_pools_are_chosen_whole_and_the_incomplete_tail_is_always_added(rows):
    keys, pool, topk = 23, 4, 8
    indexer = dsann.Indexer(6, 5, heads=2, channels=8, topk=topk, pool=pool, row_chunk=8).double()
    hidden, latent = make.normal(keys, 1, 6), make.normal(keys, 1, 5, seed=1)
    pool_keys = pooled_key_of(indexer.key, hidden)
    q = indexer.query(latent).view(keys, 1, 2, 8)
    weights = indexer.head_weights(hidden) * (2 * 8) ** -0.5
    scores = formulas.index_scores(q, pool_keys, weights, True)[0]
    if rows < keys:
        # Rows are the last ones of the sequence: their queries alone, all keys.
        chosen = dsa.run_fused_qk_topk(
            None, q[-rows:], pool_keys, weights[-rows:], topk // pool,
            torch.zeros(rows, dtype=torch.int32), dsann.pool_ends(rows, keys, pool, q.device),
        )  # fmt: skip
        ids, length = dsann.expand_pools(chosen.indices, chosen.length, keys, pool, row_chunk=4)
    else:
        ids, length, _ = indexer(hidden, latent)
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    for row in range(rows):
        ends = keys - rows + row + 1
        visible = [number < ends // pool for number in range(keys // pool)]
        best = formulas.best_keys(scores[ends - 1].tolist(), visible, topk // pool)
        wanted, count, width = expanded(best, ends, pool, topk // pool)
        assert ids.shape[2] == width == indexer.width
        assert int(length[0, row]) == count
        assert set(ids[0, row, :count].tolist()) == wanted
        assert (ids[0, row, count:] == -1).all()


def test_the_width_of_512_pools_of_4_is_2051():
    assert dsann.Indexer(8, 8, heads=1, channels=8, topk=2048, pool=4).width == 2051


@pytest.mark.parametrize("rope", ["half_split", "interleaved"])
def test_the_indexer_selects_and_learns_as_the_operation_of_its_projections(rope):
    indexer = dsann.Indexer(6, 5, heads=2, channels=8, topk=3, rope=rope, row_chunk=4).double()
    hidden, latent = make.normal(9, 2, 6, grad=True), make.normal(9, 2, 5, seed=1, grad=True)
    angles = dsann.rope_angles(torch.arange(9), 4).double()
    query, key = make.normal(9, 2, 2, 6, seed=2, grad=True), make.normal(9, 2, 1, 6, seed=3, grad=True)
    selection = indexer(hidden, latent, angles, teacher=dsann.Teacher(query, key, 0.4, 0.5))
    q = dsann.rotate(indexer.query(latent.detach()).view(9, 2, 2, 8), angles, rope)
    k = dsann.rotate(key_of(indexer.key, hidden.detach()), angles, rope)
    weights = indexer.head_weights(hidden.detach()) * (2 * 8) ** -0.5
    wanted = dsa.run_fused_qk_topk_with_loss(
        None, q, k, weights, 3, None, None, None, query.detach(), key.detach(), 0.4, 0.5
    )
    assert torch.equal(selection.indices, wanted.indices)
    parameters = list(indexer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(selection.loss, parameters, retain_graph=True),
        torch.autograd.grad(wanted.loss, parameters), rtol=1e-10, atol=1e-12,
    )  # fmt: skip
    selection.loss.backward()
    for tensor in (hidden, latent, query, key):
        assert tensor.grad is None, "the indexer steers neither the model nor its teacher"


def test_the_absorbed_core_equals_unabsorbed_attention():
    heads, nope, rope, latent, v_head, scale = 3, 4, 2, 5, 6, (4 + 2) ** -0.5
    core = dsann.AbsorbedSparseAttention(heads, nope, latent, v_head, softmax_scale=scale).double()
    query_nope, query_rope = make.normal(7, 2, heads, nope), make.normal(7, 2, heads, rope, seed=1)
    compressed, key_rope = make.normal(7, 2, latent, seed=2), make.normal(7, 2, rope, seed=3)
    chosen = dsann.Selection(make.ids(2, 7, 4, 7, seed=4), torch.full((2, 7), 4))
    out, used = core(query_nope, query_rope, compressed, key_rope, shared=chosen)
    assert used is chosen
    key = torch.cat(
        [torch.einsum("sbc,hcn->sbhn", compressed, core.key_up.weight), key_rope[:, :, None].expand(-1, -1, heads, -1)],
        dim=-1,
    )  # fmt: skip
    value = torch.einsum("sbc,hvc->sbhv", compressed, core.value_up.weight)
    counts = formulas.naming_counts(chosen.indices, chosen.length, 7)
    wanted, _ = formulas.grouped(torch.cat([query_nope, query_rope], -1), key, value, counts, scale)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


def test_a_layer_given_a_selection_runs_no_indexer():
    layer = Layer().double()
    x = make.normal(9, 2, 16, grad=True)
    _, selection = layer(x)
    dsa.reset_stats()
    layer(x, selection.shared())
    assert set(dsa.stats().ran("indexer_topk")) == set()
    assert selection.shared().loss is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
@pytest.mark.parametrize("layer", [{"rope": "interleaved"}, {"pool": 2}], ids=["rope", "pool"])
def test_a_layer_of_the_modules_compiles_to_one_graph_for_every_length(layer):
    torch._dynamo.reset()
    model = Layer(**layer).double()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def total(call, x):
        out, selection = call(x)
        return out.square().sum() + (0 if selection.loss is None else selection.loss)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    parameters = list(model.parameters())
    for rows in (12, 21):
        x = make.normal(rows, 2, 16)
        torch._dynamo.mark_dynamic(x, 0)
        expected = torch.autograd.grad(total(model, x), parameters, allow_unused=True)
        got = torch.autograd.grad(total(compiled, x), parameters, allow_unused=True)
        for mine, other in zip(got, expected, strict=True):
            # allow_unused: a pooled indexer has no loss, hence no gradient
            assert (mine is None) == (other is None)
            if mine is not None:
                torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: dsann.Indexer(8, 8, heads=1, channels=8, topk=6, pool=4), "not a multiple"),
        (lambda: dsann.Indexer(8, 8, heads=1, channels=8, topk=8, pool=4, rope="interleaved"), "no position"),
        (lambda: dsann.Indexer(8, 8, heads=0, channels=8, topk=8), "Indexer: heads: got 0"),
        (lambda: dsann.Indexer(8, 8, heads=1, channels=8, topk=0), "Indexer: topk: got 0"),
        (lambda: dsann.Indexer(8, 8, heads=1, channels=8, topk=8, pool=0), "Indexer: pool: got 0"),
        (lambda: dsann.Indexer(8, 8, heads=1, channels=8, topk=8, row_chunk=0), "row_chunk: got 0"),
        (lambda: dsann.Indexer(8, 8, heads=1, channels=8, topk=8, rope="interleave"), "mean 'interleaved'"),
        (lambda: dsann.IndexKey(8, 8, rope="neox"), "rope: got 'neox', expected 'half_split' or"),
        (lambda: dsann.IndexKey(8, 2.0), "IndexKey: channels: got 2.0"),
        (lambda: dsann.PooledIndexKey(8, 8, 0), "pool: got 0"),
        (lambda: dsann.PooledIndexKey(8, 8, 4, row_chunk=0), "row_chunk: got 0"),
        (lambda: dsann.HeadLinear(0, 8, 8), "HeadLinear: heads: got 0"),
        (lambda: dsann.AbsorbedSparseAttention(1, 4, 0, 4, softmax_scale=1.0), "latent: got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_a_config_error(build, error):
    with pytest.raises(ConfigError, match=error):
        build()


def test_what_a_module_cannot_mean_is_an_invalid_input():
    pooled = dsann.Indexer(8, 8, heads=1, channels=8, topk=8, pool=4)
    x, bounds = torch.randn(5, 1, 8), torch.zeros(5, dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="neither bounds nor"):
        pooled(x, x, starts=bounds, ends=bounds)
    with pytest.raises(InvalidInputError, match="rope is 'half_split', angles None"):
        dsann.Indexer(8, 8, heads=1, channels=8, topk=4, rope="half_split")(x, x)
    core = dsann.AbsorbedSparseAttention(1, 4, 8, 4, softmax_scale=0.5)
    with pytest.raises(InvalidInputError, match="no selection to share"):
        core(torch.randn(5, 1, 1, 4), None, x, None)
    core = dsann.AbsorbedSparseAttention(
        1, 4, 8, 4, softmax_scale=0.5, indexer=dsann.Indexer(8, 8, heads=1, channels=8, topk=4)
    )
    with pytest.raises(InvalidInputError, match=r"loss_coeff: got -0.1"):
        core(torch.randn(5, 1, 1, 4), None, x, None, hidden=x, query_latent=x, loss_coeff=-0.1)
    with pytest.raises(InvalidInputError, match="rope: got 'neox'"):
        dsann.rotate(x, torch.zeros(5, 4), "neox")


@pytest.mark.parametrize("size", ["pool", "row_chunk"])
def test_pools_are_not_expanded_in_chunks_of_nothing(size):
    """A chunk below one row would fill no row of the result, which is memory that nobody wrote."""
    pools, counts = torch.zeros(1, 5, 2, dtype=torch.int32), torch.ones(1, 5, dtype=torch.int32)
    with pytest.raises(InvalidInputError, match=f"expand_pools: {size}: got 0"):
        dsann.expand_pools(pools, counts, 20, **{"pool": 4, "row_chunk": 4, size: 0})


def test_a_sequence_of_no_rows_goes_through():
    layer = Layer(pool=2).double()
    value, gradients, _ = step(lambda x: layer(x)[0].sum(), [make.normal(0, 2, 16, grad=True)])
    assert float(value) == 0
    assert gradients[0].shape == (0, 2, 16)
