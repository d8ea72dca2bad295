"""What a container holds that it would give back: its page cache."""

from pathlib import Path

_ROOT = Path("/")
# Of cgroups v2 and v1, and the words for pages that are only copies of files.
_STATS = (
    ("sys/fs/cgroup/memory.stat", {"active_file", "inactive_file"}),
    (
        "sys/fs/cgroup/memory/memory.stat",
        {"total_active_file", "total_inactive_file"},
    ),
)


def page_cache_bytes(root: Path = _ROOT) -> int:
    """Bytes of files that the container's memory usage counts; 0 if that is unknown."""
    for name, words in _STATS:
        try:
            lines = (root / name).read_text().splitlines()
        except OSError:
            continue
        pairs = [line.partition(" ") for line in lines]
        return sum(int(value) for word, _, value in pairs if word in words)
    return 0
