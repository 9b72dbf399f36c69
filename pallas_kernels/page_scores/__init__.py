"""Bounds of the products of queries with the keys of pages, or products with one key for each."""

from jax import Array

from pallas_kernels.dispatch import Implementation, run


def page_scores(
    q: Array, high: Array, low: Array | None = None, *, implementation: Implementation | str = "xla"
) -> Array:
    """The sum over channels of the larger of ``q * high`` and ``q * low``, unscaled; without `low`, of ``q * high``.

    With the largest and smallest number of a page's keys in every channel this is no less than the product of the query
    with any of them (Quest, https://arxiv.org/abs/2406.10774).

    Args:
        q: queries `[B, H, G, D]`.
        high, low: `[B, H, P, D]`.
        implementation: what runs it.

    Returns:
        float32 `[B, H, G, P]`.
    """
    return run("page_scores", implementation, q, high, low)
