"""The families' tiny checkpoints and their oracles."""

import pytest

from testing.families import glm
from testing.families.glm_oracle import GlmOracle, write_exact


@pytest.fixture(scope="package")
def glm_model(tiny_model, tmp_path_factory):
    return glm.write_checkpoint(tmp_path_factory.mktemp("glm") / "model", tiny_model)


@pytest.fixture(scope="package")
def glm_exact(glm_model, tmp_path_factory):
    return write_exact(glm_model, tmp_path_factory.mktemp("glm-exact"))


@pytest.fixture
def glm_oracle(glm_exact):
    """One that the test may change."""
    return GlmOracle(glm_exact)
