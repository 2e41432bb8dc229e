"""Faults that show in one type, at one size, in one layout or on one path alone: the check that looks there fails."""

from __future__ import annotations

import contextlib

import pytest
import torch
from conformance import faults
from conformance.candidates import HEADS, KERNELS, run_check

from dsa_backends.torch_dense.spec import SPEC
from dsa_dispatch import Decline, DeclineCode, Heads, IndexWidth
from dsa_dispatch._registry.availability import resolve_reference
from dsa_dispatch.testing import ConformanceError, FakeBackend, conformance_checks, isolated_registry
from dsa_dispatch.testing.judge import NotHere

STAGES_WITH_IDS = ("attention_forward", "attention_backward", "gqa_forward", "gqa_backward")
EVERY_STAGE = (*STAGES_WITH_IDS, "indexer_target", "indexer_loss")


def right(stage):
    return resolve_reference(SPEC.stages[stage].function)


def names_of(stage):
    """The positional arguments of a stage."""
    return {
        "indexer_target": ("q", "k"),
        "indexer_loss": ("q", "k", "w"),
        "attention_forward": ("q", "k", "indices", "length"),
        "attention_backward": ("q", "k", "indices", "length", "out", "lse", "dout"),
        "gqa_forward": ("q", "k", "v", "indices", "length"),
        "gqa_backward": ("q", "k", "v", "indices", "length", "out", "lse", "dout"),
    }[stage]


def changed(stage, change, of=None):
    """``of``, by default the right stage on arguments that ``change`` may replace; it gets them all by name."""

    def kernel(*args, **rest):
        names = names_of(stage)
        given = {**dict(zip(names, args, strict=True)), **rest}
        given = {**given, **(change(given) or {})}
        return (of or right(stage))(*(given[name] for name in names), **{name: given[name] for name in rest})

    return kernel


def spoilt(stage, when):
    """The right stage, but for calls in which ``when`` holds: its queries are off by a tenth there."""

    def change(given):
        return {"q": given["q"] * 1.1} if when(given) else None

    return changed(stage, change)


def width(given):
    return 0 if given["indices"] is None else given["indices"].shape[1]


def fails(stage, kernel, check, words, **declared):
    with pytest.raises(ConformanceError) as caught:
        run_check(stage, kernel, check, **declared)
    assert words in str(caught.value)


def passes(stage, check, **declared):
    run_check(stage, right(stage), check, **declared)


