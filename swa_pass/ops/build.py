"""Compiles the C++ CPU kernels once, on first use, and keeps them in the user's cache folder.

The compiler is called directly: no build system and no Python headers are needed, only a C++ compiler and the headers
inside the torch package. The hot loops are compiled once for each instruction set and chosen at run time, so a cache
shared by different machines (a home folder on a network) is safe.

Environment:
    SWA_PASS_KERNEL     "torch": never compile or load, use torch ops. "avx512bf16", "avx512", "avx2", "plain": it.
    SWA_PASS_CACHE_DIR  where compiled kernels are kept.
    CXX                 the compiler, instead of the first of c++, g++, clang++ on the PATH.
    SWA_PASS_CXXFLAGS   more flags for it, after ours (`make sanitize`).
    SWA_PASS_EMULATE    "1": also compile "avx512bf16emulated", which does without the instructions of "avx512bf16". For
                        tests: slow, and never chosen by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

log = logging.getLogger("swa_pass")

SOURCES = Path(__file__).parent / "kernels" / "cpu"
COMPILERS = ("c++", "g++", "clang++")
EXPECTED_SECONDS = 50  # on two cores

# name -> flags; best first, "plain" last. binding.cpp knows what each needs from the processor.
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"]
X86_VARIANTS = {
    "avx512bf16": [*AVX512, "-mavx512bf16"],
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "plain": [],
}
EMULATED = {"avx512bf16emulated": [*AVX512, "-DSWA_EMULATE_BF16"]}

_lock = threading.Lock()
_tried = False
_loaded: ctypes.CDLL | None = None
_reason = "not needed so far"


class BuildError(Exception):
    """Why there are no compiled kernels, as a sentence that goes on after "torch ops: "."""


def ensure_kernels() -> bool:
    """Compile (once) and load the C++ CPU kernels. True when they are in use.

    Without a compiler, or when compiling fails, this logs one warning, and the operators keep running on torch ops.
    """
    global _tried, _loaded, _reason
    with _lock:
        if _tried:
            return _loaded is not None
        try:
            _loaded = _load()
        except BuildError as error:
            _reason = str(error)
            if os.environ.get("SWA_PASS_KERNEL") != "torch":
                _notice("swa_pass: no compiled CPU kernel, torch ops are used instead (slower): %s", _reason)
        _tried = True
        return _loaded is not None


def take_over(device: torch.device) -> bool:
    """For the default implementations: True if, and only if, this call just brought in a kernel for `device`."""
    return not _tried and device.type == "cpu" and ensure_kernels()


def kernel_status() -> str:
    """What runs the operators on CPU: "cpp avx512", "torch ops: <why>"."""
    if _loaded is not None:
        return "cpp " + _loaded.swa_pass_variant().decode()
    return "torch ops: " + _reason


def select_variant(name: str) -> bool:
    """For tests and benchmarks: use the variant `name` ("" for the best) from now on; False if this machine cannot."""
    return _loaded is not None and bool(_loaded.swa_pass_select(name.encode()))


def cache_dir() -> Path:
    """The folder that holds compiled kernels."""
    if os.environ.get("SWA_PASS_CACHE_DIR"):
        return Path(os.environ["SWA_PASS_CACHE_DIR"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "swa_pass"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "swa_pass"


def _notice(message: str, *values: object) -> None:
    """A warning that a person sees. Where nobody set up logging (or the logger holds a NullHandler only) it goes to
    stderr: compiling takes a while and must not look like a hang."""
    logger: logging.Logger | None = log
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            log.warning(message, *values)
            return
        logger = logger.parent if logger.propagate else None
    if log.isEnabledFor(logging.WARNING):
        print(message % values, file=sys.stderr, flush=True)


def _load() -> ctypes.CDLL:
    wanted = os.environ.get("SWA_PASS_KERNEL", "")
    if wanted == "torch":
        raise BuildError("SWA_PASS_KERNEL=torch")
    if sys.platform == "win32":
        raise BuildError("the kernels need GCC or Clang, and torch for Windows is built with neither")
    path = _library()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded ({error}); delete it to compile it anew") from error
    failed = None
    for register in (library.swa_pass_register, library.swa_pass_register_linear, library.swa_pass_register_listed):
        register.restype = ctypes.c_char_p
        failed = failed or register()
    if failed:
        raise BuildError(f"torch refused {path} ({failed.decode(errors='replace').splitlines()[0]}); delete it")
    library.swa_pass_variant.restype = ctypes.c_char_p
    library.swa_pass_select.argtypes = [ctypes.c_char_p]
    if wanted and not library.swa_pass_select(wanted.encode()):
        _notice(
            "swa_pass: SWA_PASS_KERNEL=%s: no such variant on this machine; using %s",
            wanted,
            library.swa_pass_variant().decode(),
        )
    return library


def _library() -> Path:
    """Path of the compiled library, from the cache or compiled now."""
    sources = sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h"))
    if not any(p.name == "binding.cpp" for p in sources):
        raise BuildError(f"the kernel sources are missing from {SOURCES}; install swa_pass again")
    parts = [
        torch.__version__,
        platform.machine(),
        sys.platform,
        repr(_variants()),
        repr(_flags()),
        _more_flags(),
    ]
    parts += [p.name + "\0" + p.read_text(encoding="utf-8") for p in sources]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_dir() / key
    compiler = find_compiler()
    if compiler is None:
        for path in sorted(folder.glob("*.so")):  # whichever compiler made it
            return path
        asked = f"CXX={os.environ['CXX']!r} and " if os.environ.get("CXX") else ""
        raise BuildError(
            f"no C++ compiler found (looked for {asked}{', '.join(COMPILERS)} on the PATH); install g++ or clang++, "
            "or set CXX to one"
        )
    version = _run([*compiler, "--version"]).splitlines()[:1]
    name = hashlib.sha256("\0".join(compiler + version).encode()).hexdigest()[:12] + ".so"
    if (folder / name).exists():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="swa_pass-"))
        _notice("swa_pass: cannot write %s (%s); kernels go to %s, for this process", cache_dir(), error, folder)
    with _file_lock(folder / "lock"):
        if not (folder / name).exists():  # another process may have been faster
            _notice("swa_pass: compiling the CPU kernel (once, ~%d s) ...", EXPECTED_SECONDS)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                built = _compile(compiler, Path(work))
                os.replace(built, folder / name)
    return folder / name


def _variants() -> dict[str, list[str]]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {"plain": []}
    return X86_VARIANTS | (EMULATED if os.environ.get("SWA_PASS_EMULATE") == "1" else {})


def _flags() -> list[str]:
    """Flags of the file that sees torch's headers."""
    root = Path(torch.__file__).parent
    release = tuple(int("".join(filter(str.isdigit, n)) or 0) for n in torch.__version__.split(".")[:2])
    return [
        "-O2",
        "-std=c++20" if release >= (2, 10) else "-std=c++17",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{root / 'include'}",
    ]


