"""A model family is one file: the rest of the package asks the record in it."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import vllm_duck
from testing.ducks.mini_model import (
    NUM_COLUMNS,
    NUM_EXPERTS,
    WHOLE,
    make_mini_model,
    make_request,
)
from testing.engine_args import make_args
from vllm_duck import families, hooks, kv_space
from vllm_duck.errors import DuckCheckpointError, DuckConfigError
from vllm_duck.executor.compute.kernel import MoeKernel
from vllm_duck.executor.duck import Shard
from vllm_duck.executor.serve.shard_moe import ShardMoe
from vllm_duck.executor.split.writer import split_checkpoint
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.weights.loader import load_shard
from vllm_duck.executor.weights.plan import ShardPlan
from vllm_duck.families import all_families, family_of
from vllm_duck.family import Rule
from vllm_duck.models.cpu.attention import SparseAttention
from vllm_duck.models.cpu.moe import Router
from vllm_duck.models.dimensions import Dimensions
from vllm_duck.models.kv_cache import LayerCaches

PACKAGE = Path(vllm_duck.__file__).parent
NAMED = re.compile(r"deepseek[-_ ]?v\d|v3[._]?2|glm", re.IGNORECASE)
PLAN = ShardPlan(
    NUM_COLUMNS,
    NUM_EXPERTS,
    (Shard(0, 112, 0, NUM_EXPERTS), Shard(112, NUM_COLUMNS, 0, NUM_EXPERTS)),
)

MADE_UP = """
from dataclasses import replace

from vllm_duck.families.deepseek_v32 import FAMILY as OTHER
from vllm_duck.family import Rule

FAMILY = replace(
    OTHER,
    name="Made-Up 7",
    architecture="MadeUpForCausalLM",
    mtp_architecture="MadeUpMtp",
    is_moe_layer=lambda read_int, i: i % 2 == 1 and i >= read_int("num_dense", least=0),
    tensors=replace(
        OTHER.tensors,
        layers="language_model.blocks",
        experts="ffn.routed",
        projections={"gate": "w1", "up": "w3", "down": "w2"},
    ),
    rules=replace(OTHER.rules, router=Rule("twisted", {"twist": 2})),
    required={},
)
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Another family, by adding one file."""
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "made_up.py").write_text(MADE_UP)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(folder)])
    return family_of(["MadeUpForCausalLM"])


def test_what_the_bundled_model_is_called_finds_its_family(tiny_model):
    family = Checkpoint(tiny_model).family
    assert family.name == "DeepSeek-V3.2"
    assert family in all_families()
    assert len(all_families()) == len({each.architecture for each in all_families()})


@pytest.mark.parametrize("architectures", [None, [], ["A"], "DeepseekV32ForCausalLM"])
def test_another_architecture_is_refused_with_those_that_are_served(
    architectures, made_up
):
    match = (
        "^duck serves DeepseekV32ForCausalLM or .* or MadeUpForCausalLM, got "
        f"{re.escape(repr(architectures))}$"
    )
    with pytest.raises(DuckConfigError, match=match):
        family_of(architectures)


def test_a_duck_refuses_another_architecture_with_the_file(tmp_path):
    model = make_mini_model()
    model.config["architectures"] = ["OtherForCausalLM"]
    checkpoint = Checkpoint(model.write(tmp_path))
    match = r"config.json: .*duck serves DeepseekV32ForCausalLM or .*, got \['OtherFor"
    with pytest.raises(DuckCheckpointError, match=match):
        _ = checkpoint.summary


def _renamed(model, family):
    """A mini model's checkpoint as another family would publish it."""
    model.config["architectures"] = [family.architecture]
    del model.config["first_k_dense_replace"], model.config["moe_layer_freq"]
    model.config["num_dense"] = 0
    new = {}
    for name, tensor in model.tensors.items():
        name = name.replace("model.layers", "language_model.blocks")
        name = name.replace("mlp.experts", "ffn.routed")
        for ours, theirs in family.tensors.projections.items():
            name = name.replace(f"{ours}_proj", theirs)
        new[name] = tensor
    model.tensors = new
    return model


