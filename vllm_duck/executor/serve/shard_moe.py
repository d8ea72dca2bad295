"""One loaded shard and the kernel that computes with it: what a duck serves."""

import numpy as np

from vllm_duck.errors import DuckShapeError
from vllm_duck.executor.compute.kernel import MoeKernel, native_compute
from vllm_duck.executor.duck import (
    BF16,
    F32,
    PROTOCOL_VERSION,
    DuckInfo,
    MoeRequest,
    Partial,
    ReplyDtype,
)
from vllm_duck.executor.system.process import resident_bytes
from vllm_duck.executor.weights.loader import LoadedShard


class ShardMoe:
    """A MoeFunction over the weights of one shard."""

    def __init__(
        self,
        loaded: LoadedShard,
        kernel: MoeKernel,
    ) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._kernel = kernel

    @property
    def info(self) -> DuckInfo:
        model = self._model
        return DuckInfo(
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=model.fingerprint,
            layer_ids=model.layer_ids,
            shard=self._loaded.shard,
            hidden_size=model.hidden_size,
            moe_intermediate_size=model.moe_intermediate_size,
            n_routed_experts=model.n_routed_experts,
            weight_format=model.weight_format,
            isa=self._kernel.isa,
            num_threads=self._kernel.num_threads,
            weight_bytes=self._loaded.weight_bytes,
            resident_bytes=resident_bytes(),
        )

    @property
    def num_bytes_read(self) -> int:
        return self._loaded.num_bytes_read

    def native_compute(self) -> object:
        """The same sums for the native server, without Python in between."""
        return native_compute(
            self._kernel,
            self._loaded.layers,
            expert_lo=self._loaded.shard.expert_lo,
            n_routed_experts=self._model.n_routed_experts,
        )

    def __call__(self, request: MoeRequest, reply_dtype: ReplyDtype) -> Partial:
        """The shard's partial sum [T, H] of the request.

        Raises:
            DuckShapeError: the layer, the hidden size or an expert id is not the
                model's.
        """
        weights = self._loaded.layers.get(request.layer_idx)
        if weights is None:
            raise DuckShapeError(
                f"layer_idx must be one of {list(self._model.layer_ids)}, "
                f"got {request.layer_idx}"
            )
        dtype = BF16 if reply_dtype == "bf16" else F32
        out: Partial = np.empty(request.hidden.shape, dtype)
        self._kernel.forward(
            weights,
            request.hidden,
            request.topk_ids,
            request.topk_weights,
            expert_lo=self._loaded.shard.expert_lo,
            n_routed_experts=self._model.n_routed_experts,
            out=out,
        )
        return out
