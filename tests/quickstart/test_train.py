"""Training and sampling: the losses fall, the seed decides, and nothing outside changes."""

from __future__ import annotations

import pytest
import torch
from quickstart import small

from dsa_dispatch._quickstart.generate import generate
from dsa_dispatch._quickstart.train import build_model, held_out_loss, mean_loss, train

CPU = torch.device("cpu")
KERNELS = {"dsa_kernel_backend": "none"}


def built(recipe=small.RECIPE):
    return build_model(small.SHAPE, recipe, 300, KERNELS, CPU)


def test_both_losses_fall_and_so_does_the_held_out_one():
    recipe = small.RECIPE.model_copy(update={"steps": 60})
    corpus, model = small.corpus(), built(recipe)
    before = held_out_loss(model, corpus, recipe)
    records = list(train(model, corpus, recipe, recipe.steps))
    assert [record.step for record in records] == list(range(1, 61))
    first, last = mean_loss(records[:5]), mean_loss(records[-5:])
    # One repeated sentence: far more is learned than these bounds ask for.
    assert last[0] < 0.5 * first[0]
    assert last[1] < 0.7 * first[1]
    assert held_out_loss(model, corpus, recipe) < 0.5 * before


def test_dense_loss_trains_as_well():
    recipe = small.RECIPE.model_copy(update={"steps": 30, "sparse_loss": False})
    records = list(train(built(recipe), small.corpus(), recipe, recipe.steps))
    assert mean_loss(records[-5:])[1] < 0.8 * mean_loss(records[:5])[1]


def test_the_seed_decides_everything():
    def losses(seed):
        recipe = small.RECIPE.model_copy(update={"seed": seed})
        return [(r.loss, r.indexer_loss) for r in train(built(recipe), small.corpus(), recipe, 3)]

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


def test_the_indexer_coefficient_is_not_part_of_the_reported_loss():
    first = [
        next(iter(train(built(recipe), small.corpus(), recipe, 1))).indexer_loss
        for recipe in (small.RECIPE, small.RECIPE.model_copy(update={"indexer_loss_coeff": 8.0}))
    ]
    assert first[0] == pytest.approx(first[1], rel=1e-5)  # the same fp32 value, scaled up and down again


def test_torchs_generator_stays_as_it_was():
    state = torch.get_rng_state()
    model = built()
    list(train(model, small.corpus(), small.RECIPE, 1))
    generate(model, torch.arange(4), 2, 0.7, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_learning_rate_warms_up_and_comes_down():
    recipe = small.RECIPE.model_copy(update={"warmup_steps": 3})
    rates = [record.learning_rate for record in train(built(recipe), small.corpus(), recipe, 8)]
    assert rates[:4] == pytest.approx([recipe.learning_rate * part for part in (1 / 4, 2 / 4, 3 / 4, 1)])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.1 * recipe.learning_rate <= rates[-1] < 0.3 * recipe.learning_rate


def test_measuring_and_sampling_leave_the_model_in_training():
    model = built().train()
    held_out_loss(model, small.corpus(), small.RECIPE)
    generate(model, torch.arange(4), 2, 0.7, 0)
    assert model.training
    assert all(value.grad is None for value in model.parameters())


def test_a_trained_model_continues_the_sentence_it_saw():
    recipe = small.RECIPE.model_copy(update={"steps": 60})
    corpus, model = small.corpus(), built(recipe)
    list(train(model, corpus, recipe, recipe.steps))
    prompt = corpus.vocabulary.encode("\nthe cat sat on")
    text = corpus.vocabulary.decode(generate(model, prompt, 8, 0, 0))
    assert text.startswith(" the ")


def test_sampling_reaches_beyond_the_context():
    shape = small.SHAPE.model_copy(update={"context": 8})
    model = build_model(shape, small.RECIPE, 300, KERNELS, CPU)
    drawn = generate(model, torch.arange(6), 7, 0.7, 0)
    assert drawn.shape == (7,)
    assert torch.equal(drawn, generate(model, torch.arange(6), 7, 0.7, 0)), "the seed decides"
    assert not torch.equal(drawn, generate(model, torch.arange(6), 7, 0.7, 1))
