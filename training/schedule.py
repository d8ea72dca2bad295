"""The training schedule: two rounds, their phases, and the rate of each step."""

from dataclasses import dataclass

from training.corpus import Mix

TOKENS_PER_STEP = 4096
WARMUP_STEPS = 20


@dataclass(frozen=True)
class Phase:
    """A stretch of training that ends at fraction `until` of the run.

    lengths: row lengths in tokens, taken in turn. kd_weight: weight of the MTP
    layer's soft targets; 0 leaves the MTP layer out of the step. teach_every: every
    n-th step trains the indexer; 0 never. bias_step: router balance step.
    """

    name: str
    until: float
    lengths: tuple[int, ...]
    is_sparse: bool
    kd_weight: float
    teach_every: int
    bias_step: float
    mix: Mix


CHAINS_FIRST = Mix(entries=0.20, topics=0.07)
BALANCED = Mix(entries=0.34, topics=0.09)
# Cheap steps first: a step of the last phase costs about three of the first. Chains
# come first too, since digits are copied and added right only after long practice.
PHASES = (
    Phase("trunk", 0.42, (256,), False, 0.0, 0, 0.01, CHAINS_FIRST),
    Phase("draft", 0.70, (256,), False, 0.3, 0, 0.01, BALANCED),
    Phase("index", 0.79, (256,), False, 0.3, 1, 0.003, BALANCED),
    Phase("sparse", 0.93, (512, 256), True, 0.6, 2, 0.003, BALANCED),
    Phase("long", 1.0, (1024, 512, 1536), True, 0.6, 2, 0.001, BALANCED),
)
# More documentation, so that it is known by heart and drafted well; and the chains that
# the first round leaves behind (training.chains.HARD_WEIGHTS).
REHEARSAL = Mix(entries=0.46, topics=0.06, has_hard_chains=True)
REHEARSAL_PHASES = (
    Phase("rehearse", 0.85, (256, 512), True, 0.6, 2, 0.002, REHEARSAL),
    Phase("rehearse long", 1.0, (1024, 256), True, 0.6, 2, 0.001, REHEARSAL),
)


@dataclass(frozen=True)
class Round:
    """One training with a fresh optimizer.

    num_steps: of the bundled checkpoint. peak: of the learning rate factor, held until
    fraction decay_from of the run.
    """

    num_steps: int
    phases: tuple[Phase, ...]
    peak: float
    decay_from: float

    def phase_at(self, progress: float) -> Phase:
        """Return the phase at progress, 0 at the first step and 1 after the last."""
        phases = self.phases
        return next((phase for phase in phases if progress < phase.until), phases[-1])

    def rate_at(self, progress: float, step: int) -> float:
        """Return the learning rate factor: warm-up, constant, then linear to 2 %."""
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        decay = (1 - progress) / (1 - self.decay_from)
        return self.peak * warmup * max(0.02, min(1.0, decay))


ROUNDS = (
    Round(num_steps=850, phases=PHASES, peak=1.0, decay_from=0.4),
    Round(num_steps=300, phases=REHEARSAL_PHASES, peak=0.5, decay_from=0.1),
)
