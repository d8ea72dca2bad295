"""The committed generated code is what the proto gives."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_duck.executor.wire import codec, duck_pb2
from vllm_duck.executor.wire import limits as wire

ROOT = Path(__file__).parents[3]
GENERATED = ("duck_pb2.py", "duck_pb2.pyi", "duck_pb2_grpc.py")
TOOLS_VERSION = "1.78.0"


def test_generated_code_is_up_to_date(tmp_path):
    try:
        version = importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"grpcio-tools=={TOOLS_VERSION} is not installed")
    if version != TOOLS_VERSION:
        pytest.skip(f"generated with grpcio-tools {TOOLS_VERSION}, here is {version}")
    subprocess.run(
        [ROOT / "scripts" / "make_proto.sh", tmp_path],
        env={**os.environ, "BIN": str(Path(sys.executable).parent)},
        check=True,
    )
    for name in GENERATED:
        fresh = (tmp_path / "vllm_duck" / "executor" / "wire" / name).read_text()
        committed = (ROOT / "vllm_duck" / "executor" / "wire" / name).read_text()
        assert fresh == committed, f"{name} is stale: run `make proto`"


def test_the_service_has_the_names_that_client_and_server_use():
    service = duck_pb2.DESCRIPTOR.services_by_name["Duck"]
    methods = [f"/{service.full_name}/{method.name}" for method in service.methods]
    assert service.full_name == wire.SERVICE
    assert methods == [wire.DESCRIBE_METHOD, wire.FORWARD_METHOD]


def test_every_tensor_field_has_a_one_byte_tag():
    for message in (duck_pb2.ForwardRequest, duck_pb2.ForwardReply):
        for field in message.DESCRIPTOR.fields:
            assert field.number < 16, field.full_name


def test_only_the_codec_imports_the_generated_messages():
    package = ROOT / "vllm_duck"
    importers = {
        path.name
        for path in package.rglob("*.py")
        if "duck_pb2" in path.read_text() and path.name not in GENERATED
    }
    assert importers == {Path(codec.__file__).name}
