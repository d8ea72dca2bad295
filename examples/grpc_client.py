"""Call one duck with stock grpcio: what a client in another language has to do.

    python -m grpc_tools.protoc -Iprotos --python_out=. duck/v1/duck.proto
    python examples/grpc_client.py 127.0.0.1:7100

It needs grpcio, protobuf and numpy; of vllm_duck only the proto.
"""

import sys

import grpc
import numpy as np

try:
    from duck.v1 import duck_pb2
except ImportError:  # in a checkout: the committed copy
    from vllm_duck.executor.wire import duck_pb2

MAX_MESSAGE_BYTES = 256 << 20


def crc32c(data: bytes) -> int:
    """CRC-32C; a library such as google-crc32c does it faster."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def seal(message) -> bytes:
    """Serialize; the checksum of all that comes last: field 10, four bytes."""
    body = message.SerializeToString()
    return body + b"\x55" + crc32c(body).to_bytes(4, "little")


def unseal(data: bytes):
    """Parse a reply after checking that nothing changed it on the way."""
    assert data[-5:] == b"\x55" + crc32c(data[:-5]).to_bytes(4, "little")
    return duck_pb2.ForwardReply.FromString(data)


def main(endpoint: str) -> None:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # Ducks are on the local network: http_proxy is not for them.
        ("grpc.enable_http_proxy", 0),
    ]
    with grpc.insecure_channel(endpoint, options=options) as channel:
        describe = channel.unary_unary("/duck.v1.Duck/Describe")
        info = duck_pb2.DescribeReply.FromString(describe(b"", timeout=10))
        print(f"model {info.model_fingerprint}, layers {list(info.layer_ids)}")
        hidden = np.random.default_rng(0).standard_normal((2, info.hidden_size))
        request = duck_pb2.ForwardRequest(
            request_id=1,
            layer_idx=info.layer_ids[0],
            num_rows=2,
            hidden_size=info.hidden_size,
            num_topk=2,
            reply_dtype=duck_pb2.DTYPE_F32,
            # bf16 is the upper half of a float32.
            hidden=(hidden.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes(),
            topk_ids=np.array([[0, 1], [2, 3]], "<i4").tobytes(),
            topk_weights=np.full((2, 2), 0.5, "<f4").tobytes(),
        )
        forward = channel.stream_stream("/duck.v1.Duck/Forward", seal, unseal)
        (reply,) = forward(iter([request]), timeout=10)
        assert reply.status == duck_pb2.STATUS_OK, reply.error
        partial = np.frombuffer(reply.partial, "<f4").reshape(2, info.hidden_size)
        print(
            f"{reply.compute_us} us of compute; norms {np.linalg.norm(partial, axis=1)}"
        )


if __name__ == "__main__":
    main(sys.argv[1])
