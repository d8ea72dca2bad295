"""Makes the repository's training folder importable however pytest is started."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def bundled() -> Path:
    """The folder of the checkpoint that ships with the repository."""
    return ROOT / "models" / "tiny-v32"
