"""StandIn: a module that takes the place of a host's module and is, to its users, the same one."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

# What a module keeps of its tree and of those who watch it: host and stand-in have the same dictionaries, not equal
# ones.
_TREE = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_BOTH = ("training", "_is_full_backward_hook")


class StandIn(nn.Module):
    """Takes the place of ``host``, which goes on existing beside the module tree: its ``forward`` can be run.

    There is one set of modules: host and stand-in share their dictionaries of children, parameters, buffers and hooks.
    So the host's parameters keep their names in the state dict, and whoever replaces a child of the stand-in (adapters,
    quantisation, a plain assignment), moves it or loads weights into it does that to the host too. The host's plain
    attributes are read and set through the stand-in, unless it has one of the same name.

    Args:
        host: what is replaced; it is not to be used on its own until it is released.
    """

    ADDED: ClassVar[tuple[str, ...]] = ()  # children that the host does not have
    host: nn.Module

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.__dict__["host"] = host  # beside the tree, or its parameters would appear twice
        self._complete = False
        for name in (*_TREE, *_HOOKS):
            self.__dict__[name] = host.__dict__[name]

    def complete(self) -> None:
        """To be called at the end of construction: attributes set from now on may be the host's."""
        self.train(self.host.training)
        self._complete = True

    def release(self) -> nn.Module:
        """The host as it is now, without what was added; the stand-in is of no use afterwards."""
        for name in self.ADDED:
            self._modules.pop(name, None)
        return self.host

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            host = self.__dict__.get("host")
            if host is None or name not in host.__dict__:
                raise
            return host.__dict__[name]

    def __setattr__(self, name: str, value: Any) -> None:
        host = self.__dict__.get("host")
        theirs = host is not None and name in host.__dict__ and name not in self.__dict__ and self._complete
        if host is not None and (theirs or name in _BOTH or "_is_replica" in self.__dict__):
            setattr(host, name, value)
        if not theirs:
            super().__setattr__(name, value)

    def _replicate_for_data_parallel(self) -> Any:
        """DataParallel fills dictionaries and attributes that are the replica's own: its host must have the same."""
        replica, twin = super()._replicate_for_data_parallel(), self.host._replicate_for_data_parallel()
        for name in _TREE:
            twin.__dict__[name] = replica.__dict__[name]
        replica.__dict__["host"] = twin
        return replica
