"""Times one benchmark in two trees by turns, and prints the ratios of their medians.

    python scripts/compare_trees.py OTHER_TREE host remote_call

OTHER_TREE is another checkout of vllm_duck with its extensions built (`git worktree add
OTHER_TREE REVISION`, then `python setup.py build_ext --inplace` in it). Machines drift:
only the ratio of one run says something, and it is noise as long as `lowest` and
`highest`, the extremes over the turns, are on both sides of 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the tree to compare this one with")
    parser.add_argument("names", nargs="+", help="benchmarks that both trees have")
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    for name in args.names:
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for turn in range(args.turns):
            print(f"{name}: turn {turn + 1} of {args.turns}", file=sys.stderr)
            # Neither side always comes first.
            trees = (ROOT, args.other.resolve())[:: 1 if turn % 2 else -1]
            values = {tree: measure(tree, name) for tree in trees}
            ours, other = values[ROOT], values[args.other.resolve()]
            for case in ours.keys() & other.keys():
                found[case].append((ours[case], other[case]))
        for case, pairs in sorted(found.items()):
            print_ratio(name, case, pairs)
    return 0


def measure(tree: Path, name: str) -> dict[str, float]:
    """Values by case, in whatever unit the benchmark has."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
        subprocess.run(
            [*command, "--json", file.name],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        rows = [json.loads(line) for line in Path(file.name).read_text().splitlines()]
    return {
        f"{row['case']} {row['metric']} ({row['unit']})": row["value"] for row in rows
    }


def print_ratio(name: str, case: str, pairs: list[tuple[float, float]]) -> None:
    ours, other = (median(values) for values in zip(*pairs, strict=True))
    ratios = [a / b for a, b in pairs if b]
    if not ratios or not other:
        return
    print(
        f"{name} {case}: {ours:.4g} / {other:.4g} = {ours / other:.3f} "
        f"(lowest {min(ratios):.3f}, highest {max(ratios):.3f})"
    )


if __name__ == "__main__":
    sys.exit(main())