IN_ONE_TYPE = [
    ("attention_forward", "reads id -1", "holes"),
    ("attention_forward", "multiplies what a hole holds by zero", "holes"),
    ("attention_forward", "ignores topk_length", "length"),
    ("attention_forward", "NaN for an empty row", "empty rows"),
    ("attention_forward", "counts a duplicate once", "duplicates"),
    ("attention_forward", "base-2 lse", "lse"),
    ("attention_forward", "writes past a padded head", "guard rows"),
    ("attention_forward", "mutates its input", "inputs unmodified"),
    ("attention_forward", "keeps an earlier result", "earlier calls"),
    ("attention_forward", "lse of packed queries", "strided rows"),
    ("attention_forward", "lse of the row before in a slice", "chunks and batch"),
    ("attention_forward", "no maximum subtracted", "large scores"),
    ("attention_backward", "overwrites dkv", "accumulators"),
    ("attention_backward", "computes dq always", "unneeded gradients"),
    ("indexer_target", "causal without first_row", "dense form, causal"),
    ("indexer_loss", "divides by a zero mass", "rows without mass, sparse"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("stage", "fault", "check"), IN_ONE_TYPE, ids=[fault for _, fault, _ in IN_ONE_TYPE])
def test_a_fault_in_one_type_alone_is_found_by_the_check_of_that_type(stage, fault, check, dtype):
    kinds = {"wrong": KERNELS[stage](fault), "right": KERNELS[stage]("")}

    def kernel(q, *args, **rest):
        return kinds["wrong" if q.dtype == getattr(torch, dtype) else "right"](q, *args, **rest)

    declared = {"heads": HEADS, "deterministic": False}
    run_check(stage, kernel, check, **declared)
    fails(stage, kernel, f"{check} {dtype}", "candidate", **declared)


AT_ONE_SIZE = [
    ("one row", lambda given: len(given["q"]) == 1, "size, one row"),
    ("one key", lambda given: given["rows"].keys == 1, "size, one key"),
    ("fewer keys", lambda given: width(given) > given["rows"].keys > 1, "size, fewer keys than slots"),
    ("256 rows", lambda given: len(given["q"]) > 256, "size, rows 300"),
    ("65536 keys", lambda given: given["rows"].keys > 65536, "size, keys 65577"),
    ("4096 slots", lambda given: width(given) > 4096, "beyond a tile, width 4099"),
    ("64 heads", lambda given: given["q"].shape[1] == 64, "beyond a tile, heads 64"),
    ("128 heads", lambda given: given["q"].shape[1] == 128, "beyond a tile, heads 128"),
]


@pytest.mark.parametrize("stage", EVERY_STAGE)
@pytest.mark.parametrize(
    ("when", "check"), [case[1:] for case in AT_ONE_SIZE], ids=[c[0] for c in AT_ONE_SIZE]
)
def test_a_fault_at_one_size_alone_is_found(stage, when, check):
    passes(stage, check)
    where = check.partition(", ")[2]
    if check == "size, one key":
        # The softmax of one key is 1 whatever its score is, and gradients through it are 0.
        return fails(stage, _nothing_for_one_key(stage), check, where)
    return fails(stage, spoilt(stage, when), check, where)


def _nothing_for_one_key(stage):
    def kernel(*args, rows, **rest):
        results = right(stage)(*args, rows=rows, **rest)
        if rows.keys == 1:
            sums = [rest[name] for name in ("dk", "dv", "dkv") if rest.get(name) is not None]
            for tensor in (*sums, *(results if isinstance(results, tuple) else (results,))):
                if tensor is not None:
                    tensor += 1
        return results

    return kernel


@pytest.mark.parametrize("stage", STAGES_WITH_IDS)
def test_ids_cut_to_16_bits_are_found(stage):
    def cut(given):
        ids = given["indices"]
        return {"indices": torch.where(ids > 0xFFFF, ids & 0xFFFF, ids)}

    fails(stage, changed(stage, cut), "size, keys 65577", "keys 65577")


@pytest.mark.parametrize("channels", ["512/512", "576/512"])
@pytest.mark.parametrize("stage", ["attention_forward", "attention_backward"])
def test_a_fault_at_the_channels_of_a_published_model_is_found(stage, channels):
    qk = int(channels[:3])
    check = f"beyond a tile, channels {channels}"
    fails(stage, spoilt(stage, lambda given: given["q"].shape[2] == qk), check, channels)


@pytest.mark.parametrize("stage", ["gqa_forward", "gqa_backward"])
def test_a_fault_with_eight_key_heads_is_found(stage):
    kernel = spoilt(stage, lambda given: given["k"].shape[1] == 8)
    fails(stage, kernel, "beyond a tile, key heads 8", "key heads 8")


@pytest.mark.parametrize("stage", ["indexer_target", "indexer_loss"])
def test_a_fault_beyond_2048_columns_of_the_dense_form_is_found(stage):
    kernel = spoilt(stage, lambda given: given["indices"] is None and given["rows"].keys > 2048)
    fails(stage, kernel, "beyond a tile, columns 2100", "dense form")


@pytest.mark.parametrize("stage", EVERY_STAGE)
def test_a_fault_at_a_tile_in_one_type_alone_is_found(stage):
    kernel = spoilt(stage, lambda given: given["q"].dtype == torch.bfloat16 and given["q"].shape[1] > 16)
    fails(stage, kernel, f"beyond a tile, heads {18 if stage.startswith('gqa') else 17}", "bfloat16")


def packed(tensor):
    """What reading with the strides of a contiguous tensor would give."""
    return tensor.as_strided(tensor.shape, tensor.contiguous().stride(), tensor.storage_offset())


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        *(("attention_backward", name) for name in ("out", "lse", "dout")),
        *(("indexer_loss", name) for name in ("mass", "w")),
        ("gqa_backward", "dout"),
    ],
)
def test_strides_that_are_taken_for_those_of_a_packed_tensor_are_found(stage, name):
    # Not every kernel looks at the out and the lse that it is given; this one does.
    of = faults.backward() if stage == "attention_backward" else right(stage)
    kernel = changed(stage, lambda given: {name: packed(given[name])}, of)
    fails(stage, kernel, "strided rows", "strided in their first dimension")


def without_a_key(given):
    slots = torch.arange(width(given))
    valid = (given["indices"] >= 0) & (slots < given["length"][:, None])
    return ~valid.any(1)


