#!/bin/sh
# Regenerates vllm_duck/executor/wire/duck_pb2*.py[i] from protos/duck/v1/duck.proto.
#
#   scripts/make_proto.sh [OUTPUT_ROOT]     OUTPUT_ROOT defaults to the repository
#   BIN=.venv/bin scripts/make_proto.sh
#
# Needs grpcio-tools==1.78.0, the oldest that we support: generated code refuses to
# import on an older protobuf or grpcio than the one it was generated with, and it is
# the user's vLLM that chooses those.
set -eu

cd "$(dirname "$0")/.."
output_root="${1:-.}"
"${BIN:+$BIN/}python" -m grpc_tools.protoc \
    -Ivllm_duck/executor/wire=protos/duck/v1 \
    --python_out="$output_root" \
    --pyi_out="$output_root" \
    --grpc_python_out="$output_root" \
    protos/duck/v1/duck.proto
