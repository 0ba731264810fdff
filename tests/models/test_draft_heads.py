"""Draft heads give the logits of an independent NumPy computation, over a paged cache and cut over devices."""

import functools
import json
from pathlib import Path

import draft_files
import draft_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_files import SIZES
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import load_file

from jaxserve.kernels.paged_attention import AttentionBatch
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models import decoder_config, load_model, plan_model, read_checkpoint
from jaxserve.models.decoder import CachePlace
from jaxserve.models.drafts import load_head
from jaxserve.models.drafts.loading import LoadedHead
from jaxserve.models.loading import LoadedModel
from jaxserve.models.rope import rope_table
from jaxserve.models.sharding import MESH_AXES, specs_for
from jaxserve.runtime.mesh import on_mesh

FIXTURE = Path(__file__).parents[1] / "fixtures" / "llama"
PAGE = 4
TOKENS = [5, 99, 7, 3, 120, 64, 11, 2, 45]  # the last has not gone through the target
THEN = [31, 8, 77]


def mesh_of(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]).reshape(1, count), MESH_AXES)


@functools.cache
def target(count: int = 1) -> LoadedModel:
    return load_model(FIXTURE, mesh=mesh_of(count))


def loaded(path: Path, count: int = 1) -> LoadedHead:
    model = target(count)
    return load_head(
        path, model.config, "LlamaForCausalLM", partition=model.partition, mesh=model.mesh, dtype=np.dtype("float32")
    )


def hidden_states(seed: int = 1) -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    states = rng.normal(0, 1, (4, len(TOKENS) - 1, SIZES.hidden)).astype(np.float32)
    return states[0], [*states[1:]]


def batch_of(start: int, count: int) -> AttentionBatch:
    """One row of `count` tokens from position `start` on, in pages that do not follow each other."""
    return AttentionBatch(
        positions=jnp.arange(start, start + count),
        token_rows=jnp.zeros(count, jnp.int32),
        q_starts=jnp.asarray([0, count]),
        context_lens=jnp.asarray([start + count]),
        block_tables=jnp.asarray([[3, 1, 5, 2]]),
        page_size=PAGE,
        decode_only=False,
    )


def chain(head: LoadedHead, count: int) -> list[np.ndarray]:
    """As `draft_oracle.Head.chain`: the slots of known tokens are written, the others run one by one."""
    model, (hidden, taps) = target(count), hidden_states()
    kv_heads = head.partition.padded.num_kv_heads

    def run(weights, state, cache, hidden, *taps):
        decoder, module = nnx.merge(model.graphdef, weights), nnx.merge(head.graphdef, state)
        known = len(TOKENS) - 1
        tokens = jnp.asarray(TOKENS)
        features = module.first_features(hidden, taps)
        features = jnp.concatenate([jnp.zeros_like(features[:1]), features])
        cache = module.write(
            module.token_embeddings(tokens[:known], decoder), features[:known], cache, batch_of(0, known), XLA_ATTENTION
        )
        feature, found = features[known:], []
        for place, token in enumerate([TOKENS[-1], *THEN]):
            e = module.token_embeddings(jnp.asarray([token]), decoder)
            x, cache = module(e, feature, cache, batch_of(known + place, 1), XLA_ATTENTION)
            feature = module.next_features(x)
            found.append(module.logits(x, decoder)[0])
        return found

    cache = XLA_ATTENTION.init_cache(8, PAGE, kv_heads, SIZES.head_dim, jnp.float32)
    by_heads, whole = PartitionSpec(None, MESH_AXES), PartitionSpec()
    out = PartitionSpec(MESH_AXES)
    specs = (specs_for(model.state), specs_for(head.state), jax.tree.map(lambda _: by_heads, cache), whole)
    fn = on_mesh(run, model.mesh, (*specs, *(whole for _ in taps)), out)
    found = jax.jit(fn)(model.state, head.state, cache, hidden, *taps)
    return [np.asarray(logits)[: SIZES.vocab] for logits in found]


def expected(kind: str, tensors: dict, **flags: bool) -> list[np.ndarray]:
    files = load_file(FIXTURE / "model.safetensors")
    table = tensors.get("embed_tokens.weight", files["model.embed_tokens.weight"])
    head = draft_oracle.Head(kind, tensors, SIZES, table, files["lm_head.weight"], **flags)
    hidden, taps = hidden_states()
    return head.chain(TOKENS, hidden, taps, THEN)


