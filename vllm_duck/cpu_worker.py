"""A host on vLLM's CPU platform: vLLM's worker and runner for it behind duck's."""

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_duck.hooks import page_cache_is_free, using_cpu_runner
from vllm_duck.spec_decode.runner import DuckModelRunner
from vllm_duck.worker import DuckWorker


class CpuDuckModelRunner(DuckModelRunner, CPUModelRunner):
    """What DuckModelRunner leaves to vLLM, its CPU runner does."""


class CpuDuckWorker(DuckWorker, CPUWorker):
    """What DuckWorker leaves to vLLM, its CPU worker does."""

    def init_device(self) -> None:
        with using_cpu_runner(CpuDuckModelRunner):
            super().init_device()

    def determine_available_memory(self) -> int:
        with page_cache_is_free():
            return super().determine_available_memory()