def _more_flags() -> str:
    return os.environ.get("SWA_PASS_CXXFLAGS", "")


def _compile(compiler: list[str], work: Path) -> Path:
    jobs, more = {}, shlex.split(_more_flags())
    for source in ("binding", "linear_binding", "listed_binding"):
        jobs[f"{source}.o"] = [*compiler, "-fPIC", *_flags(), f"-I{work}", "-c", str(SOURCES / f"{source}.cpp")]
    variants = _variants()
    plainer = {name: flags for name, flags in variants.items() if not name.startswith("avx512bf16")}
    for source, list_file, chosen in (
        ("attend", "variants.inc", variants),
        ("linear", "variants.inc", variants),
        ("listed", "listed_variants.inc", plainer),
    ):
        (work / list_file).write_text("".join(f"SWA_VARIANT({name})\n" for name in chosen), encoding="utf-8")
        for name, flags in chosen.items():
            loops = [*compiler, "-fPIC", "-O3", "-std=c++17", f"-DSWA_ISA={name}", *flags]
            jobs[f"{source}_{name}.o"] = [*loops, "-c", str(SOURCES / f"{source}.cpp")]
    with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        list(pool.map(lambda job: _run([*job[1], *more, "-o", str(work / job[0])]), jobs.items()))
    built = work / "kernels.so"
    link = [*compiler, "-shared", *(str(work / name) for name in jobs), *more, "-o", str(built)]
    link += [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    if sys.platform == "darwin":
        link += ["-undefined", "dynamic_lookup"]
    _run(link)
    return built


def find_compiler() -> list[str] | None:
    """The command that starts the C++ compiler, or None."""
    for candidate in (os.environ.get("CXX", ""), *COMPILERS):
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    return None


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run ({error}); set CXX to a working compiler") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        said = errors[0].strip() if errors else "nothing"
        log.debug("swa_pass: %s\n%s", shlex.join(command), done.stderr)
        raise BuildError(f"{command[0]} failed (it said: {said}); set CXX to another compiler")
    return done.stdout


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """One process compiles, the others wait. Where locks do not work both compile, and the rename decides."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            handle = stack.enter_context(open(path, "w", encoding="utf-8"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
