"""The model: causal, its attention that of plain MLA, its indices values, its two losses apart."""

from __future__ import annotations

import math

import pytest
import torch
from quickstart import small

import dsa_dispatch as dsa
from dsa_dispatch._quickstart.attention import Kernels, SparseAttention
from dsa_dispatch._quickstart.model import next_token_loss
from dsa_dispatch._run_config import load_preset
from dsa_dispatch.errors import ConfigError, InvalidInputError
from dsa_dispatch.nn import rope_angles, rotate


def angles_of(rows, shape=small.SHAPE):
    return rope_angles(torch.arange(rows), shape.qk_rope)


ONE_SELECTION = small.SHAPE.model_copy(update={"computing_layers": (0,)})
WITHOUT_ROPE = small.SHAPE.model_copy(update={"qk_rope": 0, "rope": "none", "index_rope": "none"})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [small.SHAPE, WITHOUT_ROPE], ids=["rope", "nope"])
def test_a_later_token_changes_no_earlier_logit(shape, training):
    model = small.model(shape).train(training)
    before = small.tokens(20)
    after = before.clone()
    after[12] = (after[12] + 1) % 300
    first, second = model(before), model(after)
    assert torch.equal(first.logits[:12], second.logits[:12])
    assert not torch.equal(first.logits[12:], second.logits[12:])
    for one, other in zip(first.selections, second.selections, strict=True):
        assert torch.equal(one.indices[:, :12], other.indices[:, :12])


def test_a_sharing_layer_attends_with_the_very_tensors_of_its_source():
    first, second, third = small.model()(small.tokens(20)).selections
    assert second.indices is first.indices
    assert second.length is first.length
    assert third.indices is not first.indices
    assert first.indices.dtype == torch.int32
    assert first.indices.shape == (2, 20, 6)


def test_a_layer_without_an_indexer_holds_none_and_refuses_to_guess():
    layer = SparseAttention(small.SHAPE, computes=False, output_gain=1.0)
    assert not [name for name, _ in layer.named_parameters() if "indexer" in name]
    x = torch.randn(5, 1, small.SHAPE.hidden)
    with pytest.raises(InvalidInputError, match="no selection to share"):
        layer(x, angles_of(5), Kernels(), None)


def test_two_passes_side_by_side_share_nothing():
    model = small.model().eval()
    one, other = small.tokens(20, batch=1), (small.tokens(20, batch=1) + 7) % 300
    alone = [model(tokens).selections for tokens in (one, other)]
    assert not torch.equal(alone[0][0].indices, alone[1][0].indices)
    for mine, again in zip(alone[0], model(one).selections, strict=True):
        assert torch.equal(mine.indices, again.indices)


def test_the_indexer_learns_from_its_own_loss_only_and_nothing_else_does():
    model = small.model()
    tokens = small.tokens(20)
    output = model(tokens[:-1])
    assert len(output.indexer_losses) == 2, "one for each computing layer"
    indexer, language = list(model.indexer_parameters()), list(model.language_parameters())
    assert len(indexer) + len(language) == len(list(model.parameters()))

    next_token_loss(output.logits, tokens[1:]).backward(retain_graph=True)
    assert all(value.grad is None for value in indexer)
    assert all(value.grad is not None for value in language)

    model.zero_grad()
    torch.stack(output.indexer_losses).sum().backward()
    assert all(value.grad is not None and value.grad.any() for value in indexer)
    assert all(value.grad is None for value in language)


def test_the_loss_runs_in_training_only(registry):
    model = small.model()
    model.eval()(small.tokens(20))
    evaluated = {
        stage: dsa.stats().ran(stage) for stage in ("indexer_topk", "indexer_loss", "attention_forward")
    }
    assert evaluated == {
        "indexer_topk": {"torch_dense": 2},
        "indexer_loss": {},
        "attention_forward": {"torch_dense": 3},
    }
    model.train()(small.tokens(20))
    assert dsa.stats().ran("indexer_topk") == {"torch_dense": 4}
    assert dsa.stats().ran("indexer_loss") == {"torch_dense": 2}