def check(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        kept = np.isfinite(want)
        assert np.abs(got[kept] - want[kept]).max() < 2e-4 * max(1.0, np.abs(want[kept]).max() / 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flags", "count"),
    [
        ("original", {}, 3),
        ("speculators", {"norm_before_residual": True}, 1),
        ("speculators", {"norm_output": True, "norm_before_fc": True}, 3),
    ],
)
def test_eagle3(layout: str, flags: dict, count: int, tmp_path: Path) -> None:
    values, tensors = draft_files.eagle3(layout, **flags)
    head = loaded(draft_files.write(tmp_path, values, tensors), count)
    assert head.config.taps == (0, 1, 2)
    check(chain(head, count), expected("eagle3", tensors, **flags))


def test_eagle3_of_the_whole_vocabulary(tmp_path: Path) -> None:
    values, tensors = draft_files.eagle3(draft_vocab=SIZES.vocab)
    head = loaded(draft_files.write(tmp_path, values, tensors))
    assert not head.config.is_mapped
    check(chain(head, 1), expected("eagle3", tensors))


@pytest.mark.parametrize(("bias", "count"), [(True, 2), (False, 1)])
def test_eagle(bias: bool, count: int, tmp_path: Path) -> None:
    values, tensors = draft_files.eagle(bias=bias)
    head = loaded(draft_files.write(tmp_path, values, tensors), count)
    check(chain(head, count), expected("eagle", tensors))


def test_mtp(tmp_path: Path) -> None:
    values, tensors = draft_files.mtp()
    head = loaded(draft_files.write(tmp_path, values, tensors))
    check(chain(head, 1), expected("mtp", tensors))


def test_mtp_beside_the_model(tmp_path: Path) -> None:
    """One directory, one config: the model leaves the layer alone, and the head the model's tensors."""
    _, tensors = draft_files.mtp(ffn=80)
    values = json.loads((FIXTURE / "config.json").read_text(encoding="utf-8")) | {"num_nextn_predict_layers": 1}
    path = draft_files.write(tmp_path, values, tensors | load_file(FIXTURE / "model.safetensors"))
    family, config = decoder_config(read_checkpoint(path))
    head = loaded(path)
    assert head.config.decoder.layers[0].mlp.size == 80
    plan_model(read_checkpoint(path))  # which checks the names
    assert (family.architecture, config.num_layers) == ("LlamaForCausalLM", 2)
    check(chain(head, 1), expected("mtp", tensors))


@pytest.mark.parametrize(("own", "count"), [(True, 1), (False, 2)])
def test_medusa(own: bool, count: int, tmp_path: Path) -> None:
    values, tensors = draft_files.medusa(own=own)
    head, model = loaded(draft_files.write(tmp_path, values, tensors), count), target(count)
    hidden, _ = hidden_states()

    def run(weights, state, hidden):
        decoder, module = nnx.merge(model.graphdef, weights), nnx.merge(head.graphdef, state)
        return [module.logits(i, x, decoder) for i, x in enumerate(module.outputs(hidden))]

    specs = (specs_for(model.state), specs_for(head.state), PartitionSpec())
    found = jax.jit(on_mesh(run, model.mesh, specs, PartitionSpec(None, MESH_AXES)))(model.state, head.state, hidden)
    table = load_file(FIXTURE / "model.safetensors")["lm_head.weight"]
    wanted = draft_oracle.medusa(tensors, hidden, 3, 2, table)
    check([np.asarray(logits)[:, : SIZES.vocab] for logits in found], wanted)


def test_taps_are_the_inputs_of_layers_and_the_output_of_the_last() -> None:
    model = target()
    decoder = nnx.merge(model.graphdef, model.state)
    places = [CachePlace(group=0, slot=i) for i in range(2)]

    def caches():
        return [XLA_ATTENTION.init_cache(8, PAGE, 2, SIZES.head_dim, jnp.float32) for _ in range(2)]

    args = ((batch_of(0, len(TOKENS)),), places, XLA_ATTENTION)
    tokens = jnp.asarray(TOKENS)
    hidden, _, (first, second, last) = decoder.with_taps(tokens, caches(), *args, taps=(0, 1, 2))
    plain, _ = decoder(tokens, caches(), *args)
    np.testing.assert_array_equal(hidden, plain)
    np.testing.assert_array_equal(first, decoder.token_embeddings(tokens))
    np.testing.assert_array_equal(decoder.final_norm(last), hidden)
    assert np.abs(np.asarray(second) - np.asarray(first)).max() > 0.01
    # An embedding and one layer are what lies behind the first of two layers.
    tables = {rope: rope_table(rope, jnp.arange(9), jnp.arange(9) + 1) for rope in decoder.config.ropes}
    x, _ = decoder.layers[0](first, tables, caches()[0], args[0][0], XLA_ATTENTION)
    np.testing.assert_array_equal(x, second)
