"""`make demo` says what it is doing, and nothing that means nothing to a user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo

DEMO = Path(demo.__file__)


@pytest.mark.vllm
def test_the_demo_shows_stages_answers_and_figures_and_nothing_else():
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_LOGGING")}
    done = subprocess.run(
        [sys.executable, DEMO], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    start, _, rest = done.stdout.partition("ready\n")
    stages = [line.partition(" s  ")[2] for line in start.splitlines()]
    expected = (
        "importing vLLM",
        "starting the engine",
        "KV caches",
        "No duck endpoints given: starting 2 local ducks",
        "2 ducks are up",
        "Host read",
        "Host read",
        "warming up",
        "",
    )
    assert len(stages) == len(expected)
    for stage, beginning in zip(stages, expected, strict=True):
        assert stage.startswith(beginning)
    for question in demo.QUESTIONS:
        assert f"> {question}" in rest
    assert "47 + 38 = 85" in rest
    for figure in ("decode ", "drafts ", "lanes ", "host ", "duck "):
        assert f"\n{figure}" in rest


def test_a_user_s_own_choices_win():
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "3"}
    demo.choose(environ)
    assert environ == {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize("flags", [[], ["--verbose"]], ids=str)
def test_verbose_leaves_vllm_s_log_alone(monkeypatch, flags):
    seen = []

    def stop(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["demo.py", *flags])
    monkeypatch.setattr(demo, "choose", lambda environ: None)
    monkeypatch.setattr(demo, "hush", seen.append)
    monkeypatch.setattr(demo, "start", stop)
    with pytest.raises(KeyboardInterrupt):
        demo.main()
    assert seen == ([] if flags else [os.environ])
