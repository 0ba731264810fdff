"""What a step has of LoRA adapters: nothing where the config has none, and one call for each product where it has."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.numba_matmul import make_matmul
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models.adapters.slots import projection_forms
from jaxserve.models.decoder_config import DecoderConfig, LayerSpec, MlpSpec, RopeConfig
from jaxserve.models.loading import one_device_mesh
from jaxserve.models.partition import Partition
from jaxserve.runtime.adapters import AdapterSizes
from jaxserve.runtime.convert_weights import Forms
from jaxserve.runtime.executables import AbstractStage, Sizes, make_jobs
from jaxserve.runtime.page_groups import PageGroups
from jaxserve.sched.plan import Bucket

LAYER = LayerSpec(mlp=MlpSpec(size=96), position=RopeConfig(theta=10_000.0, rotary_dim=8), scale=0.3)
MODEL = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    layers=(LAYER,),
)


def lowered_step(adapters: AdapterSizes | None, *, packed: bool = False) -> str:
    stage = AbstractStage.of(
        Partition.of(MODEL, 1), range(1), one_device_mesh(jax.devices("cpu")[0]), np.dtype("float32")
    )
    if packed:
        forms = Forms(matmul=make_matmul(Device(backend="cpu", kind="cpu")))
        flat = [(path, forms.shapes(variable)) for path, variable in nnx.to_flat_state(stage.state)]
        stage = dataclasses.replace(stage, state=nnx.from_flat_state(flat))
    sizes = Sizes(
        backend="cpu",
        page_size=8,
        max_rows=4,
        max_model_len=64,
        buckets=(Bucket(4, 4, True),),
        cache_dtype=np.dtype("float32"),
        page_groups=PageGroups.of(MODEL.windows, 64),
        adapters=adapters,
    )
    job = next(job for job in make_jobs(stage, sizes, XLA_ATTENTION, 8) if job.name == "decode 4x4")
    return jax.jit(job.fn, donate_argnums=job.donate).lower(*job.args).as_text(debug_info=True)


def test_a_step_without_the_section_has_nothing_of_it() -> None:  # its own name is in the text, too
    adapters = AdapterSizes(num_slots=2, max_rank=8, forms=projection_forms(Partition.of(MODEL, 1)))
    words = ("adapters", "low_rank", "adapted")
    for packed in (False, True):
        plain = lowered_step(None, packed=packed)
        assert not [word for word in words if word in plain]
    tuned = lowered_step(adapters)
    assert "adapters" in tuned and "low_rank" in tuned
    # Of packed weights as many calls as without, and no product of another kind.
    tuned = lowered_step(adapters, packed=True)
    assert tuned.count("@jaxserve_matmul_adapted_float32") == 4
    assert tuned.count("@jaxserve_matmul") == plain.count("@jaxserve_matmul")
    assert tuned.count("dot_general") == plain.count("dot_general")
