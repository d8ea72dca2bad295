"""The vLLM worker of the host: it owns the ducks of its engine."""

import atexit
import signal
from dataclasses import asdict, dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from vllm_duck.config import DuckConfig, HandOver
from vllm_duck.ending import end_with_parent
from vllm_duck.errors import DuckTransportError
from vllm_duck.executor.fleet import Fleet
from vllm_duck.executor.serve.local import LocalDucks
from vllm_duck.executor.slow import SlowLog
from vllm_duck.executor.system.process import resident_bytes
from vllm_duck.executor.weights.checkpoint import Checkpoint
from vllm_duck.executor.wire.security import ClientSecurity
from vllm_duck.hooks import using_all_logits_processors
from vllm_duck.lost_ducks.health import HealthBoard, health_file
from vllm_duck.lost_ducks.lookout import Lookout
from vllm_duck.lost_ducks.scheduler import FailedStep
from vllm_duck.lost_ducks.step_limit import step_wait_s
from vllm_duck.metrics.figures import FiguresWriter
from vllm_duck.vllm_seams import check_seams

logger = init_logger(__name__)

# For a duck that was given up, to say whether it is back.
_LOOK_S = 5.0


@dataclass(frozen=True)
class DuckFigures:
    """What a user wants to see of one duck."""

    name: str
    shard: str
    num_calls: int
    # Medians over the latest calls, microseconds.
    rtt_us: float
    compute_us: float
    queue_us: float
    resident_bytes: int


