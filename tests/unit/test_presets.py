"""Presets against the published sizes, and every message that a wrong configuration file provokes."""

from __future__ import annotations

import math
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import dsa_dispatch as dsa
from dsa_dispatch._run_config import (
    files,
    load_preset,
    parse_config,
    preset_names,
    read_config,
)
from dsa_dispatch._run_config.shape import ATTENTION, TOPK, TOPK_WITH_LOSS
from dsa_dispatch.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
YARN = (0.1 * math.log(40) + 1) ** 2
"""DeepSeek's factor for contexts beyond 4096: factor 40, mscale 1."""


@dataclass(frozen=True)
class Facts:
    """A row of the published table."""

    layers: int
    dsa_layers: int
    computing: int
    hidden: int
    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope: int
    qk_rope: int
    v_head: int
    qk_width: int
    v_width: int
    index_heads: int
    index_dim: int
    index_topk: int
    index_width: int
    index_rope: str
    context: int


TABLE = {
    "deepseek-v3.2": Facts(
        61, 61, 61, 7168, 128, 1536, 512, 128, 64, 128, 576, 512, 64, 128, 2048, 2048, "half_split", 163840
    ),
    "glm-5": Facts(
        78, 78, 78, 6144, 64, 2048, 512, 192, 64, 256, 576, 512, 32, 128, 2048, 2048, "interleaved", 202752
    ),
    "glm-5.2": Facts(
        78, 78, 21, 6144, 64, 2048, 512, 192, 64, 256, 576, 512, 32, 128, 2048, 2048, "interleaved", 1048576
    ),
    "glm-5.3-flash": Facts(
        45, 11, 11, 4096, 64, 1536, 512, 256, 0, 256, 512, 512, 32, 128, 2048, 2051, "none", 4096
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_has_the_published_sizes(name):
    shape = load_preset(name).model
    found = Facts(
        shape.layers,
        len(shape.dsa_layers),
        len(shape.computing_layers),
        shape.hidden,
        shape.heads,
        shape.q_lora_rank,
        shape.kv_lora_rank,
        shape.qk_nope,
        shape.qk_rope,
        shape.v_head,
        shape.qk_width,
        shape.v_width,
        shape.index_heads,
        shape.index_dim,
        shape.index_topk,
        shape.index_width,
        shape.index_rope,
        shape.context,
    )
    assert astuple(found) == astuple(TABLE[name])


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("deepseek-v3.2", 192**-0.5 * YARN),
        ("glm-5", 1 / 16),
        ("glm-5.2", 1 / 16),
        ("glm-5.3-flash", 1 / 16),
        ("quickstart", 48**-0.5),
    ],
)
def test_the_softmax_scale_follows_the_unabsorbed_head_never_the_absorbed_width(name, scale):
    shape = load_preset(name).model
    assert shape.softmax_scale == pytest.approx(scale, rel=1e-15)  # both are doubles: one rounding apart
    assert shape.softmax_scale != pytest.approx(shape.qk_width**-0.5)


def test_glm_5_2_writes_out_the_layers_that_its_rule_gives():
    written = yaml.safe_load((CONFIGS / "glm-5.2.yaml").read_text())["model"]["computing_layers"]
    assert isinstance(written, list), "an explicit list: sources read the rule differently"
    assert tuple(written) == (0, 1, 2, *range(6, 75, 4))
    assert written == [layer for layer in range(78) if max(layer - 3 + 1, 0) % 4 == 0]
    shape = load_preset("glm-5.2").model
    assert len(shape.computing_layers) == 21
    assert len(shape.sharing_layers) == 57
    assert [shape.index_source(layer) for layer in (0, 2, 5, 6, 9, 77)] == [0, 2, 2, 6, 6, 74]


def test_glm_5_3_flash_has_sparse_attention_in_every_fourth_layer_and_selects_pools():
    shape = load_preset("glm-5.3-flash").model
    assert shape.dsa_layers == tuple(range(3, 45, 4))
    assert (shape.index_kpool, shape.index_tail) == (4, 3)
    pools = shape.call(TOPK, rows=8192)
    assert (pools.keys, pools.width, pools.bounds) == (2048, 512, "ranges")
    attention = shape.call(ATTENTION, rows=8192)
    assert (attention.keys, attention.width, attention.bounds) == (8192, 2051, "causal")
    with pytest.raises(ConfigError, match="chooses pools of keys, so no loss over keys fits"):
        shape.call(TOPK_WITH_LOSS, rows=8192)
    with pytest.raises(ConfigError, match="layer 4 has no sparse attention; layers with it: 3, 7, 11"):
        shape.index_source(4)


