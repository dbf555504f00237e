"""save() and load(): one safetensors file that holds weights, settings and the host's name."""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from sparsifiner import __version__
from sparsifiner.config import SparseConfig
from sparsifiner.convert import (
    conversion_of,
    converted,
    find_part,
    note_tuning,
    part_of,
    path_of,
    reconfigure,
    sparse_layers,
    sparsify,
    tuning_of,
    warn_of_bfloat16,
)
from sparsifiner.errors import CheckpointError, ConfigError, reason_of
from sparsifiner.files import parse_json, replacing
from sparsifiner.hosts import OPTIONAL, Host, table
from sparsifiner.nn.predictor import is_predictors
from sparsifiner.sides import Sides, spelled

FORMAT = "sparsifiner"
FORMAT_VERSION = 1
# Tokens of the model for each that its predictors are for: eight times as high and wide.
MOST_RESAMPLED = 64
READY = Path(__file__).parent / "ready"


def save(
    student: nn.Module,
    path: str | os.PathLike[str],
    *,
    host_weights: bool = True,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a converted model to one safetensors file; an existing file is replaced only by a whole one.

    Args:
        student: a converted model.
        path: where to; by custom ``….safetensors``.
        host_weights: with them, `load` needs nothing else; without, the file holds the settings and what was added to
            the host, its predictors, and `load` needs the host model.
        dtype: store the weights in this type, such as ``torch.bfloat16`` for half the size; `load` gives them back
            the type they have in the model.

    A model with adapters of PEFT is saved with these merged: what the file holds computes what the model does. To go on
    training adapters, save them with PEFT.
    """
    student = merged(converted(student))
    part = part_of(student)
    record = conversion_of(part)
    own = record.host.grid(part).size
    state = {name: tensor for name, tensor in student.state_dict().items() if host_weights or _is_ours(name)}
    if foreign := next((name for name, value in state.items() if not _is_plain(value)), None):
        raise CheckpointError(f"{foreign} is no plain tensor and cannot be saved: quantise after loading, not before")
    tensors = {
        name: (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in state.items()
    }
    description = {
        "format_version": FORMAT_VERSION,
        "library_version": __version__,
        "config": json.loads(record.config.to_json()),
        "host": record.host_name,
        "model_class": type(student).__name__,
        "model": _describe_model(record.host, student, path_of(student)),
        "grids": [list(layer.predictor.grid if layer.has_predictor else own) for layer in sparse_layers(student)],
        "host_weights": host_weights,
        "dtypes": {name: _dtype_name(state[name]) for name in tensors if tensors[name].dtype != state[name].dtype},
    }
    if (tuning := tuning_of(student)) is not None:
        description["tuning"] = tuning
    target = Path(path)
    if not target.parent.is_dir():
        raise CheckpointError(f"cannot write {target}: the folder {target.parent} does not exist")
    try:
        with replacing(target) as temporary:
            # Tied weights share memory, which the format refuses; a clone each is what it would read back.
            save_file(_untied(tensors), temporary, metadata={FORMAT: json.dumps(description)})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error


def _describe_model(host: Host, model: nn.Module, part: str) -> dict[str, Any]:
    """What makes a model again, and where in it the part is that is converted."""
    if not part:
        return host.describe(model)
    size = host.image_size(model.get_submodule(part))
    return host.describe_holder(model) | {"img_size": list(size), "part": part}


def load(path: str | os.PathLike[str], *, model: nn.Module | None = None) -> nn.Module:
    """Reads what `save` wrote: a converted model in evaluation mode, on the CPU, without any network.

    Args:
        path: a file written by `save`, a folder of a training run, or the name of predictors that come with the
            package (`ready` lists them).
        model: the dense host, for files without host weights and for hosts that are not registered by name.
            It is left untouched; host weights in the file replace those of the copy.
    """
    description, tensors = _read(locate(path))
    config = _config(description, path)
    if model is None:
        if not description["host_weights"]:
            raise CheckpointError(
                f"{path} holds no weights of the host: pass the one it belongs to, load(path, model=...) "
                f"({_host_name(description)})"
            )
        model = _build(description, tensors, path)
    else:
        _check_host(model, description, path)
    student = _convert(model, config, description, tensors, path)
    if description["host_weights"] and "dtypes" in description:  # version 0.1 did not say, and meant the host's own
        if not isinstance(description["dtypes"], dict):
            raise CheckpointError(f"{path}: its description is damaged: dtypes is no object")
        _retype(student, {name: _dtype_name(tensor) for name, tensor in tensors.items()} | description["dtypes"], path)
        warn_of_bfloat16(student)
    _fill(student, tensors, path, strict=description["host_weights"])
    _check_types(student.eval(), path)
    if "tuning" in description:
        note_tuning(student, description["tuning"])
    return student


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint says of itself, without reading its weights."""
    return _read(locate(path), weights=False)[0]


def ready() -> list[str]:
    """Models whose predictors come with the package: ``load(name, model=timm.create_model(name, ...))``."""
    return sorted(path.stem for path in READY.glob("*.safetensors"))


def locate(path: str | os.PathLike[str]) -> Path:
    """The file that a path, a folder of a run, or a name from `ready` stands for."""
    given = Path(path)
    if given.is_dir():
        return given / "student.safetensors"
    if not given.exists() and str(path) in ready():
        return READY / f"{path}.safetensors"
    return given


def _is_ours(name: str) -> bool:
    """Whether a weight belongs to what a conversion added to the host."""
    return is_predictors(name) or ".scorer." in name


def merged(student: nn.Module) -> nn.Module:
    """The model itself, or a copy with adapters of PEFT merged into the weights they adapt, if there are any."""
    if not any(_adapts(module) for module in student.modules()):
        return student
    twin = copy.deepcopy(student)
    for parent in list(twin.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            if hasattr(child, "unload_and_optionally_merge_module"):  # a module trained whole beside the adapters
                whole = child.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
                setattr(parent, name, whole)
            elif _adapts(child):
                child.merge(safe_merge=True)
                setattr(parent, name, child.get_base_layer())
    return twin


def _adapts(module: Any) -> bool:
    """Whether it is one of PEFT's, which is not imported for that."""
    return hasattr(module, "get_base_layer") or hasattr(module, "unload_and_optionally_merge_module")


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_quantized


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_types(student: nn.Module, path: Any) -> None:
    """Weights of several types, which a model may well have, go together or they do not: it is tried once."""
    kinds = {parameter.dtype for parameter in student.parameters() if parameter.is_floating_point()}
    if len(kinds) == 1:
        return
    student = part_of(student)
    first = next(parameter for parameter in student.parameters() if parameter.ndim in (4, 5))  # the first convolution
    image = torch.zeros(1, *conversion_of(student).host.input_shape(student), dtype=first.dtype)
    try:
        with torch.inference_mode():
            student(image)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: its weights are of types that do not go together ({reason_of(error)}): save the model in one type"
        ) from None


def _retype(student: nn.Module, dtypes: dict[str, str], path: Any) -> None:
    """Gives parameters and buffers the types a file says they had."""
    own: dict[str, torch.Tensor] = dict(student.named_parameters()) | dict(student.named_buffers())
    for name in own.keys() & dtypes.keys():
        dtype = getattr(torch, str(dtypes[name]), None)
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point != own[name].is_floating_point():
            raise CheckpointError(f"{path}: its description is damaged: {name} cannot be of type {dtypes[name]!r}")
        own[name].data = own[name].data.to(dtype)


def _untied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result


def _read(path: Path, weights: bool = True) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()} if weights else {}  # noqa: SIM118
    except Exception as error:  # of numbers that torch has no type for, it raises what it likes
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({reason_of(error)}): truncated, or another format? "
            "Files made by sparsifiner.save can be loaded"
        ) from None
    if FORMAT not in metadata:
        raise CheckpointError(
            f"{path} was not written by sparsifiner.save: load plain weights into the host model instead"
        )
    try:
        description = parse_json(metadata[FORMAT])
    except ValueError:
        raise CheckpointError(f"{path}: its description is damaged") from None
    _check_description(description, path)
    return description, tensors


