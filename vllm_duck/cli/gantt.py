"""A picture of overlapped steps: Chrome's trace format, and a PNG of one step.

Two tracks for each lane: the host, and the ducks. Times are of the host's clock; a
duck's span is from sending the request to the arrival of its reply.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_duck.spec_decode.lanes.times import StepRecord

HOST, WAIT, DUCKS = "host", "wait", "ducks"


class Span(NamedTuple):
    """Something that took time in a lane; nanoseconds."""

    kind: str
    lane_idx: int
    layer_idx: int
    begin_ns: int
    end_ns: int


def spans(record: StepRecord, first_layer_idx: int) -> Iterator[Span]:
    """first_layer_idx: the model's first layer with ducks."""
    for lane_idx, lane in enumerate(record.lanes):
        for layer_idx, stages in enumerate(lane.stages, start=first_layer_idx):
            # What the host did after sending, too: it works beside the ducks.
            yield Span(HOST, lane_idx, layer_idx, stages.begin_ns, stages.end_ns)
            yield Span(
                WAIT, lane_idx, layer_idx, stages.wait_begin_ns, stages.wait_end_ns
            )
            if stages.call is None:
                continue
            sent_ns = stages.call.sent_ns
            # Seen late if the host was busy with the other lane.
            arrived_ns = sent_ns + 1000 * stages.call.rtt_us
            yield Span(
                DUCKS,
                lane_idx,
                layer_idx,
                sent_ns,
                min(arrived_ns, stages.wait_end_ns),
            )


def chrome_trace(
    records: Sequence[StepRecord], first_layer_idx: int
) -> dict[str, list[dict[str, Any]]]:
    """For chrome://tracing and ui.perfetto.dev: one process each for host and ducks."""
    everything = [list(spans(record, first_layer_idx)) for record in records]
    begin_ns = min(span.begin_ns for step in everything for span in step)
    processes = {HOST: 0, WAIT: 0, DUCKS: 1}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for pid, name in enumerate((HOST, DUCKS))
    ]
    events += [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": lane_idx,
            "args": {"name": f"lane {lane_idx}"},
        }
        for pid in range(2)
        for lane_idx in range(max(len(record.lanes) for record in records))
    ]
    for step_idx, step in enumerate(everything):
        events += [
            {
                "ph": "X",
                "name": f"{span.kind} {span.layer_idx}",
                "cat": span.kind,
                "pid": processes[span.kind],
                "tid": span.lane_idx,
                "ts": (span.begin_ns - begin_ns) / 1000,
                "dur": (span.end_ns - span.begin_ns) / 1000,
                "args": {"step": step_idx, "layer": span.layer_idx},
            }
            for span in step
        ]
    return {"traceEvents": events}


_MARGIN, _LABEL, _TRACK, _GAP, _WIDTH = 16, 130, 34, 8, 1400
# By lane, around again behind the last.
_COLORS = {
    HOST: ("#3b6fb6", "#c8763a", "#4f8a4c", "#8a5fa8"),
    DUCKS: ("#9dbce3", "#efc3a0", "#b3d6b1", "#cfb8de"),
    WAIT: ("#e3e3e3",),
}


def draw_step(record: StepRecord, first_layer_idx: int, path: Path, title: str) -> None:
    """Write the lanes of one step as a Gantt chart; numbers are layers."""
    from PIL import Image, ImageDraw, ImageFont

    step = list(spans(record, first_layer_idx))
    begin_ns = min(span.begin_ns for span in step)
    end_ns = max(span.end_ns for span in step)
    scale = (_WIDTH - _LABEL - 2 * _MARGIN) / (end_ns - begin_ns)
    top = _MARGIN + 30
    tracks = [(kind, k) for k in range(len(record.lanes)) for kind in (HOST, DUCKS)]
    bottom = top + len(tracks) * (_TRACK + _GAP)
    height = bottom + 40 + _MARGIN
    image = Image.new("RGB", (_WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(16)
    draw.text((_MARGIN, _MARGIN), title, "black", font)

    def x(time_ns: int) -> float:
        return _MARGIN + _LABEL + (time_ns - begin_ns) * scale

    rows = {track: top + i * (_TRACK + _GAP) for i, track in enumerate(tracks)}
    for (kind, lane_idx), y in rows.items():
        draw.text((_MARGIN, y + 8), f"lane {lane_idx} {kind}", "black", font)
    for span in sorted(step, key=lambda span: span.kind != WAIT):
        y = rows[DUCKS if span.kind == DUCKS else HOST, span.lane_idx]
        left, right = x(span.begin_ns), x(span.end_ns)
        if right - left < 1:
            continue
        box = (left, y, right, y + _TRACK)
        colors = _COLORS[span.kind]
        color = colors[span.lane_idx % len(colors)]
        draw.rectangle(box, color, None if span.kind == WAIT else "white")
        label = str(span.layer_idx)
        if span.kind != WAIT and right - left > draw.textlength(label, font) + 4:
            middle = ((left + right) / 2, y + _TRACK / 2)
            ink = "white" if span.kind == HOST else "black"
            draw.text(middle, label, ink, font, anchor="mm")
    legend = f"{(end_ns - begin_ns) / 1e6:.2f} ms; grey: the host waits for the ducks"
    draw.text((_MARGIN + _LABEL, bottom + 4), legend, "black", font)
    image.save(path)
