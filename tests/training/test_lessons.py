"""Faults that others have shipped, L1 to L25: each has a test that would find it here.

``LESSONS`` says which; those that no other file states are below it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path

import pytest
import torch
from contract import make
from training.models import Layer, every_operation, operation_inputs, stages_run

import dsa_dispatch as dsa
from dsa_dispatch import Heads
from dsa_dispatch._dispatch.table import policy_of
from dsa_dispatch._policy.config import FIELD_NAMES, explicit_text
from dsa_dispatch._stages import STAGES
from dsa_dispatch.errors import NoBackendError
from dsa_dispatch.testing import FakeBackend, isolated_registry

pytestmark = pytest.mark.usefixtures("registry")
ROOT = Path(__file__).parents[2]

LESSONS = {
    "L1": ["training/test_lessons.py::test_chunks_of_a_key_that_is_no_leaf_and_alone_needs_gradients"],
    "L2": ["training/test_lessons.py::test_any_subset_of_inputs_may_need_gradients_in_chunks"],
    "L3": [
        "training/test_query_chunks.py::test_all_chunks_run_under_one_decision",
        "training/test_query_chunks.py::test_both_outcomes_are_in_the_stats_and_said_once",
        "contract/test_runtime_faults.py::test_a_decline_after_some_chunks_of_the_backward_leaves_nothing_counted_twice",
    ],
    "L4": ["training/test_lessons.py::test_a_layer_of_a_model_runs_through_the_dispatch"],
    "L5": ["training/test_lessons.py::test_nothing_reads_the_source_text_of_a_provider"],
    "L6": [
        "unit/test_decision.py::test_error_never_runs_another_backend",
        "unit/test_decision.py::test_next_warns_once_with_the_codes_when_the_named_one_declined",
    ],
    "L7": ["training/test_lessons.py::test_a_kernel_that_takes_a_call_as_it_stands_is_handed_it_unpadded"],
    "L8": [
        "training/test_lessons.py::test_every_setting_changes_the_policy",
        "unit/test_settings.py::test_a_variable_that_nothing_reads_is_an_error_at_first_use_and_at_refresh",
    ],
    "L9": [
        "contract/test_memory.py::test_attention",
        "backends/torch_dense/test_memory.py::test_the_peak_is_the_declared_scratch",
    ],
    "L10": [
        "backends/torch_dense/test_memory.py::test_nothing_of_rows_by_keys_by_heads_is_declared_for_the_dense_loss",
        "contract/test_memory.py::test_loss",
    ],
    "L11": ["contract/test_memory.py::test_selection", "contract/test_memory.py::test_loss"],
    "L12": ["contract/test_same_answer.py::test_gradients_of_some_inputs_are_those_of_all"],
    "L13": [
        "contract/test_accuracy.py::test_the_gradient_of_one_key_that_4096_queries_read",
        "training/test_query_chunks.py::test_key_gradients_of_all_chunks_accumulate_into_one_fp32_buffer",
    ],
    "L14": [
        "training/test_sharded_weights.py"
        "::test_every_parameter_is_read_after_the_gather_hook_of_its_own_module_and_once_per_pass",
    ],
    "L15": [
        "contract/test_topk_values.py::test_ties_go_to_the_lower_key",
        "contract/test_same_answer.py::test_selection_in_one_chunk_or_many",
    ],
    "L16": ["unit/test_explain.py::test_explain_and_what_ran_agree_always"],
    "L17": [
        "training/test_lessons.py::test_the_hooks_keep_their_names_and_order",
        "contract/test_runtime_faults.py::test_any_other_exception_propagates_with_a_note",
    ],
    "L18": ["training/test_lessons.py::test_every_stage_is_reached_from_the_public_operations"],
    "L19": [
        "training/test_checkpointing.py::test_eager_replay_selects_nothing_on_main_and_mtp_layers_alike",
        "training/test_checkpointing.py::test_compiled_replay_selects_nothing",
    ],
    "L20": [
        "training/test_index_sharing.py::test_micro_batches_in_flight_at_once_never_mix",
        "contract/test_same_answer.py::test_selection_with_and_without_gradients",
    ],
    "L21": ["training/test_lessons.py::test_a_loss_of_the_lse_alone_raises"],
    "L22": ["training/test_lessons.py::test_who_ran_and_who_would_are_named_per_stage"],
    "L23": [
        "contract/test_attention_values.py::test_holes_and_duplicates_count_as_the_formula_says",
        "contract/test_legalization.py::test_ids_are_cleaned_and_compacted_for_kernels_that_need_it",
    ],
    "L24": [
        "contract/test_attention_values.py"
        "::test_a_row_without_a_key_gives_zero_and_minus_infinity_and_no_gradient",
    ],
    "L25": [
        "training/test_lessons.py::test_a_scale_is_required_by_every_attention",
        "contract/test_legalization.py::test_512_channels_to_a_kernel_of_576",
    ],
}


def test_every_lesson_has_tests_that_exist():
    assert list(LESSONS) == [f"L{number}" for number in range(1, 26)]
    for lesson, names in LESSONS.items():
        for name in names:
            file, _, test = name.partition("::")
            tree = ast.parse((ROOT / "tests" / file).read_text())
            defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert test in defined, f"{lesson}: {name}"


def attend(query, key, chunk=3):
    ids = make.ids(1, 8, 4, 8, seed=3)
    return dsa.run_fused_absorbed_sparse_attention({"query_chunk": chunk}, query, key, ids, 0.5, 4)


def test_chunks_of_a_key_that_is_no_leaf_and_alone_needs_gradients():
    query, root = make.normal(8, 1, 2, 6, seed=1), make.normal(8, 1, 1, 6, seed=2, grad=True)
    (wanted,) = torch.autograd.grad(attend(query, root * 2, "off").sum(), root)
    out = attend(query, root * 2)
    assert out.requires_grad
    torch.testing.assert_close(torch.autograd.grad(out.sum(), root)[0], wanted, rtol=1e-12, atol=1e-12)
    for path in sorted((ROOT / "dsa_dispatch").rglob("_*/*.py")):
        assert "torch.utils.checkpoint" not in path.read_text(), f"{path.name}: chunks are made inside the op"


@pytest.mark.parametrize("need", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("recording", [True, False])
def test_any_subset_of_inputs_may_need_gradients_in_chunks(need, recording):
    inputs = [make.normal(8, 1, 2, 6, seed=1), make.normal(8, 1, 1, 6, seed=2)]
    for tensor, it in zip(inputs, need, strict=True):
        tensor.requires_grad_(it)
    with torch.set_grad_enabled(recording):
        out = attend(*inputs)
    assert out.requires_grad == (recording and any(need))
    if out.requires_grad:
        out.sum().backward()
        assert [tensor.grad is not None for tensor in inputs] == list(need)


def test_a_layer_of_a_model_runs_through_the_dispatch():
    layer, x = Layer().double(), make.normal(9, 2, 16, grad=True)
    dsa.reset_stats()
    out, selection = layer(x)
    (out.sum() + selection.loss).backward()
    assert stages_run() == {
        "indexer_topk": 1, "indexer_target": 1, "indexer_loss": 1, "attention_forward": 1, "attention_backward": 1,
    }  # fmt: skip


def test_nothing_reads_the_source_text_of_a_provider():
    sniffers = {"getsource", "getsourcelines", "getsourcefile", "findsource", "linecache"}
    for folder in ("dsa_dispatch", "backends"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            names = {
                getattr(node, "attr", getattr(node, "id", None))
                for node in ast.walk(ast.parse(path.read_text()))
            }
            assert not names & sniffers, path


def test_a_kernel_that_takes_a_call_as_it_stands_is_handed_it_unpadded():
    shapes = {}
    for native in (False, True):
        fake = FakeBackend(
            "fake", ["attention_forward"],
            heads=Heads(multiple_of=1 if native else 16, pad=not native),
        )  # fmt: skip
        with isolated_registry(fake.spec, installed=True), dsa.use_backend("fake"):
            shapes[native] = attend(make.normal(8, 1, 2, 6, seed=1), make.normal(8, 1, 1, 6, seed=2), 8)
        assert fake.calls[0][1][0] == ((8, 2, 6) if native else (8, 16, 6))
    torch.testing.assert_close(shapes[True], shapes[False], rtol=1e-12, atol=1e-12)


CHANGED = {
    "dsa_kernel_backend": "torch_dense", "dsa_kernel_fallback": "error", "deterministic": True,
    "memory_budget": 12345, "query_chunk": 7, "debug_checks": True,
}  # fmt: skip
"""A value of each setting that is not its default."""


def test_every_setting_changes_the_policy(registry):
    # profile has one value in this version; any other is an error, since it would have no effect.
    assert set(CHANGED) | {"profile"} == set(FIELD_NAMES)
    plain = policy_of(registry, "")
    for name, value in CHANGED.items():
        policy = policy_of(registry, explicit_text({name: value}))
        what = "named" if name == "dsa_kernel_backend" else name.removeprefix("dsa_kernel_")
        assert getattr(policy, what) != getattr(plain, what), name
    with pytest.raises(dsa.errors.ConfigError, match="profile"):
        explicit_text({"profile": "measured"})


MEGATRON = {
    "run_fused_qk_topk": (
        "config q k weights index_topk starts ends block_size use_relu use_local_indexer_varlen "
        "single_packed_thd_sequence local_packed_cp_rank local_packed_cp_query_start local_packed_cp_query_len "
        "packed_seq_params cp_size"
    ),
    "run_fused_qk_topk_with_loss": (
        "config q k weights index_topk starts ends block_size query key softmax_scale loss_coeff pg_collection "
        "query_valid_rows calculate_per_token_loss use_relu use_local_indexer_varlen single_packed_thd_sequence "
        "local_packed_cp_rank local_packed_cp_query_start local_packed_cp_query_len packed_seq_params cp_size "
        "sparse_loss"
    ),
    "run_fused_absorbed_sparse_attention": (
        "config query key topk_indices softmax_scale v_channels topk_length return_lse"
    ),
    "run_fused_gqa_sparse_attention": (
        "config query key value topk_indices softmax_scale topk_length return_lse"
    ),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_the_hooks_keep_their_names_and_order(name):
    operation = getattr(dsa, name)
    assert " ".join(inspect.signature(operation).parameters) == MEGATRON[name]
    with pytest.raises(TypeError, match="missing"):
        operation(None)


def test_every_stage_is_reached_from_the_public_operations():
    inputs = operation_inputs()
    dsa.reset_stats()
    every_operation(*inputs).backward()
    assert set(stages_run()) == set(STAGES)


def test_a_loss_of_the_lse_alone_raises():
    query, key = make.normal(8, 1, 2, 6, seed=1, grad=True), make.normal(8, 1, 1, 6, seed=2, grad=True)
    ids = make.ids(1, 8, 4, 8, seed=3)
    _, lse = dsa.run_fused_absorbed_sparse_attention(None, query, key, ids, 0.5, 4, return_lse=True)
    _, grouped = dsa.run_fused_gqa_sparse_attention(None, query, key, key, ids, 0.5, return_lse=True)
    for answer in (lse, grouped):
        assert not answer.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            answer.sum().backward()


def test_who_ran_and_who_would_are_named_per_stage():
    fakes = [FakeBackend("forwards", ["attention_forward"]), FakeBackend("backwards", ["attention_backward"])]
    with isolated_registry(*(fake.spec for fake in fakes), installed=True):
        query, key = make.normal(8, 1, 2, 6, grad=True), make.normal(8, 1, 1, 6, grad=True)
        ids = make.ids(1, 8, 4, 8)
        call = (None, query, key, ids, 0.5, 4)
        wanted = {"attention_forward": "forwards", "attention_backward": "backwards"}
        with dsa.use_backend(wanted, fallback="error"):
            assert dsa.explain("run_fused_absorbed_sparse_attention", *call).backends() == wanted
            dsa.run_fused_absorbed_sparse_attention(*call).sum().backward()
        assert {stage: set(dsa.stats().ran(stage)) for stage in wanted} == {
            stage: {backend} for stage, backend in wanted.items()
        }
        with dsa.use_backend("forwards", fallback="error"), pytest.raises(NoBackendError):
            dsa.run_fused_absorbed_sparse_attention(*call)


@pytest.mark.parametrize("name", sorted(set(MEGATRON) - {"run_fused_qk_topk"} | {"run_fused_dsa_attention"}))
def test_a_scale_is_required_by_every_attention(name):
    assert (
        inspect.signature(getattr(dsa, name)).parameters["softmax_scale"].default is inspect.Parameter.empty
    )
