"""Settings for all tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch

# Without a GPU, Triton kernels run in its interpreter, on CPU tensors. To be said before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The kernels for AVX512-BF16 are tested everywhere, with the instruction emulated.
os.environ.setdefault("SWA_PASS_EMULATE", "1")

# pytest hangs its handlers on every logger that does not propagate. Dynamo takes a handler on this one as the wish for
# structured traces, and then spends a third of a capture on writing them.
logging.getLogger("torch.__trace").propagate = True


def pytest_configure(config: pytest.Config) -> None:
    # Under xdist, tests of one family go to one process: what is captured there serves all of them.
    if config.getoption("dist", "no") == "load":
        config.option.dist = "loadgroup"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "habana" in item.path.parts:
            continue  # tests of another environment, with groups of their own
        family = getattr(item, "callspec", None) and item.callspec.params.get("family")
        item.add_marker(pytest.mark.xdist_group(family if family in ("mistral", "gemma3") else item.path.stem))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Under xdist the processes share the cores: threads of one only get in the way of the others."""
    before = torch.get_num_threads()
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
