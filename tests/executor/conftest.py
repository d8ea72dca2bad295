"""Fixtures of the executor's tests."""

import pytest

from testing.ducks.mini_model import MiniModel, make_mini_model
from testing.waiting import WAIT_S
from vllm_duck.executor.compute.kernel import MoeKernel, supported_isas
from vllm_duck.executor.grpcio.client import GrpcDuck
from vllm_duck.executor.grpcio.describer import GrpcDescriber
from vllm_duck.executor.weights.checkpoint import Checkpoint


@pytest.fixture(params=["bf16", "e4m3-block128"])
def any_model(request) -> MiniModel:
    return make_mini_model(request.param)


@pytest.fixture
def bf16_model() -> MiniModel:
    return make_mini_model("bf16")


@pytest.fixture
def bf16_checkpoint(tmp_path, bf16_model) -> Checkpoint:
    return Checkpoint(bf16_model.write(tmp_path / "model"))


@pytest.fixture(params=supported_isas())
def kernel(request) -> MoeKernel:
    return MoeKernel(num_threads=2, isa=request.param)


@pytest.fixture
def describer():
    def open_describer(endpoint):
        return GrpcDescriber(endpoint, deadline_s=WAIT_S)

    return open_describer


@pytest.fixture
def connect():
    ducks = []

    def open_duck(endpoint, **options):
        options.setdefault("deadline_s", WAIT_S)
        duck = GrpcDuck(endpoint, **options)
        ducks.append(duck)
        return duck

    yield open_duck
    for duck in ducks:
        duck.close()
