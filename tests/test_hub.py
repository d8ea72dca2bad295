"""A model of the Hugging Face hub is fetched as the user's options say."""

import huggingface_hub
import pytest
import vllm

from testing.engine_args import make_args
from vllm_duck import setup_engine
from vllm_duck.config import DuckConfig
from vllm_duck.errors import DuckConfigError


@pytest.fixture
def _online(monkeypatch):
    """Offline, EngineArgs themselves look the model up in the cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("_online")
def test_a_hub_model_is_fetched_as_the_options_say(tiny_model, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tiny_model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    args = make_args(
        "some/model",
        revision="r1",
        download_dir="/models",
        hf_token="secret",
        ignore_patterns=["*.bin"],
    )
    resolved = setup_engine.resolve(DuckConfig(), args, {})
    assert asked == {
        "repo_id": "some/model",
        "revision": "r1",
        "cache_dir": "/models",
        "token": "secret",
        "ignore_patterns": ["*.bin"],
    }
    rewritten = setup_engine.rewrite(args, resolved)
    assert rewritten.model == str(tiny_model)
    assert rewritten.served_model_name == args.model == "some/model"
    # None: the one in the model's directory.
    assert rewritten.tokenizer is None
    assert args.served_model_name is None


@pytest.mark.usefixtures("_online")
def test_another_revision_of_the_tokenizer_comes_from_the_hub(tiny_model, monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **options: str(tiny_model)
    )
    args = make_args("some/model", revision="r1", tokenizer_revision="r2")
    resolved = setup_engine.resolve(DuckConfig(), args, {})
    assert setup_engine.rewrite(args, resolved).tokenizer == "some/model"
    args.tokenizer = "another/tokenizer"
    assert setup_engine.rewrite(args, resolved).tokenizer == "another/tokenizer"


@pytest.mark.parametrize("model", ["no/such-model", "s3://bucket/model", "/nowhere"])
def test_a_model_that_cannot_be_had_is_refused(model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        args = make_args(model)
    with pytest.raises(
        DuckConfigError, match=f"of the Hugging Face hub, got '{model}'"
    ):
        setup_engine.resolve(DuckConfig(), args, {})


@pytest.mark.usefixtures("_online")
def test_modelscope_is_refused(monkeypatch):
    args = make_args("some/model")
    monkeypatch.setattr(vllm.envs, "VLLM_USE_MODELSCOPE", True, raising=False)
    with pytest.raises(DuckConfigError, match="fetch it and name its directory"):
        setup_engine.resolve(DuckConfig(), args, {})
