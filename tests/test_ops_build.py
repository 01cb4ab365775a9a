"""Building, caching and choosing the C++ kernels, in processes of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from swa_pass.ops import build

ROOT = Path(__file__).resolve().parents[1]

# Only the operators: `import swa_pass` would bring in transformers, which takes seconds and is not the subject.
ONLY_OPS = """
import sys, types
package = types.ModuleType("swa_pass")
package.__path__ = [{package!r}]
sys.modules["swa_pass"] = package
"""

RUN = """
import torch
sys.path.insert(0, {tests!r})
from swa_pass import ops
assert ops.kernel_status() == "torch ops: not needed so far", ops.kernel_status()  # import compiles nothing
from test_ops_common import make_case
from swa_pass.ops import reference
for window in (8, 0):
    case = make_case(window=window, lengths=[20, 5], tokens=2)
    want = reference.attend(*case.args(), **case.options)
    torch.testing.assert_close(ops.attend_append(*case.args(), **case.options), want)
print("status:", ops.kernel_status())
"""


def _run(**env: str) -> tuple[str, str]:
    """(status, what was logged) of a process with this environment."""
    variables = {k: v for k, v in os.environ.items() if k not in ("CXX", "SWA_PASS_KERNEL")}
    variables.update({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env})
    code = (ONLY_OPS + RUN).format(tests=str(ROOT / "tests"), package=str(ROOT / "swa_pass"))
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().removeprefix("status: "), done.stderr


def test_without_a_compiler(tmp_path: Path) -> None:
    blocked = tmp_path / "file"  # a cache folder that cannot exist, on top
    blocked.write_text("")
    status, said = _run(PATH=str(tmp_path), SWA_PASS_CACHE_DIR=str(blocked))
    assert status.startswith("torch ops: no C++ compiler found (looked for c++, g++, clang++")
    assert said.count("no compiled CPU kernel") == 1
    assert "install g++ or clang++" in said


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: no such thing" >&2\nexit 1\n')
    broken.chmod(0o755)
    status, said = _run(CXX=str(broken), SWA_PASS_CACHE_DIR=str(tmp_path / "cache"))
    assert "failed (it said: x.cpp:1: error: no such thing)" in status
    assert said.count("compiling the CPU kernel") == 1
    assert said.count("no compiled CPU kernel") == 1
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_torch_on_request() -> None:
    status, said = _run(SWA_PASS_KERNEL="torch")
    assert status == "torch ops: SWA_PASS_KERNEL=torch"
    assert "swa_pass" not in said


@pytest.fixture
def built() -> Path:
    if not build.ensure_kernels():
        pytest.skip(build.kernel_status())
    assert build._loaded is not None
    return Path(build._loaded._name)


@pytest.mark.parametrize("variant", ["plain", "nonsense"])
def test_the_cache_serves_processes_without_a_compiler(built: Path, tmp_path: Path, variant: str) -> None:
    status, said = _run(PATH=str(tmp_path), SWA_PASS_CACHE_DIR=str(built.parent.parent), SWA_PASS_KERNEL=variant)
    if variant == "plain":
        assert status == "cpp plain"
        assert said == ""
    else:
        assert status.startswith("cpp ")
        assert said.count("no such variant") == 1


def test_two_processes_compile_once(built: Path, tmp_path: Path) -> None:
    """The compiler is a script that notes its calls and links by copying the library that exists already."""
    fake, notes = tmp_path / "c++", tmp_path / "notes"
    fake.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version*) echo fake 1; exit 0;; esac\n'
        "for last; do :; done\n"  # the last argument
        f'echo "$1" >> {shlex.quote(str(notes))}\n'
        'case "$1" in -shared) sleep 1;; *) : > "$last"; exit 0;; esac\n'
        'while [ "$1" != -o ]; do shift; done\n'
        f'cp {shlex.quote(str(built))} "$2"\n'
    )
    fake.chmod(0o755)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CXX": str(fake), "SWA_PASS_CACHE_DIR": str(tmp_path / "cache")}
    variables.pop("SWA_PASS_KERNEL", None)
    code = ONLY_OPS.format(package=str(ROOT / "swa_pass")) + "from swa_pass.ops import *; print(ensure_kernels())"
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate(timeout=120)[0].strip() for p in both] == ["True", "True"]
    assert notes.read_text().count("-shared") == 1
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1
    assert [p.name for p in (tmp_path / "cache").rglob("*") if p.is_dir() and p.parent != tmp_path / "cache"] == []
