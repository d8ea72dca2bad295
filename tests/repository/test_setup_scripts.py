"""Set-up names all it lacks before it starts, and brings headers or does without."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testing.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
# What the scripts call; a test adds to it, or puts something else in its place.
TOOLS = ("bash", "cut", "dirname", "du", "find", "grep", "id", "mkdir", "mktemp", "mv")
TOOLS += ("rm", "sed")


def awk(memory_mb):
    """It reads the free memory, and the free disk."""
    program = shutil.which("awk")
    return f'case $* in *Mem*) echo {memory_mb} ;; *) exec {program} "$@" ;; esac'


WHOLE_MACHINE = {
    "awk": awk(memory_mb=9000),
    "python3": f'case $* in *libnuma*) ;; *) exec {sys.executable} "$@" ;; esac',
    "g++": "echo 12",
    "df": 'echo; echo "disk 9 9 90000 1% /"',
}

pytestmark = pytest.mark.skipif(
    not shutil.which("g++"), reason="only where a clone can be built"
)


def make_path(tmp_path, programs):
    """A folder for PATH with the tools, and with programs given as text of bash."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    for name, text in programs.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def run_script(name, tmp_path, programs, *arguments, **environ):
    """Run a copy of the scripts, so that nothing is written here."""
    scripts = tmp_path / "clone" / "scripts"
    if not scripts.exists():
        shutil.copytree(ROOT / "scripts", scripts)
    return subprocess.run(
        [scripts / name, *arguments],
        env={"PATH": make_path(tmp_path, programs), **environ},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def check_needs(tmp_path, programs, **environ):
    return run_script("check_needs.sh", tmp_path, programs, **environ)


def test_a_machine_with_everything_passes_in_silence(tmp_path):
    done = check_needs(tmp_path, WHOLE_MACHINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_everything_missing_is_named_at_once_with_the_command_that_mends_it(tmp_path):
    bare = {
        "awk": awk(memory_mb=9000),
        "python3": 'case "$*" in *version_info*) echo 3.12 ;; *) exit 1 ;; esac',
        "df": 'echo; echo "disk 9 9 17 99% /"',
        "apt-get": "",
    }
    done = check_needs(tmp_path, bare)
    assert done.returncode == 1
    for what, command in (
        ("g++ 11 or later (g++ is not there", "apt-get install -y g++"),
        ("Python's venv with ensurepip", "apt-get install -y python3.12-venv"),
        ("Python's headers", "apt-get install -y python3.12-dev"),
        ("libnuma.so.1, which vLLM for CPU loads", "apt-get install -y libnuma1"),
        ("MB of disk for /tmp (17 MB are free)", "TMPDIR=/var/tmp make"),
    ):
        assert re.search(f"{re.escape(what)}.*\n.*{re.escape(command)}", done.stderr)


@pytest.mark.parametrize(
    ("manager", "command"),
    [
        ("apt-get", "apt-get install -y g++"),
        ("dnf", "dnf install -y gcc-c++"),
        ("zypper", "zypper --non-interactive install gcc-c++"),
        ("pacman", "pacman -S --noconfirm --needed gcc"),
        ("apk", "apk add g++"),
    ],
)
def test_each_distribution_gets_its_own_command(tmp_path, manager, command):
    done = check_needs(tmp_path, {**WHOLE_MACHINE, "g++": "echo 10", manager: ""})
    assert done.returncode == 1
    assert "g++ 11 or later (g++ is 10;" in done.stderr
    assert command in done.stderr


def test_an_old_python_is_told_of_a_later_one_on_the_path(tmp_path):
    programs = {**WHOLE_MACHINE, "python3": "echo 3.9", "python3.12": ""}
    done = check_needs(tmp_path, programs)
    assert "(python3 is 3.9)\n      -> PYTHON=python3.12 make" in done.stderr


def test_too_little_memory_is_named(tmp_path):
    done = check_needs(tmp_path, {**WHOLE_MACHINE, "awk": awk(memory_mb=500)})
    assert done.returncode == 1
    assert "MB of memory (500 MB are free)" in done.stderr


def get_nghttp2(tmp_path, programs):
    return run_script("get_nghttp2.sh", tmp_path, programs)


def test_headers_that_are_there_are_left_alone(tmp_path):
    done = get_nghttp2(tmp_path, {"g++": ""})
    assert done.returncode == 0
    assert "are there" in done.stdout


def test_passwordless_sudo_installs_the_package(tmp_path):
    installed = tmp_path / "installed"
    done = get_nghttp2(
        tmp_path,
        {
            "g++": f"test -e {installed}",
            "id": "echo 1000",
            "sudo": f'[ "$*" != "dnf install -y libnghttp2-devel" ] || >{installed}',
            "dnf": "exit 1",
        },
    )
    assert done.returncode == 0
    assert "installed: sudo dnf install -y libnghttp2-devel" in done.stdout


APT_WITHOUT_LISTS = {
    "g++": "exit 1",
    "id": "echo 1000",
    "sudo": "exit 1",
    "apt-cache": '[ $# -gt 2 ] && echo "  Depends: libnghttp2-14"',
    "apt-get": """
        case $* in
          *Dir::State::Lists=*update) ;;
          *Dir::State::Lists=*"download libnghttp2-dev libnghttp2-14") >dev.deb ;;
          *) exit 1 ;;
        esac""",
    "dpkg": 'mkdir -p "$3/usr/lib" && >"$3/usr/lib/libnghttp2.so"',
}


def test_an_ordinary_user_unpacks_the_packages_even_without_lists(tmp_path):
    done = get_nghttp2(tmp_path, APT_WITHOUT_LISTS)
    assert done.returncode == 0
    assert "unpacked nghttp2 in build/nghttp2" in done.stdout
    assert (tmp_path / "clone/build/nghttp2/usr/lib/libnghttp2.so").exists()


def test_without_any_way_grpcio_is_announced_in_a_sentence_and_all_is_well(tmp_path):
    done = get_nghttp2(tmp_path, {**APT_WITHOUT_LISTS, "apt-get": "exit 100"})
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert "ducks will be called through grpcio" in done.stdout
    assert "sudo apt-get install -y libnghttp2-dev && make -B venv" in done.stdout


def apt_with(packages, library):
    """Apt without lists, from which these packages bring this library."""
    apt_get = APT_WITHOUT_LISTS["apt-get"]
    return {
        **APT_WITHOUT_LISTS,
        "apt-get": apt_get.replace("libnghttp2-dev libnghttp2-14", packages),
        "dpkg": f'mkdir -p "$3/usr/lib" && >"$3/usr/lib/{library}"',
    }


def test_libnuma_is_unpacked_too_where_it_is_missing(tmp_path):
    programs = {**apt_with("libnuma1", "libnuma.so.1"), "python3": "exit 1"}
    done = run_script("get_libnuma.sh", tmp_path, programs)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "clone/build/libnuma/usr/lib/libnuma.so.1").exists()


def test_openssl_is_unpacked_where_there_is_no_root(tmp_path):
    programs = {
        **apt_with("libssl-dev libssl3", "libssl.so"),
        "apt-cache": '[ $# -gt 2 ] && echo "  Depends: libssl3"',
    }
    done = run_script("get_openssl.sh", tmp_path, programs)
    assert done.returncode == 0, done.stderr
    assert "unpacked openssl in build/openssl" in done.stdout


def test_openssl_that_cannot_be_had_leaves_tls_to_grpcio(tmp_path):
    done = run_script(
        "get_openssl.sh", tmp_path, {**APT_WITHOUT_LISTS, "apt-get": "exit 100"}
    )
    assert done.returncode == 0
    assert "calls with TLS will go through grpcio" in done.stdout
    assert "sudo apt-get install -y libssl-dev && make -B venv" in done.stdout


def whole_set_up(tmp_path, pip):
    """Run all of it, on a machine without nghttp2, with pip given as text of bash."""
    venv = f"""
        mkdir -p "$3/bin" "$3/lib/python3.12/site-packages"
        printf '#!%s\\n%s\\n' {shutil.which("bash")} '{pip}' >"$3/bin/python"
        printf '#!%s\\n%s\\n' {shutil.which("bash")} 'echo $*' >"$3/bin/vllm-duck"
        chmod +x "$3"/bin/*"""
    programs = {
        **WHOLE_MACHINE,
        "python3": f'[ "$2" != venv ] || {{ {venv}; exit; }}; '
        + WHOLE_MACHINE["python3"],
        "g++": "[[ $* == *-E* ]] && echo 12",
        "sudo": "exit 1",
        "id": "echo 1000",
    }
    for tool in ("chmod", "tail"):
        programs[tool] = f'exec {shutil.which(tool)} "$@"'
    return run_script("setup_venv.sh", tmp_path, programs)


def test_set_up_without_nghttp2_succeeds(tmp_path):
    done = whole_set_up(tmp_path, "exit 0")
    assert done.returncode == 0, done.stderr
    assert "ducks will be called through grpcio" in done.stdout
    assert done.stdout.endswith("doctor --fix\n")


def test_a_part_that_fails_ends_set_up_with_the_end_of_its_log(tmp_path):
    noise = "WARNING: Location x is ignored: it is neither a file nor a directory."
    done = whole_set_up(tmp_path, f"echo {noise}; echo no torch for you; exit 1")
    assert done.returncode == 1
    assert "no torch for you" in done.stderr
    assert "is ignored" not in done.stdout + done.stderr
    assert "set-up failed in: PyTorch" in done.stderr


STAND_IN = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <nghttp2/nghttp2.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_stream"};
PyMODINIT_FUNC PyInit__stream() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "version", nghttp2_version(0)->version_num);
  return module;
}
"""


@pytest.fixture
def small_clone(tmp_path):
    """A clone whose native stream is one small file."""
    clone = tmp_path / "small"
    for folder in ("base", "stream"):
        (clone / "vllm_duck" / "csrc" / folder).mkdir(parents=True)
    (clone / "vllm_duck" / "executor").mkdir()
    (clone / "vllm_duck" / "csrc" / "stream" / "module.cpp").write_text(STAND_IN)
    for name in ("block.cpp", "crc32c.cpp"):
        (clone / "vllm_duck" / "csrc" / "base" / name).touch()
    for name in ("setup.py", "README.md", "vllm_duck/version.py"):
        shutil.copy(ROOT / name, clone / name)
    return clone


def build_stream(clone, **environ):
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=clone,
        env={**os.environ, "VLLM_DUCK_EXTENSION": "_stream", **environ},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_setup_links_the_unpacked_nghttp2_and_ships_it(small_clone):
    unpacked = small_clone / "build" / "nghttp2" / "usr"
    make_nghttp2(unpacked, version=4711)
    done = build_stream(small_clone)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(unpacked)
    assert import_stream(small_clone) == "4711"


def test_setup_without_nghttp2_builds_the_rest_and_says_so(small_clone):
    done = build_stream(small_clone, CC="false")
    assert done.returncode == 0, done.stderr
    assert "the native stream is not built" in done.stdout
    assert not list(small_clone.rglob("_stream*.so"))


def test_setup_without_openssl_builds_the_stream_without_tls(small_clone):
    tls = small_clone / "vllm_duck" / "csrc" / "stream" / "tls"
    tls.mkdir()
    (tls / "session.cpp").write_text("#include <openssl/ssl.h>")
    make_nghttp2(small_clone / "build" / "nghttp2" / "usr", version=4711)
    hidden = small_clone / "hidden" / "openssl"
    hidden.mkdir(parents=True)
    (hidden / "ssl.h").write_text("#error as on a machine without it")
    done = build_stream(small_clone, CPATH=str(hidden.parent))
    assert done.returncode == 0, done.stderr
    assert "the native stream is built without TLS" in done.stdout
    assert import_stream(small_clone) == "4711"


def make_nghttp2(prefix, version):
    """A library whose only function nobody takes for the system's."""
    headers, library = prefix / "include" / "nghttp2", prefix / "lib" / "machine"
    headers.mkdir(parents=True)
    library.mkdir(parents=True)
    (headers / "nghttp2.h").write_text(
        "typedef struct { int version_num; } info;\n"
        '#ifdef __cplusplus\nextern "C"\n#endif\n'
        "info* nghttp2_version(int);\n"
    )
    source = prefix / "nghttp2.c"
    source.write_text(
        "#include <nghttp2/nghttp2.h>\n"
        f"static info known = {{{version}}};\n"
        "info* nghttp2_version(int least) { return &known; }\n"
    )
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-I{prefix}/include", source]
        + ["-Wl,-soname,libnghttp2.so.14", "-o", library / "libnghttp2.so.14"],
        check=True,
    )
    (library / "libnghttp2.so").symlink_to("libnghttp2.so.14")


def import_stream(clone):
    command = "from vllm_duck.executor import _stream; print(_stream.version)"
    return subprocess.check_output(
        [sys.executable, "-c", command],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(clone)},
        text=True,
    ).strip()


def extension_names():
    """As setup.py spells them."""
    names = re.findall(r'"(vllm_duck\.[a-z.]+\._\w+)"', (ROOT / "setup.py").read_text())
    assert len(names) == 3
    return names


def test_the_sanitizer_s_copy_has_every_extension():
    script = (ROOT / "scripts" / "sanitize.sh").read_text()
    for name in extension_names():
        assert f" {name.replace('.', '/')}" in script


def test_clean_removes_every_extension(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    built = [
        tmp_path / f"{name.replace('.', '/')}.abi3.so" for name in extension_names()
    ]
    for library in built:
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
    # A `VENV=dir make test` hands its VENV on, and that one must not be cleaned.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    environ.pop("VENV", None)
    (tmp_path / "venv").mkdir()
    command = ["make", "-s", "clean", "VENV=venv"]
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    assert not (tmp_path / "venv").exists()
    assert not any(library.exists() for library in built)
