"""Settings of every test session: CPU, strict broadcasting, quick compiles, nothing written to the user's folders."""

import os
import re
from collections.abc import Iterator

import hypothesis
import jax
import pytest

OPT_IN_MARKERS = ("gpu", "net", "slow")

hypothesis.settings.register_profile("jkv", deadline=None, derandomize=True)  # a first example waits for a compile
hypothesis.settings.load_profile("jkv")


def is_chosen(config: pytest.Config, marker: str) -> bool:
    """True when the -m expression names the marker without a "not" before it."""
    return re.search(rf"(?<!not )\b{marker}\b", config.option.markexpr) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Configures jax here, before a test module is imported and could start a backend."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if is_chosen(config, "gpu"):
        jax.config.update("jax_platforms", "cuda,cpu")
        if jax.default_backend() != "gpu":
            raise pytest.UsageError("-m gpu: jax finds no GPU; needs a machine with one and the cuda extra")
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"  # for commands that tests start
        jax.config.update("jax_platforms", "cpu")
        # Compile time dominates: unoptimised code compiles about twice as fast, and logits move by about 1e-6.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    if config.pluginmanager.has_plugin("cacheprovider"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_compilation_cache_max_size", 2**30)  # bytes; a limit also makes xdist's workers lock it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips the opt-in tests that -m does not choose."""
    for marker in OPT_IN_MARKERS:
        if not is_chosen(config, marker):
            skip = pytest.mark.skip(reason=f"choose it with -m {marker}")
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Drops a module's programs at its end: each holds memory maps, of which a process may have so many."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives the session, and the commands it starts, a user cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user_cache")))
        yield