@pytest.mark.parametrize(("name", "heads"), [("deepseek-v3.2", 128), ("glm-5.2", 64), ("glm-5.3-flash", 64)])
def test_heads_are_divided_over_tensor_parallel_ranks_and_the_indexers_are_not(name, heads):
    shape = load_preset(name).model
    assert [shape.heads_per_rank(size) for size in (1, 2, 4, 8, 16)] == [heads // 2**i for i in range(5)]
    call = shape.call(TOPK, rows=64, tensor_parallel=8)
    assert (call.heads, call.index_heads) == (heads // 8, shape.index_heads)
    with pytest.raises(
        ConfigError, match=f"tensor parallel 3 does not divide {heads} heads; sizes that do: 1, 2, 4"
    ):
        shape.heads_per_rank(3)


@pytest.mark.parametrize("name", [*TABLE, "quickstart"])
@pytest.mark.parametrize("training", [True, False])
def test_explain_answers_for_every_call_of_a_preset(name, training, registry):
    shape = load_preset(name).model
    for operation in shape.operations:
        call = shape.call(operation, rows=4096, tensor_parallel=2, training=training, device="cpu")
        decision = dsa.explain(operation, {"dsa_kernel_backend": "none"}, call=call)
        assert decision.served, str(decision)
        assert ("attention_backward" in decision.backends()) == (training and operation == ATTENTION)


@pytest.mark.parametrize("name", TABLE)
def test_a_model_preset_tells_its_source_and_its_traps_and_has_no_training(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    head = text[: text.index("description:")]
    assert "Sizes: " in head
    assert "# Traps:" in head
    assert load_preset(name).training is None


def test_the_quickstart_has_a_layer_that_shares_and_a_selection_that_leaves_keys_out():
    config = load_preset("quickstart")
    assert config.training is not None
    assert config.model.sharing_layers
    assert config.model.index_width * 2 < config.training.sequence


def test_every_shipped_file_is_a_preset_and_names_are_case_blind():
    assert preset_names() == tuple(sorted(path.stem for path in CONFIGS.glob("*.yaml")))
    assert load_preset("GLM-5.2") == load_preset("glm-5.2")
    assert load_preset(CONFIGS / "glm-5.yaml") == load_preset("glm-5")
    assert load_preset(str(CONFIGS / "glm-5.yaml")) == load_preset("glm-5")


def test_an_unknown_preset_names_the_nearest_and_all_known():
    with pytest.raises(ConfigError) as caught:
        load_preset("glm5.2")
    message = str(caught.value)
    assert "configuration 'glm5.2' is neither a preset nor a file" in message
    assert "Did you mean 'glm-5.2'?" in message
    assert all(name in message for name in preset_names())


def test_a_missing_file_names_the_presets():
    with pytest.raises(ConfigError, match=r"'no/such\.yaml' does not exist.*deepseek-v3\.2, glm-5"):
        load_preset("no/such.yaml")


def test_a_file_without_a_suffix_is_found(tmp_path, monkeypatch):
    shutil.copy(CONFIGS / "glm-5.yaml", tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert load_preset("mine").model == load_preset("glm-5").model


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            {"mdl": 1},
            ["unknown key 'mdl'.", "Valid keys: name, description, model, training, kernels", "'model'?"],
        ),
        (
            {"model": {"hiden": 1}},
            ["unknown key 'hiden' in section 'model'", "q_lora_rank", "Did you mean 'hidden'?"],
        ),
        ({"training": {"stps": 1}}, ["unknown key 'stps' in section 'training'", "Did you mean 'steps'?"]),
        ({"model": {"hidden": None}}, ["model.hidden: got None; input should be a valid integer"]),
        ({"model": {"heads": "8"}}, ["model.heads: got '8'; input should be a valid integer"]),
        ({"model": {"heads": 0}}, ["model.heads: got 0; input should be greater than 0"]),
        (
            {"model": {"rope": "twisted"}},
            ["model.rope: got 'twisted'", "'interleaved', 'half_split' or 'none'"],
        ),
        ({"model": {"softmax_scale": float("nan")}}, ["model.softmax_scale: got nan", "finite"]),
        ({"kernels": 3}, ["kernels: got 3; input should be a valid dictionary"]),
        (
            {"training": {"vocabulary": 200}},
            ["training.vocabulary: got 200; input should be greater than 256"],
        ),
        ({"training": {"prompt_tokens": 999}}, ["training: prompt_tokens 999 exceed sequence 192"]),
        ({"model": {"context": 64}}, ["training.sequence 192 exceeds model.context 64"]),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_is_valid(change, parts):
    with pytest.raises(ConfigError) as caught:
        parse_config(changed("quickstart", change), where="mine.yaml")
    assert str(caught.value).startswith("mine.yaml: ")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"computing_layers": [1, 3]}, "layer 0 is the first with sparse attention and has nobody before it"),
        ({"computing_layers": [0, 3, 1]}, "computing_layers must ascend without repeats, got 0, 3, 1"),
        ({"computing_layers": [0, 9]}, "computing_layers names 9, outside dsa_layers"),
        ({"dsa_layers": [0, 9]}, "dsa_layers names 9, outside layers 0 to 3"),
        ({"dsa_layers": []}, "dsa_layers is empty; name at least one layer, or write 'all'"),
        ({"qk_rope": 0}, "rope 'interleaved' does not fit qk_rope 0"),
        ({"rope": "none"}, "rope 'none' does not fit qk_rope 16"),
        ({"rope": "none", "qk_rope": 0}, "a model without RoPE has index_rope 'none'"),
        ({"qk_rope": 15}, "qk_rope 15 is odd"),
        ({"index_dim": 8}, "index_dim 8 cannot hold the 16 rotated channels"),
        ({"index_kpool": 5}, "index_topk 48 is not a multiple of index_kpool 5"),
        ({"index_tail": 1, "index_width": 49}, "index_tail 1 must be below index_kpool 1"),
        ({"index_width": 51}, "index_width 51 is not index_topk 48"),
    ],
)
def test_sizes_that_contradict_each_other_are_told_apart(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(changed("quickstart", {"model": change}))


def test_a_misspelt_key_is_named_before_the_key_it_leaves_missing():
    data = changed("quickstart", {"training": {"stps": 1}})
    del data["training"]["steps"]
    with pytest.raises(ConfigError) as caught:
        parse_config(data, where="mine.yaml")
    first, second = str(caught.value).splitlines()
    assert "unknown key 'stps'" in first
    assert second == "mine.yaml: key 'training.steps' is missing"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "expected a mapping with the keys name, description, model"),
        ("model: {layers: 1\n", "is not valid YAML"),
        ("model: {}\nmodel: {}\n", "key 'model' is given twice"),
        ("model:\n  layers: 1\n  layers: 2\n", "key 'layers' is given twice"),
    ],
)
def test_a_file_that_cannot_be_meant_says_why(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(path)
    assert "mine.yaml" in str(caught.value)


def test_a_file_that_is_no_text_says_so(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(path)


def test_the_kernels_section_is_kept_as_written():
    kernels = {"dsa_kernel_backend": {"attention_forward": ["a", "b"]}, "memory_budget": "64MiB"}
    assert parse_config(changed("quickstart", {"kernels": kernels})).kernels == {
        **load_preset("quickstart").kernels,
        **kernels,
    }


def test_configurations_cannot_be_changed():
    config = load_preset("quickstart")
    for model, name in ((config, "name"), (config.model, "layers"), (config.training, "steps")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(model, name, 1)


def test_an_installed_package_reads_its_own_data_and_never_a_neighbours_configs(tmp_path, monkeypatch):
    package, neighbour = tmp_path / "dsa_dispatch", tmp_path / "configs"
    package.mkdir()
    neighbour.mkdir()
    (neighbour / "theirs.yaml").write_text("model: {}\n")
    monkeypatch.setattr(files, "_PACKAGE", package)
    with pytest.raises(ConfigError, match="the shipped presets are missing"):
        preset_names()
    shutil.copytree(CONFIGS, package / "_presets")
    assert preset_names() == tuple(sorted(path.stem for path in CONFIGS.glob("*.yaml")))


def test_a_configuration_survives_being_written_out():
    for name in preset_names():
        config = load_preset(name)
        assert parse_config(config.model_dump(mode="json")) == config


def changed(preset, change):
    """A preset as plain data, with the values of ``change`` put in section by section."""
    data = {"name": preset, **yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text())}
    for section, values in change.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return data
