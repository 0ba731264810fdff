"""Draft heads: small models that read hidden states of a target and guess the tokens after the next.

    config.json, tensors --reading--> HeadConfig --loading--> LoadedHead: EagleHead or MedusaHead --saving--> files

A head never changes what a model says: each guess is compared with the token that the target draws by itself. So a bad
head costs time alone, and a wrongly read one would not be noticed; `reading` refuses what it does not know.

Parts of the decoder are reused: EAGLE's one layer is a `DecoderLayer`, cut over devices as the target's are, and reads
a paged cache through the same function. The target gives hidden states through `Decoder.with_taps`, and embeddings and
output projection where the head has none.
"""

from jaxserve.models.drafts.config import EagleConfig, HeadConfig, HeadKind, MedusaConfig
from jaxserve.models.drafts.eagle import EagleHead
from jaxserve.models.drafts.loading import LoadedHead, load_head
from jaxserve.models.drafts.medusa import MedusaHead
from jaxserve.models.drafts.reading import open_head, read_head_config
from jaxserve.models.drafts.saving import save_head

__all__ = [
    "EagleConfig",
    "EagleHead",
    "HeadConfig",
    "HeadKind",
    "LoadedHead",
    "MedusaConfig",
    "MedusaHead",
    "load_head",
    "open_head",
    "read_head_config",
    "save_head",
]
