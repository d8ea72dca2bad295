"""Makes the repository's training folder importable however pytest is started."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def bundled() -> Path:
    """The folder of the checkpoint that ships with the repository."""
    folder = ROOT / "models" / "tiny-v32"
    if not folder.is_dir():
        pytest.skip("no models/tiny-v32: python -m training.make models/tiny-v32")
    return folder
