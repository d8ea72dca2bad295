"""How well the stages of two lanes overlap: efficiency and saved share of decode pairs,
speed-up of a prefill; with paced ducks, behind a link, and with a real one."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import Result
from benchmarks.network import delayed
from benchmarks.overlap.engine import MTP1, PREFILL_TOKENS, Engine, one_duck_settings
from benchmarks.overlap.paced_duck import Pace, leave_a_cpu, paced_duck
from benchmarks.overlap.tokens import by_turns, decoding, formula
from testing.engines import held_in_process, in_fresh_process
from testing.network.far_host import far_host

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)


def paced(
    model_dir: Path, num_tokens: int, ratios: Sequence[float]
) -> Iterator[Result]:
    with paced_duck(model_dir) as (endpoint, pace_file):
        duck = (model_dir, endpoint, pace_file)
        yield from _sweep_results(
            "paced", in_fresh_process(sweep, *duck, num_tokens, ratios)
        )
        # At the pace that the sweep leaves, for a lane's row as for a plain token.
        make = (_paced_engine, *duck[:2])
        with (
            held_in_process(*make, None) as plain,
            held_in_process(*make, MTP1) as pairs,
        ):
            found = by_turns({"plain": plain, "lanes": pairs}, num_tokens)
    c_s, d_s = (found["lanes"][stage] for stage in ("stage0_s", "stage1_s"))
    yield decoding(
        f"paced duck_mtp1 with lanes, c = {c_s * 1e3:.2f} ms, d = {d_s * 1e3:.2f} ms",
        found["lanes"]["tok_s"],
        "plain",
        found["plain"]["tok_s"],
        f"ratio >= 1.3; formula {formula(found['lanes']):.2f}",
    )


def _sweep_results(name: str, found: dict[str, dict[str, float]]) -> Iterator[Result]:
    for case, overlap in found.items():
        is_prefill = case.startswith("prefill")
        if is_prefill:
            yield Result(
                case=f"{name} {case}",
                metric="speed_up",
                value=overlap["speed_up"],
                unit="x",
                target="1.4" if "c:d = 1:1" in case else "",
            )
            continue
        yield Result(
            case=f"{name} {case}",
            metric="efficiency",
            value=overlap["efficiency"],
            unit="",
            target={"paced": ">= 0.90", "real": ">= 0.80"}.get(name, ""),
        )
        yield Result(
            case=f"{name} {case}",
            metric="saved_share",
            value=overlap["ratio"],
            unit="",
            target=">= 0.43" if "1:1" in case and name != "link" else "",
        )


def sweep(
    model_dir: Path,
    endpoint: str,
    pace_file: Path,
    num_tokens: int,
    ratios: Sequence[float] = RATIOS,
) -> dict[str, dict[str, float]]:
    """Decode pairs and a prefill at every ratio of c to d; leaves the pace of 1:1."""
    leave_a_cpu()
    engine = Engine(model_dir, {"endpoints": [endpoint]}, MTP1)
    pace = Pace(pace_file)
    found = {}
    engine.decode(16)
    equal_s = 0.0
    for ratio in ratios:
        times = _settle(engine, pace, ratio, num_tokens)
        if ratio == 1:
            equal_s = pace.call_s
        shown = f"1:{ratio:g}" if ratio >= 1 else f"{1 / ratio:g}:1"
        c_ms, d_ms = times["stage0_s"] * 1e3, times["stage1_s"] * 1e3
        found[f"decode c:d = {shown}, c = {c_ms:.2f} ms, d = {d_ms:.2f} ms"] = times
    pace.call_s = 0.0
    c_s = engine.prefill(PREFILL_TOKENS)["stage0_s"]
    pace.call_s = c_s
    seconds = {}
    for overlaps in (False, True):
        # A half chunk is half the work for a duck, too.
        pace.call_s = c_s if overlaps else 2 * c_s
        engine.set_lanes(overlaps)
        seconds[overlaps] = engine.prefill(PREFILL_TOKENS)["seconds"]
    found[f"prefill of {PREFILL_TOKENS} tokens, c:d = 1:1"] = {
        "speed_up": seconds[False] / seconds[True]
    }
    pace.call_s = equal_s
    return found


def _paced_engine(
    model_dir: Path, endpoint: str, speculation: dict[str, str] | None
) -> Engine:
    leave_a_cpu()
    return Engine(model_dir, {"endpoints": [endpoint]}, speculation)


def _settle(
    engine: Engine, pace: Pace, ratio: float, num_tokens: int
) -> dict[str, float]:
    """Bring the pace near d = ratio c; the figures of the decode nearest to it.

    What a call takes beside the sleep, and c beside a busy duck, vary with the pace: so
    it is set by what was measured.
    """
    tries = []
    for _ in range(6):
        times = engine.decode(num_tokens)
        missing_s = ratio * times["stage0_s"] - times["stage1_s"]
        error = abs(missing_s) / times["stage1_s"]
        tries.append((error, pace.call_s, times))
        if error < 0.05:
            break
        pace.call_s = max(0.0, pace.call_s + missing_s)
    _, pace.call_s, times = min(tries, key=lambda each: each[0])
    return times


def behind_a_link(model_dir: Path, num_tokens: int) -> Iterator[Result]:
    with contextlib.ExitStack() as stack:
        try:
            far = stack.enter_context(far_host())
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"link: left out, no network namespace here ({error})")
            return
        duck = f"{far.addresses[0]}:7100"
        endpoint, pace_file = stack.enter_context(
            paced_duck(model_dir, listen=duck, prefix=far.inside)
        )
        if not far.delays:
            endpoint = f"{far.addresses[0]}:7101"
            stack.enter_context(delayed(endpoint, duck, far.inside))
        found = in_fresh_process(sweep, model_dir, endpoint, pace_file, num_tokens)
        yield from _sweep_results("link", found)


def real(model_dir: Path, num_tokens: int) -> Iterator[Result]:
    found = in_fresh_process(measure_real, model_dir, num_tokens)
    c_ms, d_ms = found["stage0_s"] * 1e3, found["stage1_s"] * 1e3
    case = f"decode, c = {c_ms:.2f} ms, d = {d_ms:.2f} ms"
    yield from _sweep_results("real", {case: found})


def measure_real(model_dir: Path, num_tokens: int) -> dict[str, float]:
    engine = Engine(model_dir, one_duck_settings(), MTP1)
    engine.decode(16)
    return engine.decode(num_tokens)
