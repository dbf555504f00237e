"""Every class of transformers that can be converted, by name; one line for a class of a known family.

transformers is optional and slow to import. So its classes are known here by name.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sparsifiner.hosts.huggingface import common, dinov3, nested, sam3
from sparsifiner.hosts.huggingface.family import Member, pair

MEMBERS = common.MEMBERS | dinov3.MEMBERS | nested.MEMBERS | sam3.MEMBERS


def is_theirs(kind: type) -> bool:
    """Whether a class is one of transformers' models or of their parts."""
    return kind.__module__.startswith("transformers.models.")


def find_member(model: nn.Module) -> Member | None:
    """The row of a model's class, or of the class it was derived from."""
    known = (kind.__name__ for kind in type(model).__mro__ if is_theirs(kind) and kind.__name__ in MEMBERS)
    return next((MEMBERS[name] for name in known), None)


def member_of(model: nn.Module) -> Member:
    """The same of a model that is known."""
    member = find_member(model)
    assert member is not None  # the refusal has seen to it
    return member


def tower_of(model: nn.Module) -> Any:
    """The tower of blocks in a model that is known."""
    return model.get_submodule(member_of(model).tower)


def image_size(model: nn.Module) -> tuple[int, int]:
    """Where any size will do, the config says which is meant: it can be changed after the model was made."""
    family, tower = member_of(model).family, tower_of(model)
    return pair(tower.config.image_size) if family.any_size(tower) else family.size(tower)
