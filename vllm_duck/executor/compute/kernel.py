"""The duck's MoE arithmetic: packed expert weights, and the C++ kernel that uses them.

    y[t] = sum over k, topk_ids[t, k] in the shard, of
           topk_weights[t, k] * down_e @ bf16(silu(gate_e @ x_t) * (up_e @ x_t))

Invariants, pinned by tests:
- A row's bits depend on that row alone: not on other rows, the number of rows or
  threads, the order of calls, or the order of experts within the row.
- Every instruction set gives the same bits (values below 2^-126 count as zero), so a
  replica on another machine continues a generation exactly.
- Weights are decoded exactly, e4m3 subnormals included; scale * (sum of the products
  that share it, up to 128) happens in fp32; gate, up and their product are fp32,
  rounded once to bf16 as the input of down; partial sums are fp32.

The order of additions is written down in csrc/duck/kernels/kernel_table.h, the layout
in layout.h beside it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vllm_duck.config import ISA_VARIABLE, environment_isa
from vllm_duck.errors import DuckCheckpointError, DuckConfigError, DuckShapeError
from vllm_duck.executor import _kernel
from vllm_duck.executor.system.cpus import numa_node, physical_cores, within_quota

ISAS = ("amx", "avx512", "avx2", "portable")
# In the order of csrc/duck/kernels/layout.h. The last two are what requantize.py makes.
WEIGHT_FORMATS = ("e4m3-block128", "bf16", "int8-group128", "int4-group32")

BLOCK = 128
# Weights along k that share a scale in the formats that have one for each column.
GROUP_SIZES = {"int8-group128": 128, "int4-group32": 32}
# Column counts and hidden sizes are multiples of this: the kernel's vector of outputs.
GRANULE = 16
_MATRICES = ("gate_proj", "up_proj", "down_proj")

Weights = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
Scales = npt.NDArray[np.float32] | npt.NDArray[np.uint16]


class LayerWeights:
    """The experts of one MoE layer that one shard owns, packed for the kernel.

    Memory is reserved at once; no page of it is touched before an expert is loaded.
    num_columns I and hidden_size H are multiples of 16, and so is column_offset: the
    first column's position within its 128-wide scale block, column_lo % 128.

    Raises:
        DuckShapeError: a size is not a positive multiple of 16, or the offset is not in
            [0, 128).
    """

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        num_columns: int,
        column_offset: int,
        weight_format: str,
    ) -> None:
        _check_sizes(num_experts, hidden_size, num_columns, column_offset)
        if weight_format not in WEIGHT_FORMATS:
            raise DuckShapeError(
                f"weight_format must be one of {WEIGHT_FORMATS}, got {weight_format!r}"
            )
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.num_columns = num_columns
        self.column_offset = column_offset
        self.weight_format = weight_format
        self._handle = _kernel.layer_new(
            num_experts=num_experts,
            hidden_size=hidden_size,
            num_columns=num_columns,
            column_offset=column_offset,
            format=WEIGHT_FORMATS.index(weight_format),
        )

    @property
    def num_column_blocks(self) -> int:
        """128-wide scale blocks that the shard's columns touch."""
        return -(-(self.column_offset + self.num_columns) // BLOCK)

    @property
    def num_hidden_blocks(self) -> int:
        return -(-self.hidden_size // BLOCK)

    @property
    def weight_bytes(self) -> int:
        """The slice as files have it, scales included."""
        num_weights = 3 * self.num_columns * self.hidden_size
        if self.weight_format == "bf16":
            return self.num_experts * 2 * num_weights
        group_size = GROUP_SIZES.get(self.weight_format)
        if group_size is None:
            num_scales = 3 * self.num_column_blocks * self.num_hidden_blocks
            return self.num_experts * (num_weights + 4 * num_scales)
        num_scales = 2 * self.num_columns * num_groups(0, self.hidden_size, group_size)
        num_scales += self.hidden_size * num_groups(
            self.column_offset, self.num_columns, group_size
        )
        if self.weight_format == "int4-group32":
            num_weights //= 2
        return self.num_experts * (num_weights + 2 * num_scales)

    @property
    def resident_bytes(self) -> int:
        """What the packed slice takes once loaded; at most 1.03 * weight_bytes."""
        return int(_kernel.layer_resident_bytes(self._handle))

    def load_expert(
        self,
        expert_idx: int,
        *,
        gate: Weights,
        up: Weights,
        down: Weights,
        gate_scale: Scales | None = None,
        up_scale: Scales | None = None,
        down_scale: Scales | None = None,
    ) -> None:
        """Pack one expert. Its arrays are copied and may be reused at once.

        Shapes: I = num_columns, H = hidden_size, c = num_column_blocks,
        h = num_hidden_blocks; weights are e4m3 bits (uint8) or bf16 bits (uint16), the
        rows of a weight may be strided (a slice of a larger array is fine).
            gate, up              [I, H]
            down                  [H, I]
            gate_scale, up_scale  [c, h]  float32, C-contiguous; None for bf16
            down_scale            [h, c]
        For int8 and int4 all are as requantize.py makes them.
        Raises:
            DuckShapeError: a shape or dtype disagrees, or expert_idx is out of range.
            DuckCheckpointError: a weight or scale is not finite; names the tensor. The
                expert then counts as not loaded.
        Sync: releases the GIL; several experts may be loaded from several threads.
        """
        if not 0 <= expert_idx < self.num_experts:
            raise DuckShapeError(
                f"expert_idx must be in [0, {self.num_experts}), got {expert_idx}"
            )
        bad = _kernel.layer_load(
            self._handle, expert_idx, gate, up, down, gate_scale, up_scale, down_scale
        )
        if bad is not None:
            matrix, is_scale = bad
            suffix = "_scale" if self.weight_format in GROUP_SIZES else "_scale_inv"
            tensor = f"weight{suffix}" if is_scale else "weight"
            what = "a scale that is NaN, infinite or >= 2^120" if is_scale else "a NaN"
            raise DuckCheckpointError(
                f"expert {expert_idx} of the shard: {_MATRICES[matrix]}.{tensor} must "
                f"be finite, got {what}; the checkpoint or its copy is damaged"
            )

    def check(self) -> None:
        """Make sure that every expert was loaded, which includes that it is finite.

        Raises:
            DuckCheckpointError: names the first expert that is missing.
        """
        missing = _kernel.layer_first_missing(self._handle)
        if missing >= 0:
            raise DuckCheckpointError(
                f"expert {missing} of the shard was never loaded; "
                f"expected {self.num_experts} experts"
            )


class MoeKernel:
    """One instruction set and one thread pool; serves any number of layers."""

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        isa: str | None = None,
        pin: bool = True,
    ) -> None:
        """Choose the kernel and start the pool; the calling thread is its first worker.

        num_threads: None takes every physical core that this process may run on, as
            far as its cgroup's quota goes; 1 starts no thread at all.
        isa: one of ISAS; None takes the environment's VLLM_DUCK_ISA, else the best.
        pin: keep pool thread i on the i-th of those cores. The caller stays unpinned.

        Raises:
            DuckConfigError: the instruction set is unknown or this CPU lacks it, or
                num_threads is not in [1, 1024].
        """
        cpus = physical_cores()
        if num_threads is None:
            num_threads = within_quota(len(cpus))
        if not 1 <= num_threads <= 1024:
            raise DuckConfigError(
                f"num_threads must be in [1, 1024], got {num_threads}"
            )
        wanted = isa if isa is not None else environment_isa() or None
        if wanted is not None and wanted not in ISAS:
            raise DuckConfigError(
                f"isa must be one of {ISAS}, got {wanted!r}; "
                f"set the isa argument or {ISA_VARIABLE}"
            )
        handle = _kernel.engine_new(
            num_threads, wanted or "", tuple(cpus) if pin else ()
        )
        if handle is None:
            raise DuckConfigError(
                f"this CPU cannot run isa {wanted!r}, it supports {supported_isas()}; "
                f"set the isa argument or {ISA_VARIABLE}"
            )
        self._handle = handle
        self.isa = str(_kernel.engine_isa(handle))
        self.num_threads = num_threads
        nodes = {numa_node(cpu) for cpu in cpus[:num_threads]}
        self._is_on_several_nodes = pin and len(nodes) > 1

    def place(self, weights: LayerWeights) -> None:
        """Put memory where its readers are, before it is loaded: first_touch() where
        the pinned threads are on several NUMA nodes, else nothing."""
        if self._is_on_several_nodes:
            self.first_touch(weights)

    def first_touch(self, weights: LayerWeights) -> None:
        """Let each worker write the pages it will read, before they are loaded.

        It places the weights on the workers' NUMA nodes; elsewhere it only costs time.
        """
        _kernel.engine_first_touch(self._handle, weights._handle)

    def forward(
        self,
        weights: LayerWeights,
        hidden: npt.NDArray[np.uint16],
        topk_ids: npt.NDArray[np.int32],
        topk_weights: npt.NDArray[np.float32],
        *,
        expert_lo: int,
        n_routed_experts: int,
        out: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
    ) -> None:
        """Write the shard's partial sum for T rows to `out`.

        Shapes: T rows (0 is allowed), H hidden size, A experts per row; C-contiguous.
            hidden        [T, H]  bf16 bits (uint16)
            topk_ids      [T, A]  int32, global ids in any order, repeats allowed; ids
                                  outside [expert_lo, expert_lo + num_experts) are
                                  another shard's and are skipped
            topk_weights  [T, A]  float32
            out           [T, H]  float32, or bf16 bits (uint16) rounded once at the end
        Raises:
            DuckShapeError: a shape or dtype disagrees, A is 0, or an id is not in
                [0, n_routed_experts).
            DuckCheckpointError: an expert of the layer was never loaded.
        Sync: blocks; releases the GIL. Concurrent calls take turns.
        """
        if not 0 <= expert_lo <= n_routed_experts - weights.num_experts:
            raise DuckShapeError(
                f"experts [{expert_lo}, {expert_lo + weights.num_experts}) must lie in "
                f"[0, n_routed_experts = {n_routed_experts})"
            )
        _kernel.forward(
            self._handle,
            weights._handle,
            hidden,
            topk_ids,
            topk_weights,
            expert_lo,
            n_routed_experts,
            out,
        )


def native_compute(
    kernel: MoeKernel,
    layers: Mapping[int, LayerWeights],
    *,
    expert_lo: int,
    n_routed_experts: int,
) -> object:
    """One shard's sums as C++ calls them: what the native server computes with.

    layers: by layer_idx. Keeps kernel and layers alive.

    Raises:
        DuckCheckpointError: an expert was never loaded.
    """
    handles = {layer_idx: weights._handle for layer_idx, weights in layers.items()}
    return _kernel.shard_new(kernel._handle, handles, expert_lo, n_routed_experts)


def supported_isas() -> list[str]:
    """The instruction sets that this build can use on this CPU, best first."""
    return [str(name) for name in _kernel.supported_isas()]


def num_groups(first: int, count: int, group_size: int) -> int:
    """Groups that `count` weights touch, when groups are counted from weight 0."""
    return -(-(first + count) // group_size) - first // group_size


def _check_sizes(
    num_experts: int, hidden_size: int, num_columns: int, column_offset: int
) -> None:
    sizes: Sequence[tuple[str, int]] = (
        ("hidden_size", hidden_size),
        ("num_columns", num_columns),
    )
    for name, size in sizes:
        if not GRANULE <= size <= 1 << 20 or size % GRANULE:
            raise DuckShapeError(
                f"{name} must be a positive multiple of {GRANULE}, got {size}; "
                f"choose other column ranges in the shard plan"
            )
    if not 0 <= column_offset < BLOCK or column_offset % GRANULE:
        raise DuckShapeError(
            f"column_offset must be a multiple of {GRANULE} in [0, {BLOCK}), "
            f"got {column_offset}; it is column_lo % {BLOCK}"
        )
    if not 1 <= num_experts <= 1 << 16:
        raise DuckShapeError(f"num_experts must be in [1, 65536], got {num_experts}")
