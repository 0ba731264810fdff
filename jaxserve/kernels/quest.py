"""Quest: the pages whose keys can have the largest products with the query (Tang et al. 2024, arXiv:2406.10774).

A page has keys between `least` and `largest`, so no product with a query q is above

    sum_h max(q_h * least_h, q_h * largest_h)

and a page whose bound is small can be left out. Each key/value head reads the newest page, and of those before it the
ones of the largest bounds; of several query heads of a key/value head the largest bound counts.

In two things this is not the paper: pages are left out in all layers, where the paper reads all in the first two, and
query heads that share keys choose together, where the models of the paper have none.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.errors import ConfigError
from jaxserve.kernels.selection import PageSummaries, SelectorOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quest:
    """`Selector`. `num_pages`: that a head reads, the newest among them. Of equal bounds the older page comes first."""

    num_pages: int
    page_size: int

    def select(
        self,
        query: Float[Array, "R N H"],
        summaries: PageSummaries,
        tables: Int[Array, "R P"],
        lengths: Int[Array, " R"],
    ) -> Bool[Array, "R K P"]:
        num_rows, num_columns = tables.shape
        kv_heads = summaries.least.shape[1]
        if self.num_pages >= num_columns:
            return jnp.ones((num_rows, kv_heads, num_columns), bool)
        bounds = upper_bounds(query, summaries, tables)
        before = jnp.arange(num_columns) < (lengths[:, None, None] - 1) // self.page_size
        bounds = jnp.where(before, bounds, -jnp.inf)
        _, best = jax.lax.top_k(bounds, self.num_pages - 1)  # [R, K, C]
        rows, heads = jnp.ogrid[:num_rows, :kv_heads]
        return jnp.zeros(bounds.shape, bool).at[rows[..., None], heads[..., None], best].set(True)


def upper_bounds(
    query: Float[Array, "R N H"], summaries: PageSummaries, tables: Int[Array, "R P"]
) -> Float[Array, "R K P"]:
    """No product of a key of the page with a query head that reads this key/value head is above it, up to rounding."""
    num_rows, num_columns = tables.shape
    kv_heads, head_dim = summaries.least.shape[1:]
    grouped = query.astype(jnp.float32).reshape(num_rows, kv_heads, -1, head_dim)
    # max(q * a, q * b) of a <= b is q * b where q is above 0, else q * a: one product, whose order of sums on CPUs does
    # not depend on the other rows (`xla_softmax`).
    signs = jnp.concatenate([jnp.maximum(grouped, 0), jnp.minimum(grouped, 0)], axis=-1)  # [R, K, G, 2H]
    keys = jnp.concatenate([summaries.largest[tables], summaries.least[tables]], axis=-1)  # [R, P, K, 2H]
    products = jax.lax.dot_general(
        signs.reshape(num_rows * kv_heads, -1, 2 * head_dim),
        keys.transpose(0, 2, 3, 1).reshape(num_rows * kv_heads, 2 * head_dim, num_columns),
        (((2,), (1,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
    )
    return products.max(axis=1).reshape(num_rows, kv_heads, num_columns)


def make_quest(options: SelectorOptions) -> Quest:
    """Raises ConfigError without `attention.pages`."""
    if options.num_pages is None:
        raise ConfigError(
            "attention.select is quest, but attention.pages is not set: say how many pages a head reads, the newest "
            "included, for example 32"
        )
    return Quest(num_pages=options.num_pages, page_size=options.page_size)
