"""Runs every benchmark, each in a process of its own, and prints one table.

python -m benchmarks [--quick] [--only NAME ...]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> int:
    folder = Path(__file__).parent
    sources = {
        **{path.stem: path for path in folder.glob("*.py")},
        **{path.parent.name: path for path in folder.glob("*/__main__.py")},
    }
    # As benchmarks.common asks of each.
    names = sorted(n for n, p in sources.items() if f'main("{n}"' in p.read_text())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed = []
    for name in options.only:
        print(f"\n== benchmarks.{name}", flush=True)
        found, code = _run(name, options.quick)
        rows.extend(found)
        if code:
            failed.append(name)
    _print_table(rows)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str, quick: bool) -> tuple[list[dict[str, Any]], int]:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", file.name]
        code = subprocess.call(command + ["--quick"] * quick)
        lines = Path(file.name).read_text().splitlines()
    return [json.loads(line) for line in lines], code


def _print_table(rows: list[dict[str, Any]]) -> None:
    print("\n| bench | case | metric | value | unit | peer | peer value | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        peer_value, ratio = row["peer_value"], row["ratio"]
        print(
            f"| {row['bench']} | {row['case']} | {row['metric']} "
            f"| {row['value']:.4g} | {row['unit']} | {row['peer']} "
            f"| {'' if peer_value is None else format(peer_value, '.4g')} "
            f"| {'' if ratio is None else format(ratio, '.2f')} |"
        )


if __name__ == "__main__":
    sys.exit(main())
