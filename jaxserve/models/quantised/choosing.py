"""The format of each weight of a model: what the config says of its module, compared with what the files hold."""

from collections.abc import Iterable, Mapping, Set

from jaxserve.errors import CheckpointError
from jaxserve.models.quantised.scheme import Format, Module, ModuleKind, Scheme, module_name
from jaxserve.models.safetensors_files import FLOAT_DTYPES, TensorSource
from jaxserve.models.weights import Path, Piece, fold_names

# Sidecars of the known formats, by which files are recognised that no config calls quantised.
_SIDECARS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks")
_SMALL = ("weight", "sinks")  # parameters of norms and attention, which no tool quantises


def modules_of(plan: Mapping[Path, Iterable[Piece]]) -> dict[str, Module]:
    """The weights that could be quantised, by their names in the files."""
    return {
        piece.source: Module(name=module_name(piece.source), kind=kind)
        for path, pieces in plan.items()
        for piece in pieces
        if (kind := _kind(path, piece)) is not None
    }


def _kind(path: Path, piece: Piece) -> ModuleKind | None:
    if path[-1] in _SMALL or path[-1].endswith("bias"):
        return None
    if path[-1].endswith("embedding"):
        return ModuleKind.EMBEDDING
    if len(piece.pattern.source) == 3:
        return ModuleKind.EXPERTS
    if path[-1] == "router" or path[-2:] == ("shared", "gate"):
        return ModuleKind.ROUTER
    return ModuleKind.LAYER if path[0] == "layers" else ModuleKind.OUTER


def possible_names(scheme: Scheme, modules: Mapping[str, Module]) -> set[str]:
    """Every name that a sidecar of one of the modules could have."""
    return {
        name
        for source in modules
        for found in scheme.formats
        for name in (*found.required(source), *found.optional(source))
    }


def choose_formats(
    scheme: Scheme, modules: Mapping[str, Module], files: Mapping[str, TensorSource], origin: str
) -> dict[str, Format]:
    """The format of each weight that is quantised.

    Raises CheckpointError where the config calls a weight quantised that is float in the files, or the reverse. The
    gates of experts are what they are in the files: most tools leave them out, and not all configs say so.
    """
    scheme.check_modules(modules.values())
    chosen: dict[str, Format] = {}
    float_in_files, float_in_config = [], []
    for source, module in modules.items():
        found = scheme.format_of(module)
        packed = _is_quantised(scheme, source, files)
        is_float = source in files and files[source].dtype in FLOAT_DTYPES and not packed
        if found is None:
            float_in_config += [source] if packed else []
        elif not is_float:
            chosen[source] = found
        elif module.kind is not ModuleKind.ROUTER:
            float_in_files.append(source)
    if float_in_files:
        raise CheckpointError(
            f"{origin}: quantization_config ({scheme.label}) covers {len(float_in_files)} weights that are float in "
            f"the files: {fold_names(float_in_files)}; name them in its list of modules that are not quantised, in "
            "model.overrides.quantization_config, or set that to null if no weight is quantised"
        )
    if float_in_config:
        raise CheckpointError(
            f"{origin}: {len(float_in_config)} weights are quantised in the files, but quantization_config "
            f"({scheme.label}) leaves their modules out: {fold_names(float_in_config)}; correct its lists in "
            "model.overrides.quantization_config, or fetch config.json and the weights together"
        )
    return chosen


def _is_quantised(scheme: Scheme, source: str, files: Mapping[str, TensorSource]) -> bool:
    return any(name in files for found in scheme.formats for name in _sidecars(found, source))


def _sidecars(found: Format, source: str) -> set[str]:
    return {*found.required(source), *found.optional(source)} - {source}


def hint_of(names: Iterable[str]) -> str:
    """A sentence for files that look quantised under a config that does not say so; empty where they do not."""
    if not any(name.endswith(_SIDECARS) for name in names):
        return ""
    return "; the weights look quantised, but config.json has no quantization_config: take the one they came with"


def zero_biases(formats: Mapping[str, Format], files: Mapping[str, TensorSource], needed: Set[str]) -> set[str]:
    """Biases that the tool added to modules without one, all zeros."""
    names = {f"{module_name(source)}.bias" for source, found in formats.items() if found.may_add_bias}
    return {name for name in (names & files.keys()) - needed if _is_zero(files[name])}


def _is_zero(tensor: TensorSource) -> bool:
    return not tensor.read(tuple(slice(0, size) for size in tensor.shape)).any()