class DuckWorker(Worker):
    """Finds or starts the ducks, checks them, and hands them to the model.

    What runs is a subclass with vLLM's worker for its platform, and with a runner
    (`models/platforms.py`).
    """

    local_ducks: LocalDucks | None = None
    fleet: Fleet | None = None
    figures_writer: FiguresWriter | None = None
    step_wait_s: float
    health: HealthBoard
    slow_log: SlowLog
    lookout: Lookout | None = None
    # Of the step that runs.
    scheduler_output: Any = None

    def init_device(self) -> None:
        check_seams()
        if self.parallel_config.distributed_executor_backend == "mp":
            # A Ctrl-C reaches every process of the terminal. The engine asks its
            # worker to end, and takes one that ends by itself for a crash.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # vLLM's own watch does not end a step that waits for a duck.
            end_with_parent()
        with using_all_logits_processors():
            super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        """Ducks first: a wrong duck is found before the host's weights load."""
        config = DuckConfig.of(self.vllm_config)
        # vLLM does not call shutdown() on every way out of its worker process.
        atexit.register(self.stop_ducks)
        self.step_wait_s = step_wait_s(config)
        self.slow_log = SlowLog()
        hand_over = HandOver.of(self.vllm_config)
        self.health = HealthBoard(health_file(hand_over.health_file))
        self.fleet = self._connect(config)
        self.lookout = Lookout(self.health, self._missing_ducks)
        super().load_model(**kwargs)
        self.model_runner.attach_ducks(self.fleet)
        self.figures_writer = FiguresWriter(hand_over.figures_file, self.step_figures)

    def execute_model(self, scheduler_output: Any) -> Any:
        """The first call of a step, which must end before vLLM gives its worker up."""
        assert self.fleet is not None
        # The lookout says when a duck that was given up is back.
        self.fleet.begin_step(0.0 if self.health.is_degraded else self.step_wait_s)
        self.scheduler_output = scheduler_output
        try:
            return super().execute_model(scheduler_output)
        except DuckTransportError as error:
            return self._failed_step(error)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The last call of a step."""
        try:
            output = super().sample_tokens(grammar_output)
        except DuckTransportError as error:
            return self._failed_step(error)
        if self.health.is_degraded:
            self.health.looked({})
        if self.figures_writer is not None:
            self.figures_writer.step_done()
        return output

    def step_figures(self) -> dict[str, Any]:
        """For `LLM.collective_rpc`: lanes, drafts, and each duck's times."""
        assert self.fleet is not None
        statistics = self.fleet.statistics()
        slow = self.slow_log.look(statistics)
        return {
            **self.model_runner.figures(),
            "ducks": [
                {**asdict(duck), "is_slow": duck.name in slow} for duck in statistics
            ],
        }

    def shutdown(self) -> None:
        # First: the runner drops the model that the figures are taken from.
        self._stop_figures()
        super().shutdown()
        self.stop_ducks()

    def stop_ducks(self) -> None:
        """Let go of the ducks, and end those that this worker started."""
        atexit.unregister(self.stop_ducks)
        self._stop_figures()
        if self.lookout is not None:
            self.lookout.stop()
        if self.fleet is not None:
            self.fleet.close()
        if self.local_ducks is not None:
            self.local_ducks.stop()

    def duck_figures(self) -> dict[str, Any]:
        """For `LLM.collective_rpc`: memory, what carries the calls, and each duck."""
        assert self.fleet is not None
        infos = self.fleet.describe()
        ducks = [
            DuckFigures(
                name=figures.name,
                shard=str(info.shard),
                num_calls=figures.num_calls,
                rtt_us=figures.rtt_us,
                compute_us=figures.compute_us,
                queue_us=figures.queue_us,
                resident_bytes=info.resident_bytes,
            )
            for figures, info in zip(self.fleet.statistics(), infos, strict=True)
        ]
        return {
            "host_bytes": resident_bytes(),
            "transport": self.fleet.transport,
            "ducks": [asdict(duck) for duck in ducks],
        }

    def mtp_shadow_figures(self) -> dict[str, Any]:
        """For `LLM.collective_rpc`, with mtp_shadow on: how the MTP layer agrees."""
        shadow = self.model_runner.shadow
        return {} if shadow is None else shadow.figures()

    def _failed_step(self, error: DuckTransportError) -> FailedStep:
        assert self.lookout is not None
        ends = {} if self.local_ducks is None else self.local_ducks.ends()
        known = [ends[name] for name in sorted(self.health.lost_names & ends.keys())]
        reason = "; ".join([str(error), *known])
        self.lookout.step_failed(reason)
        logger.error("A step failed, and its requests end: %s", reason)
        self.model_runner.drop_drafts()
        return FailedStep.of(self.scheduler_output, reason)

    def _missing_ducks(self) -> dict[str, str]:
        """Who does not answer, and why, as the lookout wants it."""
        assert self.fleet is not None
        missing = self.fleet.missing(_LOOK_S)
        ends = {} if self.local_ducks is None else self.local_ducks.ends()
        return {name: ends.get(name, reason) for name, reason in missing.items()}

    def _connect(self, config: DuckConfig) -> Fleet:
        model_dir = self.model_config.model
        endpoints = config.endpoints
        if not endpoints:
            logger.info(
                "No duck endpoints given: starting %d local ducks", config.local_ducks
            )
            self.local_ducks = LocalDucks.start(
                model_dir,
                num_ducks=config.local_ducks,
                num_threads=config.local_threads,
                serve_flags=[f"--transport={config.transport}"],
                weight_format=config.local_weight_format,
            )
            self.local_ducks.keep()
            endpoints = self.local_ducks.endpoints
        fleet = Fleet.connect(
            endpoints,
            expect=Checkpoint(model_dir).summary,
            connect_s=config.connect_s,
            deadline_s=config.deadline_s,
            recover_s=config.recover_s,
            reply_dtype=config.reply_dtype,
            transport=config.transport,
            security=ClientSecurity.from_files(
                tls_ca=config.tls_ca,
                tls_cert=config.tls_cert,
                tls_key=config.tls_key,
                token_file=config.token_file,
            ),
            watcher=self.health,
        )
        logger.info(
            "%d ducks are up, called over %s: %s",
            len(endpoints),
            fleet.transport,
            ", ".join(endpoints),
        )
        return fleet

    def _stop_figures(self) -> None:
        if self.figures_writer is not None:
            self.figures_writer.stop()
