"""`vllm-duck families`: every family, with its models."""

from vllm_duck.cli import main
from vllm_duck.families import all_families


def test_every_family_is_listed_with_its_models(capsys):
    assert main(["families"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for family in all_families():
        assert f"{family.architecture}: {', '.join(family.models)}" in lines
    assert "GlmMoeDsaForCausalLM: GLM-5, GLM-5.1, GLM-5.2, GLM-5.3" in lines