def _check_description(description: Any, path: Any) -> None:
    """An error unless every part is there and of its kind; what is in them, their readers judge."""
    version: Any = description.get("format_version") if isinstance(description, dict) else None
    if not _is_count(version):
        raise CheckpointError(f"{path}: its description is damaged")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, written by sparsifiner {description.get('library_version')}; "
            f"this version reads up to {FORMAT_VERSION}: upgrade sparsifiner"
        )
    kinds = {"config": dict, "host": str, "model": dict, "grids": list, "host_weights": bool, "model_class": str}
    if "tuning" in description:
        kinds["tuning"] = dict
    if missing := sorted(set(kinds) - set(description)):
        raise CheckpointError(f"{path}: its description lacks {', '.join(missing)}")
    if wrong := next((name for name, kind in kinds.items() if not isinstance(description[name], kind)), None):
        raise CheckpointError(f"{path}: its description is damaged: {wrong} is {description[wrong]!r}")
    if not all(_are_counts(grid, 2, 3) for grid in description["grids"]):
        raise CheckpointError(f"{path}: its description is damaged: grids must be whole numbers, rows and columns")
    if not _are_counts(size := description["model"].get("img_size"), 2):
        raise CheckpointError(f"{path}: its description is damaged: img_size must be height and width, got {size!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_counts(value: Any, *lengths: int) -> bool:
    return isinstance(value, list) and len(value) in lengths and all(map(_is_count, value))


def _config(description: dict[str, Any], path: Any) -> SparseConfig:
    try:
        return SparseConfig.from_json(json.dumps(description["config"]))
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{path}: its settings are damaged: {error}") from None


def _host_name(description: dict[str, Any]) -> str:
    made_as = description["model"].get("architecture") or description["model_class"]
    return f"{description['host']} {made_as}"


def _build(description: dict[str, Any], tensors: dict[str, torch.Tensor], path: Any) -> nn.Module:
    """The host that the file describes, once it is known to be that of the file's weights.

    Else a few bytes could ask for a model of any size. On the meta device, a model of any size takes no memory.
    """
    host = table().get(description["host"])
    if host is None:
        name = description["host"]
        hint = f"; pip install 'sparsifiner[{name}]' adds it" if name in OPTIONAL else ""
        raise CheckpointError(f"{path} is of host {name!r}, known are: {', '.join(table())}{hint}")
    layers = len(description["grids"])
    try:
        with torch.device("meta"):
            outline = host.build(description["model"], layers)
        _check_tensors(outline.state_dict(), tensors, path)
        return host.build(description["model"], layers)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _convert(
    model: nn.Module, config: SparseConfig, description: dict[str, Any], tensors: dict[str, torch.Tensor], path: Any
) -> nn.Module:
    """The host with layers as the file has them, not yet filled; with predictors for cells too, if it holds some."""
    grids = [tuple(grid) for grid in description["grids"]]
    found = find_part(model)
    if found.path != (part := description["model"].get("part", "")):
        raise CheckpointError(
            f"{path} is of a model converted in {part or 'whole'}, this one has {found.path or 'none'}"
        )
    sites = list(found.host.sites(found.module))
    if len(grids) != len(sites):
        raise CheckpointError(
            f"{path} is of a model with {len(grids)} attention layers, this one has {len(sites)}: made with other "
            "arguments? Make it as it was and pass model=..."
        )
    if not config.asks_predictor and not any(map(is_predictors, tensors)):
        return sparsify(model, config)
    _check_predictors(model, config, grids, tensors, path)
    student = sparsify(model, config if config.asks_predictor else config.replace(pattern="learned"))
    for layer, grid in zip(sparse_layers(student), grids, strict=True):
        layer.predictor.rebase(grid)
    reconfigure(student, pattern=config.pattern)
    return student


def _check_predictors(
    model: nn.Module,
    config: SparseConfig,
    grids: list[Sides],
    tensors: dict[str, torch.Tensor],
    path: Any,
) -> None:
    """An error unless the file's predictors are what its settings and grids say: memory is made for what these say."""
    found = find_part(model)
    sites, grid = list(found.host.sites(found.module)), found.host.grid(found.module)
    start = f"{found.path}." if found.path else ""
    for site, own in zip(sites, grids, strict=True):
        name = f"{start}{site.name}.predictor.w_up"
        if len(own) != len(grid.size):
            raise CheckpointError(
                f"{path}: predictors are of a grid of {spelled(own)} patches, the model's is {spelled(grid.size)}: the "
                "file is damaged"
            )
        expected = (site.num_heads, config.n_down, grid.num_prefix + math.prod(own))
        if name in tensors and tuple(tensors[name].shape) != expected:
            raise CheckpointError(
                f"{path}: {name} is {tuple(tensors[name].shape)} in the file, where its settings and grid make it "
                f"{expected}: the file is damaged, or of a model made with other arguments"
            )
        if grid.num_tokens > MOST_RESAMPLED * expected[2]:
            raise CheckpointError(
                f"{path}: images of the model have {grid.num_tokens} tokens, and its predictors are for {expected[2]}: "
                "too few to be resampled; is the file damaged?"
            )
    if missing := [site.name for site in sites if f"{start}{site.name}.predictor.w_up" not in tensors]:
        raise CheckpointError(f"{path} lacks the predictor of {missing[0]}: made with other arguments?")


def _check_host(model: nn.Module, description: dict[str, Any], path: Any) -> None:
    found = find_part(model)
    host, theirs, ours = found.host, description["model"], _describe_model(found.host, model, found.path)
    if host.name != description["host"] or type(model).__name__ != description["model_class"]:
        raise CheckpointError(
            f"{path} belongs to {_host_name(description)}, not to a {type(model).__name__} of {host.name}"
        )
    names = theirs.get("architecture"), ours.get("architecture")
    if all(names) and names[0] != names[1]:
        raise CheckpointError(f"{path} belongs to {names[0]}, not to {names[1]}")
    if theirs["img_size"] != ours["img_size"]:
        raise CheckpointError(
            f"{path} is for images of {_size(theirs)}, the model takes {_size(ours)}: make the model at that "
            "size, load, then change it (timm: set_input_size, transformers' DINOv2: config.image_size)"
        )


def _size(description: dict[str, Any]) -> str:
    return " x ".join(str(side) for side in description["img_size"])


def _check_tensors(expected: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], path: Any) -> None:
    """An error unless all that is expected is there, in its shape."""
    for name, tensor in tensors.items():
        if name in expected and expected[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} is {tuple(tensor.shape)} in the file and {tuple(expected[name].shape)} in the "
                "model: another size, or made with other arguments; make it as it was and pass model=..."
            )
    if missing := sorted(set(expected) - set(tensors)):
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors, such as {missing[0]}: made with other arguments? Make the model as "
            "it was and pass model=..."
        )


def _fill(student: nn.Module, tensors: dict[str, torch.Tensor], path: Any, strict: bool) -> None:
    expected = student.state_dict()
    _check_tensors({name: tensor for name, tensor in expected.items() if strict or _is_ours(name)}, tensors, path)
    if foreign := sorted(set(tensors) - set(expected)):
        raise CheckpointError(
            f"{path} holds {len(foreign)} tensors the model has not, such as {foreign[0]}: made with other "
            "arguments? Make the model as it was and pass model=..."
        )
    student.load_state_dict(tensors, strict=False)