def target_with_lse(fault):
    """A teacher that takes the lse it is given, with one fault; without an lse, the right one."""
    stage = "indexer_target"

    def kernel(query, key, *, indices, length, starts, ends, lse, scale, rows, options):
        rest = {"scale": scale, "rows": rows, "options": options, "lse": lse}
        if lse is None:
            return right(stage)(query, key, indices=indices, length=length, starts=starts, ends=ends, **rest)
        if fault == "ignores length" and indices is not None:
            length = torch.full_like(length, indices.shape[1])
        if fault == "dense from key 0" and indices is None:
            starts = starts // rows.keys * rows.keys
        first = (torch.arange(len(query)) + rows.first_row) // rows.rows * rows.keys
        ids = first[:, None] + torch.arange(rows.keys) if indices is None else indices.long()
        if indices is None:
            valid = (ids >= starts[:, None]) & (ids < ends[:, None])
        else:
            valid = (ids >= 0) & (ids < len(key)) & (torch.arange(ids.shape[1]) < length[:, None])
        keys = torch.where(valid[..., None], key[torch.where(valid, ids, 0)], 0.0).to(lse.dtype)
        score = torch.einsum("thd,twd->thw", query.to(lse.dtype), keys) * scale
        score = torch.where(valid[:, None], score, -torch.inf)
        mass = (score - lse[..., None]).exp()
        # -inf - -inf is NaN where a row has no key.
        return (mass if fault == "NaN for an empty row" else mass.nan_to_num(0.0)).sum(1)

    return kernel


def test_a_teacher_that_takes_the_lse_passes():
    for check in ("lse given", "lse given bfloat16", "strided rows"):
        run_check("indexer_target", target_with_lse(""), check)


@pytest.mark.parametrize(
    ("fault", "losses"),
    [
        ("NaN for an empty row", {"sparse", "dense"}),
        ("NaN for an empty row", {"dense"}),
        ("ignores length", {"sparse"}),
        ("dense from key 0", {"dense"}),
    ],
)
def test_a_fault_of_the_path_with_a_given_lse_is_found(fault, losses):
    check, words = "lse given", "values with the lse of the attention given"
    fails("indexer_target", target_with_lse(fault), check, words, losses=frozenset(losses))


def mutating(stage, name, when=lambda given: True):
    def change(given):
        if given.get(name) is not None and when(given):
            given[name].add_(1)

    return changed(stage, change)


@pytest.mark.parametrize(
    ("stage", "name", "form"),
    [
        ("attention_forward", "indices", "keys named twice"),
        ("attention_backward", "length", "keys named twice"),
        ("attention_backward", "lse", "keys named twice"),
        ("gqa_backward", "out", "keys named twice"),
        ("indexer_target", "starts", "keys named twice"),
        ("indexer_loss", "mass", "keys named twice"),
    ],
)
def test_any_input_that_is_changed_is_named(stage, name, form):
    fails(stage, mutating(stage, name), "inputs unmodified", f"it changed {name} ({form})")


PATHS = {
    "dense form, ranges": lambda given: given["indices"] is None and given["rows"].bounds == "ranges",
    "dense form, causal": lambda given: given["indices"] is None and given["rows"].bounds == "causal",
    "deterministic": lambda given: given["options"].deterministic,
    "rows without a key": lambda given: given["indices"] is not None and without_a_key(given).any(),
}


@pytest.mark.parametrize("form", PATHS)
def test_an_input_that_is_changed_on_one_path_alone_is_found(form):
    kernel = mutating("indexer_target", "k", PATHS[form])
    fails("indexer_target", kernel, "inputs unmodified", f"it changed k ({form})")


@pytest.mark.parametrize("stage", EVERY_STAGE)
def test_a_random_state_that_is_moved_on_is_found(stage):
    def change(given):
        torch.rand(1)

    fails(stage, changed(stage, change), "inputs unmodified", "the random state of torch")


def scatters_through(wrong):
    """A backward that masks its gradients of keys, but adds a row's query through an id that is no key."""

    def kernel(q, kv, indices, length, *rest, dkv, **options):
        if dkv is not None:
            wrong(dkv, indices[(indices < -1) | (indices >= len(kv))].long())
        return right("attention_backward")(q, kv, indices, length, *rest, dkv=dkv, **options)

    return kernel


def _from_the_end(dkv, ids):
    for number in ids[(ids < 0) & (ids >= -len(dkv))].tolist():
        dkv[number] += 1


def _past_the_end(dkv, ids):
    rows = dkv.as_strided((len(dkv) + 2, dkv.shape[1]), dkv.stride(), dkv.storage_offset())
    for number in ids[(ids >= len(dkv)) & (ids < len(rows))].tolist():
        rows[number] += 1


@pytest.mark.parametrize(
    ("wrong", "words"), [(_from_the_end, "dkv: relative error"), (_past_the_end, "bytes past its end")]
)
def test_a_gradient_that_is_added_through_an_id_that_is_no_key_is_found(wrong, words):
    fails("attention_backward", scatters_through(wrong), "ids outside the keys", words)


def _ignores_holes(given):
    return {"indices": given["indices"].clamp(min=0)}


def _ignores_length(given):
    return {"length": torch.full_like(given["length"], width(given))}


