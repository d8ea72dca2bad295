"""C++ includes go down: duck, stream and host stand side by side on simd and base."""

import re
from pathlib import Path

CSRC = Path(__file__).parents[2] / "vllm_duck" / "csrc"
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
# Folder -> the others that it may include.
ALLOWED = {
    "base": set(),
    "simd": set(),
    "duck": {"base", "simd", "duck/kernels", "stream"},
    "duck/kernels": {"simd"},
    "stream": {"base"},
    "stream/client": {"base", "stream"},
    "stream/server": {"base", "stream"},
    "stream/tls": {"stream"},
    "host": {"base", "simd", "host/gemm", "host/kernels"},
    "host/gemm": {"base", "simd"},
    "host/kernels": {"base", "simd", "host/gemm"},
}
# Of the stream, the duck uses the codec alone, for calls over grpcio.
DUCK_TO_STREAM = {("duck/codec_binding.cpp", "stream/proto.h")}


def includes() -> list[tuple[str, str]]:
    """(file, what it includes), relative to csrc."""
    files = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp")]
    return [
        (path.relative_to(CSRC).as_posix(), name)
        for path in files
        for name in INCLUDE.findall(path.read_text())
    ]


def folder(name: str) -> str:
    return Path(name).parent.as_posix()


def test_every_include_names_a_file_from_csrc_on():
    missing = [(path, name) for path, name in includes() if not (CSRC / name).is_file()]
    assert missing == []


def test_includes_go_along_the_allowed_arrows_alone():
    arrows = {(folder(path), folder(name)) for path, name in includes()}
    assert {start for start, _ in arrows} <= set(ALLOWED)
    assert {(a, b) for a, b in arrows if a != b and b not in ALLOWED[a]} == set()


def test_the_duck_uses_the_codec_of_the_stream_alone():
    found = {
        (path, name)
        for path, name in includes()
        if folder(path) == "duck" and folder(name) == "stream"
    }
    assert found == DUCK_TO_STREAM


def test_the_allowed_arrows_have_no_circle():
    def below(name: str, path: tuple[str, ...] = ()) -> None:
        assert name not in path, f"{' -> '.join(path)} -> {name}"
        for other in ALLOWED[name]:
            below(other, (*path, name))

    for name in ALLOWED:
        below(name)


def test_every_header_is_included():
    headers = {path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*.h")}
    assert headers - {name for _, name in includes()} == set()
