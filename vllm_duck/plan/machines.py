"""The machines of a fleet as numbers, and what of them is assumed, not given."""

from dataclasses import dataclass

from vllm_duck.errors import DuckConfigError

# The share of a memory's bandwidth that kernels reach for one and two rows. GPUs: what
# an LM head on an RTX 5090 reached; ducks: benchmarks.kernel, AVX2 and AVX-512.
GPU_READS, CPU_READS, DUCK_READS = 0.85, 0.9, 0.8
# The share of a processor's arithmetic that kernels reach for many rows.
GPU_FLOPS, CPU_FLOPS, DUCK_FLOPS = 0.5, 0.8, 0.8
# A duck's core: two FMAs of 4 float32 a cycle (Gracemont and older; AVX-512 has four
# times as many) at 3 GHz.
DUCK_CORE_GFLOPS = 48.0
# CPU time of the host's thread for one call: encode, send, receive, add. 58 layers in
# two lanes and 32 ducks took 46 to 61 ms (docs/performance.md).
CALL_S = 14e-6
# Of each lane-layer besides its bytes: launches, the flag's way over PCIe; or Python
# and dispatch.
GPU_LAYER_S, CPU_LAYER_S = 90e-6, 20e-6
# There and back through two network stacks and a switch, besides the bytes.
ROUND_TRIP_S = 60e-6
# Of each call at a duck besides its weights: decoding, threads, reply.
DUCK_CALL_S = 30e-6
# Of each step outside of the model: scheduler, sampling, detokeniser.
STEP_S = 2e-3
# What a frame's bytes carry of ours: Ethernet, IP, TCP and HTTP/2 take the rest.
WIRE_SHARE = 0.94

LINK_STEPS = (1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 50.0, 100.0)


@dataclass(frozen=True)
class Host:
    """Where attention runs. gbs: GB/s of its memory; gflops: of its matrix products."""

    name: str
    gbs: float
    gflops: float
    # Of a GPU: its memory in GiB. None: a CPU.
    card_gib: float | None = None

    @property
    def is_gpu(self) -> bool:
        return self.card_gib is not None

    @property
    def read_rate(self) -> float:
        """Bytes a second."""
        return self.gbs * 1e9 * (GPU_READS if self.is_gpu else CPU_READS)

    @property
    def flop_rate(self) -> float:
        return self.gflops * 1e9 * (GPU_FLOPS if self.is_gpu else CPU_FLOPS)

    @property
    def layer_s(self) -> float:
        return GPU_LAYER_S if self.is_gpu else CPU_LAYER_S


# Bandwidth, dense bf16 arithmetic with float32 sums and memory of the makers' sheets.
GPUS = {
    host.name: host
    for host in (
        Host("rtx3090", 936, 71e3, 24),
        Host("rtx4090", 1008, 165e3, 24),
        Host("rtx5090", 1792, 210e3, 32),
        Host("l40s", 864, 181e3, 48),
        Host("a100", 2039, 312e3, 80),
        Host("h100", 3350, 989e3, 80),
        Host("h200", 4800, 989e3, 141),
    )
}


@dataclass(frozen=True)
class Fleet:
    """Ducks that are alike, and the wires to them. gbps: 10**9 bits a second."""

    num_ducks: int
    duck_gbs: float
    duck_gflops: float
    link_gbps: float
    # Of the host's ports together; 0: as fast as all links.
    host_gbps: float

    @property
    def duck_read_rate(self) -> float:
        return self.duck_gbs * 1e9 * DUCK_READS

    @property
    def duck_flop_rate(self) -> float:
        return self.duck_gflops * 1e9 * DUCK_FLOPS

    @property
    def wire_rate(self) -> float:
        """Bytes a second to each of all ducks at once."""
        share = self.link_gbps
        if self.host_gbps:
            share = min(share, self.host_gbps / self.num_ducks)
        return share * 1e9 / 8 * WIRE_SHARE


def find_host(name: str | None, gbs: float | None, gflops: float | None) -> Host:
    """A known GPU by name, or a CPU by its memory's GB/s.

    Raises:
        DuckConfigError: both, none, or a name that is not known.
    """
    if (name is None) == (gbs is None):
        raise DuckConfigError("give --host NAME of a GPU, or --host-gbs of a CPU")
    if gbs is not None:
        # An AVX-512 server has about five times its bandwidth in float32.
        return Host("CPU", gbs, gflops or 5 * gbs)
    if name not in GPUS:
        raise DuckConfigError(f"--host must be one of {', '.join(GPUS)}, got {name}")
    return GPUS[name]
