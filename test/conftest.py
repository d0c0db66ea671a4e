"""What every test gets: its own kernel cache, and no GPU tests where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU of compute capability 9.0 or 10.0")
    elif torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
        major, minor = torch.cuda.get_device_capability()
        skip = pytest.mark.skip(reason=f"this GPU has compute capability {major}.{minor}, not 9.0 or 10.0")
    else:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A kernel cache of this session's own, so that no test leans on an earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_BACKEND_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code and an empty Inductor cache, before and after: what tests of counters need."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    counters.clear()
    with fresh_cache():
        yield
    torch._dynamo.reset()
