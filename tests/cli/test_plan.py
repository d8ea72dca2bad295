"""`vllm-duck plan --host`: the command of docs/planning.md, and what it refuses."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_duck.cli import main

DOCS = Path(__file__).parents[2] / "docs"


def _documented() -> list[list[str]]:
    """The commands of the page, without the program's name."""
    page = (DOCS / "planning.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^vllm-duck (plan .*)$", page, re.MULTILINE)
    return [shlex.split(command) for command in commands]


@pytest.mark.parametrize("command", _documented(), ids=" ".join)
def test_the_documented_commands_predict(tiny_model, monkeypatch, capsys, command):
    monkeypatch.chdir(tiny_model)
    assert main(command) == 0
    out = capsys.readouterr().out
    if "--json" in command:
        assert json.loads(out)["step"]["tok_s"] > 0
    else:
        assert "held up by" in out


def test_the_page_has_its_commands():
    assert len(_documented()) == 3


def test_int4_takes_less_of_a_duck(tiny_model, capsys):
    found = []
    for flags in ([], ["--weight-format", "int4"]):
        asked = ["plan", str(tiny_model), "--host-gbs", "20", "--json", *flags]
        assert main(asked) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["duck_bytes"] < found[0]["duck_bytes"]
    assert "int4 experts" in [each["what"] for each in found[0]["changes"]]
    assert "int4 experts" not in [each["what"] for each in found[1]["changes"]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "gtx1080"], "--host must be one of"),
        (["--host", "rtx5090", "--host-gbs", "4"], "--host NAME of a GPU, or"),
        (["--host-gbs", "4", "--weights", "2,1"], "a prediction is of equal ducks"),
    ],
)
def test_what_cannot_be_predicted_is_refused(tiny_model, capsys, flags, message):
    assert main(["plan", str(tiny_model), *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafts", "8"], "expected 0 to 7 or auto"),
        (["--acceptance", "1.5"], "expected a number from 0 to 1"),
        (["--link-gbps", "0"], "must be more than 0"),
    ],
)
def test_odd_numbers_are_refused(tiny_model, capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["plan", str(tiny_model), "--host-gbs", "4", *flags])
    assert message in capsys.readouterr().err


def test_a_prediction_needs_neither_torch_nor_vllm(tiny_model):
    script = (
        "import sys; from vllm_duck.cli import main; "
        f"main(['plan', {str(tiny_model)!r}, '--host-gbs', '4']); "
        "sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert done.returncode == 0