@pytest.mark.parametrize(
    ("stage", "fault", "check"),
    [
        ("attention_forward", _ignores_holes, "deterministic float64, holes"),
        ("attention_forward", _ignores_length, "deterministic bfloat16, length"),
        ("attention_backward", _ignores_holes, "deterministic float64, empty rows"),
        ("indexer_loss", _ignores_length, "deterministic float64, length"),
    ],
)
def test_a_fault_of_the_deterministic_path_alone_is_found(stage, fault, check):
    kernel = changed(stage, lambda given: fault(given) if given["options"].deterministic else None)
    passes(stage, check)
    run_check(stage, kernel, check.partition(", ")[2])
    fails(stage, kernel, check, "candidate")


def test_accumulators_that_the_deterministic_path_overwrites_are_found():
    def kernel(*args, dkv, options, **rest):
        if options.deterministic and dkv is not None:
            dkv.zero_()
        return right("attention_backward")(*args, dkv=dkv, options=options, **rest)

    run_check("attention_backward", kernel, "accumulators")
    check = "deterministic float64, accumulators"
    fails("attention_backward", kernel, check, "dkv overwritten instead of added to")


def _filled(given):
    """The prefix form: a length is the only thing that says which slots are keys."""
    return {"indices": given["indices"].clamp(min=0)}


PREFIX = {
    "ignored": (lambda given: {**_filled(given), **_ignores_length(given)}, "id -1 read as key 0"),
    "one too many": (lambda given: {**_filled(given), "length": given["length"] + 1}, "length"),
    "one too few": (lambda given: {**_filled(given), "length": (given["length"] - 1).clamp(min=0)}, "length"),
    "0 is full": (
        lambda given: {
            **_filled(given),
            "length": torch.where(given["length"] == 0, width(given), given["length"]),
        },
        "This is the answer with",
    ),
}


@pytest.mark.parametrize("stage", STAGES_WITH_IDS)
def test_a_backend_of_the_prefix_form_that_looks_at_the_length_alone_passes(stage):
    for check in ("holes", "length", "empty rows", "deterministic float64, length"):
        run_check(stage, changed(stage, _filled), check, index_form="prefix")


@pytest.mark.parametrize("fault", PREFIX)
@pytest.mark.parametrize("stage", STAGES_WITH_IDS)
def test_a_wrong_length_in_the_prefix_form_is_found(stage, fault):
    change, words = PREFIX[fault]
    check = "empty rows" if fault == "0 is full" else "length"
    fails(stage, changed(stage, change), check, words, index_form="prefix")


def whole_groups(call):
    """A rule that the fields do not say: 16 heads and 64 slots at least."""
    if call.heads % 16 or call.width % 64:
        return Decline(
            DeclineCode.EXTRA_CHECK, "query.heads", str(call.heads), "multiples of 16, and of 64 slots"
        )
    return None


@pytest.mark.parametrize("stage", ["attention_forward", "attention_backward"])
def test_a_backend_behind_a_rule_is_only_asked_what_the_rule_accepts(stage):
    def asked(given):
        assert given["q"].shape[1] % 16 == 0
        assert width(given) % 64 == 0

    fake = FakeBackend("ruled", [stage], replace={stage: changed(stage, asked)}, extra_check=whole_groups)
    served = set()
    with isolated_registry(fake.spec, installed=True):
        for check in conformance_checks("ruled"):
            with contextlib.suppress(NotHere):
                check.run()
                served.add(check.name)
    assert {"holes", "length", "values bfloat16", "guard rows", "size, one row", "earlier calls"} <= served


def test_a_self_test_that_is_left_out_is_not_shown_as_passed():
    narrow = {"heads": Heads(values=frozenset({3})), "extra_check": whole_groups}
    fake = FakeBackend("ruled", ["attention_forward"], **narrow)
    with isolated_registry(fake.spec, installed=True):
        (check,) = [check for check in conformance_checks("ruled") if check.name == "self-test"]
        with pytest.raises(NotHere, match="self-test before a first use is left out"):
            check.run()


def test_what_a_backend_does_to_its_inputs_does_not_reach_what_it_is_judged_by():
    """Scaling queries in place once gave the right gradients, of queries that were scaled too."""

    def change(given):
        given["dout"].mul_(0.5)

    fails("attention_backward", changed("attention_backward", change), "values float64", "relative error")


def test_a_declared_maximum_that_can_be_run_is_run():
    declared = {"heads": Heads(maximum=512), "width": IndexWidth(maximum=6000), "max_rows": 9000}
    fake = FakeBackend("candidate", ["attention_forward"], **declared)
    with isolated_registry(fake.spec, installed=True):
        checks = {check.name: check for check in conformance_checks("candidate")}
        for name, count in (("heads 512", 512), ("width 6000", 6000), ("rows 9000", 9000)):
            fake.calls.clear()
            checks[f"accepts {name}"].run()
            assert [call for call in fake.calls if count in [size for shape in call[1] for size in shape]]
