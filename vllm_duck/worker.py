"""The vLLM worker of the host: it owns the ducks of its engine."""

from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_duck.config import DuckConfig
from vllm_duck.executor.checkpoint import Checkpoint
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.local import LocalDucks

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

logger = init_logger(__name__)


class DuckWorker(PlatformWorker):
    """Finds or starts the ducks, checks them, and hands them to the model."""

    local_ducks: LocalDucks | None = None
    fleet: Fleet | None = None

    def load_model(self, **kwargs: Any) -> None:
        """Ducks first: a wrong duck is found before the host's weights load."""
        self.fleet = self._connect()
        super().load_model(**kwargs)
        self.model_runner.model.attach_ducks(self.fleet)

    def shutdown(self) -> None:
        if self.fleet is not None:
            self.fleet.close()
        if self.local_ducks is not None:
            self.local_ducks.stop()
        super().shutdown()

    def duck_statistics(self) -> list[dict[str, Any]]:
        """What `LLM.collective_rpc("duck_statistics")` returns: one entry a duck."""
        assert self.fleet is not None
        return self.fleet.statistics()

    def _connect(self) -> Fleet:
        config = DuckConfig.from_settings(
            self.vllm_config.additional_config["duck"], {}
        )
        model_dir = self.model_config.model
        endpoints = config.endpoints
        if not endpoints:
            self.local_ducks = LocalDucks.start(
                model_dir,
                num_ducks=config.local_ducks,
                num_threads=config.local_threads,
            )
            endpoints = self.local_ducks.endpoints
        return Fleet.connect(
            endpoints,
            expect=Checkpoint(model_dir),
            deadline_s=config.deadline_s,
            reply_dtype=config.reply_dtype,
        )
