"""The wheel and the sdist: what is inside, and that both, and an editable install, work in an environment of their own.

The environment borrows torch and transformers from the one that runs the tests, so that it costs seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import swa_pass

ROOT = Path(__file__).resolve().parent.parent
CHECK = """
import swa_pass, swa_pass.integrations, torch
from swa_pass.demo import document
from importlib import resources
kernels = [f.name for d in resources.files("swa_pass").joinpath("ops", "kernels").iterdir() if d.is_dir()
           for f in d.iterdir() if f.name.endswith(".cpp")]
assert kernels, "no C++ sources"
assert len(document()) > 5000
assert torch._dynamo.lookup_backend("swa_pass") is swa_pass.api.dynamo_backend
print(swa_pass.__file__)
print(swa_pass.integrations.__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command without the caller's import path; returns what it printed, or fails with it."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, so that building leaves nothing behind in it."""
    copy = tmp_path_factory.mktemp("source") / "swa_pass"
    unwanted = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=unwanted)
    return copy


@pytest.fixture(scope="module")
def dist(source: Path) -> Path:
    """A folder with the sdist, and the wheel that was built from that sdist."""
    pytest.importorskip("build", reason="the build tool is in the dev extra: pip install -e '.[dev]'")
    out = source.parent / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=source)
    return out


def borrowed_environment(folder: Path) -> Path:
    """A virtual environment that sees this one's packages, but none of its editable installs. Returns its python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # A path line does not run the .pth files of the folder it names: an editable swa_pass stays out.
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(site, "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    run(
        sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet",
        "--no-deps", "--no-build-isolation", "--force-reinstall", *what, cwd=python.parent,
    )  # fmt: skip


def test_wheel_holds_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"swa_pass-{swa_pass.__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {"swa_pass", f"swa_pass-{swa_pass.__version__}.dist-info"}
    for wanted in ("swa_pass/integrations/__init__.py", "swa_pass/demo/keepers_log.txt", "swa_pass/py.typed"):
        assert wanted in names
    kernels = {
        p.relative_to(ROOT).as_posix() for e in ("cpp", "h") for p in ROOT.glob(f"swa_pass/ops/kernels/**/*.{e}")
    }
    assert kernels
    assert kernels <= set(names)
    modules = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("swa_pass/**/*.py")}
    modules |= {f"swa_pass/{p.relative_to(ROOT).as_posix()}" for p in ROOT.glob("integrations/**/*.py")}
    assert modules <= set(names), "a package is missing its __init__.py"
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_holds_what_the_wheel_needs_and_no_weights(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    for wanted in ("pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE", "integrations/__init__.py"):
        assert wanted in names
    assert not [n for n in names if n.startswith(("tests/", ".")) or n.endswith((".safetensors", ".gguf", ".bin"))]
    assert sdist.stat().st_size < 2_000_000


def test_wheel_works_in_an_environment_of_its_own(dist: Path, tmp_path: Path) -> None:
    python = borrowed_environment(tmp_path / "env")
    install(python, *dist.glob("*.whl"))
    for line in run(python, "-c", CHECK, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(tmp_path / "env"), f"imported from elsewhere: {line}"
    assert "demo" in run(python.parent / "swa-pass", "--help", cwd=tmp_path)


def test_editable_install_has_the_integrations_too(source: Path, tmp_path: Path) -> None:
    python = borrowed_environment(tmp_path / "env")
    install(python, "--editable", source)
    package, integrations = run(python, "-c", CHECK, cwd=tmp_path).splitlines()
    assert Path(package) == source / "swa_pass" / "__init__.py"
    assert Path(integrations) == source / "integrations" / "__init__.py"