@pytest.mark.parametrize("shape", [small.SHAPE, WITHOUT_ROPE], ids=["rope", "nope"])
def test_absorbed_attention_over_all_keys_is_multi_head_latent_attention(shape):
    shape = shape.model_copy(update={"index_topk": 16, "index_width": 16})
    torch.manual_seed(0)
    layer = SparseAttention(shape, computes=True, output_gain=1.0).double().eval()
    x = torch.randn(16, 2, shape.hidden, dtype=torch.float64)
    angle = angles_of(16, shape)
    kernels = Kernels(dsa.DSAConfig(dsa_kernel_backend="none"), dtype=torch.float64)
    with torch.no_grad():
        out, _ = layer(x, angle, kernels, None)
        expected = latent_attention(layer, x, angle)
    # The rotation is made in fp32, alike on both sides; the rest is fp64 in another order.
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def latent_attention(layer, x, angle):
    """Keys and values of every head written out, a dense causal softmax over them."""
    shape = layer.shape
    rows, batch = x.shape[:2]
    queries = layer.query_up(layer.query_norm(layer.query_down(x))).view(rows, batch, shape.heads, -1)
    latent, turning = layer.key_down(x).split([shape.kv_lora_rank, shape.qk_rope], dim=-1)
    if shape.rope != "none":
        turning = rotate(turning, angle, shape.rope)
    latent = layer.key_norm(latent)
    plain = torch.einsum("sbc,hcn->sbhn", latent, layer.core.key_up.weight)
    keys = torch.cat([plain, turning.unsqueeze(2).expand(-1, -1, shape.heads, -1)], dim=-1)
    values = torch.einsum("sbc,hvc->sbhv", latent, layer.core.value_up.weight)
    still, moving = queries.split([shape.qk_nope, shape.qk_rope], dim=-1)
    if shape.rope != "none":
        moving = rotate(moving, angle, shape.rope)
    queries = torch.cat([still, moving], dim=-1)
    scores = torch.einsum("qbhd,kbhd->bhqk", queries, keys) * shape.softmax_scale
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    return layer.output(torch.einsum("bhqk,kbhv->qbhv", weights, values).flatten(2))


def test_bf16_kernels_train_over_fp32_weights():
    model = small.model(dtype=torch.bfloat16)
    tokens = small.tokens(20)
    with model.precision():
        output = model(tokens[:-1])
        loss = next_token_loss(output.logits, tokens[1:]) + torch.stack(output.indexer_losses).sum()
    loss.backward()
    assert loss.dtype == torch.float32
    for name, value in model.named_parameters():
        assert value.grad is not None, name
        assert value.grad.isfinite().all(), name
        assert value.grad.dtype == torch.float32, name
    reference = small.model()(tokens[:-1])
    # Scores in bf16 may rank two keys the other way round; such a row rightly has another answer.
    alike = torch.stack(
        [
            (mine.indices.sort(-1).values == other.indices.sort(-1).values).all(-1).T
            for mine, other in zip(output.selections, reference.selections, strict=True)
        ]
    ).all(0)
    assert alike.float().mean() > 0.9
    # bf16 keeps 8 bits: errors of the order of 2**-8 of logits of the order of 1, over three layers
    torch.testing.assert_close(
        output.logits.float()[alike], reference.logits[alike], rtol=0, atol=3 * 3 * 2**-8
    )


@pytest.mark.parametrize("name", ["glm-5.2", "glm-5.3-flash"])
def test_a_large_models_shape_is_refused_with_what_to_run_instead(name):
    with pytest.raises(ConfigError, match=r"needs model\.ffn.*run the preset 'quickstart'"):
        small.model(load_preset(name).model)


def test_one_selection_may_serve_all_layers():
    output = small.model(ONE_SELECTION)(small.tokens(12))
    assert len(output.indexer_losses) == 1
    assert all(entry.indices is output.selections[0].indices for entry in output.selections)
