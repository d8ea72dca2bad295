"""Asks ducks what they hold and whether they serve, whatever carries the requests.

By grpcio for every transport: these are a handful of calls a start, where speed is
nothing, any duck answers them, and a transport is spared a second kind of call. What
then carries the requests makes sure by itself that the duck which was described is
behind each of its connections (`wire/identity.py`).
"""

import logging

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vllm_duck.config import DEFAULT_DEADLINE_S
from vllm_duck.endpoints import join_replicas, replicas_of
from vllm_duck.errors import (
    DuckConfigError,
    DuckProtocolError,
    DuckTimeout,
    DuckTransportError,
    DuckUnavailable,
)
from vllm_duck.executor.duck import DuckInfo
from vllm_duck.executor.grpcio.channel import open_channel, token_metadata
from vllm_duck.executor.system.cpus import allowed_cpus, run_on_cpus
from vllm_duck.executor.wire.codec import DESCRIBE_REQUEST, decode_info
from vllm_duck.executor.wire.errors import error_of_rpc
from vllm_duck.executor.wire.identity import identity_of, mismatch
from vllm_duck.executor.wire.limits import DESCRIBE_METHOD, SERVICE
from vllm_duck.executor.wire.security import ClientSecurity

logger = logging.getLogger(__name__)


class GrpcDescriber:
    """`duck.Describer` of the duck at an endpoint; each call has its own connection."""

    def __init__(
        self,
        endpoint: str,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        security: ClientSecurity | None = None,
    ) -> None:
        """endpoint: of replicas, which stand in for each other, with | in between."""
        self._replicas = replicas_of(endpoint)
        self._deadline_s = deadline_s
        self._security = security or ClientSecurity()

    @property
    def name(self) -> str:
        return join_replicas(self._replicas)

    def describe(self) -> DuckInfo:
        """Ask the duck what it holds; of replicas, all that answer.

        Raises:
            DuckTransportError: no duck answers there before the deadline.
            DuckConfigError: its replicas do not hold the same.
        """
        found: dict[str, DuckInfo] = {}
        for endpoint in self._replicas:
            try:
                found[endpoint] = self._describe(endpoint, self._deadline_s)
            except (DuckUnavailable, DuckTimeout) as error:
                if endpoint == self._replicas[-1] and not found:
                    raise
                if len(self._replicas) > 1:
                    logger.warning("replica %s does not answer: %s", endpoint, error)
        (first, info), *others = found.items()
        for endpoint, other in others:
            if identity_of(other) != identity_of(info):
                raise DuckConfigError(
                    f"replicas must hold the same slice, got {identity_of(info)} at "
                    f"{first} and {identity_of(other)} at {endpoint}; correct "
                    "duck.endpoints, or start the right duck there"
                )
        return info

    def check(self, identity: str, deadline_s: float) -> None:
        """Ask whether the duck of this identity is there; of replicas, one is enough.

        Raises:
            DuckTransportError: it does not answer, or another duck does.
        """
        for endpoint in self._replicas:
            try:
                got = identity_of(self._describe(endpoint, deadline_s))
                if got == identity:
                    return
                raise DuckProtocolError(f"duck {endpoint} {mismatch(identity, got)}")
            except DuckTransportError:
                if endpoint == self._replicas[-1]:
                    raise

    def _describe(self, endpoint: str, deadline_s: float) -> DuckInfo:
        try:
            with self._new_channel(endpoint) as channel:
                message = channel.unary_unary(DESCRIBE_METHOD)(
                    DESCRIBE_REQUEST,
                    timeout=deadline_s,
                    metadata=token_metadata(self._security),
                )
        except grpc.RpcError as error:
            raise error_of_rpc(endpoint, error) from error
        return decode_info(message)

    def health(self) -> str:
        """Ask the standard health service of the first replica, or of the one duck.

        Returns "SERVING" or "NOT_SERVING".

        Raises:
            DuckTransportError: nothing answers there before the deadline.
        """
        endpoint = self._replicas[0]
        try:
            with self._new_channel(endpoint) as channel:
                reply = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=SERVICE),
                    timeout=self._deadline_s,
                )
        except grpc.RpcError as error:
            raise error_of_rpc(endpoint, error) from error
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    def _new_channel(self, endpoint: str) -> grpc.Channel:
        """Its threads run anywhere: vLLM pins its worker's main thread to one cpu."""
        return run_on_cpus(
            lambda: open_channel(endpoint, self._security), allowed_cpus()
        )