@pytest.mark.parametrize("weight_format", ["bf16", "e4m3-block128"])
def test_a_duck_reads_a_family_that_is_one_more_file(tmp_path, made_up, weight_format):
    known = Checkpoint(make_mini_model(weight_format).write(tmp_path / "known"))
    model = _renamed(make_mini_model(weight_format), made_up)
    other = Checkpoint(model.write(tmp_path / "other"))
    assert other.moe_layer_ids == (1, 3)
    assert kv_space.host_weight_bytes(other) == kv_space.host_weight_bytes(known)
    for checkpoint, name in ((known, "a"), (other, "b")):
        split_checkpoint(checkpoint, PLAN, tmp_path / name, show_progress=False)
    for path in (tmp_path / "b").glob("*/layer-*"):
        same = tmp_path / "a" / path.relative_to(tmp_path / "b")
        assert path.read_bytes() == same.read_bytes()
    assert len(list((tmp_path / "b").glob("*/layer-*"))) == 2 * len(PLAN.shards)
    request = replace(make_request(), layer_idx=3)
    sums = [
        ShardMoe(load_shard(each, WHOLE), MoeKernel(num_threads=1))(request, "fp32")
        for each in (known, other)
    ]
    np.testing.assert_array_equal(*sums)


def test_dimensions_ask_the_family(tiny_model, made_up):
    settings = json.loads((tiny_model / "config.json").read_text())
    settings |= {"architectures": [made_up.architecture], "num_dense": 2}
    # Of the other family's rules, none is left.
    settings |= {"topk_method": "other", "moe_layer_freq": "none"}
    dims = Dimensions.from_hf_config(SimpleNamespace(**settings))
    assert dims.family == made_up
    assert dims.moe_layer_ids == (3,)
    with pytest.raises(DuckConfigError, match="twist must be 2, got 1"):
        Dimensions.from_hf_config(SimpleNamespace(**settings, twist=1))
    settings["num_dense"] = -1
    with pytest.raises(DuckConfigError, match="num_dense must be an integer >= 0"):
        Dimensions.from_hf_config(SimpleNamespace(**settings))


def test_an_engine_is_set_up_for_the_family(tiny_model, tmp_path, made_up, monkeypatch):
    hooks.install_hooks()
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_model.iterdir():
        (model / path.name).symlink_to(path)
    settings = json.loads((model / "config.json").read_text())
    settings |= {"architectures": [made_up.architecture], "num_dense": 0}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(settings))
    config = make_args(model).create_engine_config()
    assert config.model_config.architecture == made_up.architecture
    assert config.model_config.model_class_overrides == made_up.classes
    settings["num_dense"] = 4
    (model / "config.json").write_text(json.dumps(settings))
    with pytest.raises(DuckConfigError, match="none of the 4 layers has them"):
        make_args(model).create_engine_config()
    # And an engine without ducks behind it restores what vLLM has.
    make_args(tiny_model, duck=None).create_engine_config()


def test_a_backend_refuses_a_rule_that_it_does_not_compute(tiny_model, made_up):
    settings = json.loads((tiny_model / "config.json").read_text())
    settings |= {"architectures": [made_up.architecture], "num_dense": 0}
    dims = Dimensions.from_hf_config(SimpleNamespace(**settings))
    match = "computes the router rule 'noaux_tc', got 'twisted' of Made-Up 7; it has"
    with pytest.raises(DuckConfigError, match=match):
        Router(dims)
    rules = replace(made_up.rules, index_rope=Rule("spiral", {}))
    other = replace(dims, family=replace(made_up, rules=rules))
    match = "index_rope rule 'half-split' or 'interleaved', got 'spiral' of Made-Up 7"
    with pytest.raises(DuckConfigError, match=match):
        SparseAttention(other, LayerCaches(None, None))


def _names_in(path):
    """Identifiers and strings of a module, but for docstrings."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)
        for field in ("id", "attr", "name", "arg", "module", "asname"):
            yield str(getattr(node, field, ""))


def test_no_other_file_names_the_architecture():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "families":
            continue
        names = {path.stem, *_names_in(path)}
        found = [name for name in names if NAMED.search(name)]
        assert not found, (path, found)
