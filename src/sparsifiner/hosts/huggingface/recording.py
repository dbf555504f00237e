"""Attention weights and hidden states, which transformers records with hooks of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any

from torch import nn

from sparsifiner.hosts import Site


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedSite(Site):
    """An attention module whose weights can be recorded."""

    recorder: nn.Module

    def put(self, module: nn.Module) -> None:
        """Stands another module in its place."""
        # When outputs are first asked for, transformers hooks the attention modules that it finds in the model. Ours
        # are no such, so it must do that before: then dense layers give their weights, and so does a restored model.
        with contextlib.suppress(ImportError):
            from transformers.utils.output_capturing import maybe_install_capturing_hooks

            maybe_install_capturing_hooks(self.recorder)  # pyright: ignore[reportArgumentType]
            _make_picklable(self.recorder)
        super().put(module)


@dataclasses.dataclass(frozen=True)
class _Recorder:
    """A hook of transformers that records outputs, which is a local function and so cannot be pickled, made anew."""

    key: str
    index: int
    capture_initial_hidden_state: bool

    def __post_init__(self) -> None:  # at once: torch.compile cannot look at a property that makes it when first asked
        from transformers.utils.output_capturing import install_output_capuring_hook

        blank = nn.Identity()
        install_output_capuring_hook(blank, **dataclasses.asdict(self))
        self.__dict__["hook"] = next(iter(blank._forward_hooks.values()))

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.__dict__["hook"](module, inputs, output)

    def __reduce__(self) -> tuple:
        return _Recorder, dataclasses.astuple(self)


def _make_picklable(model: nn.Module) -> None:
    names = {field.name for field in dataclasses.fields(_Recorder)}
    for module in model.modules():
        for number, hook in module._forward_hooks.items():
            if inspect.isfunction(hook) and names <= (settings := inspect.getclosurevars(hook).nonlocals).keys():
                module._forward_hooks[number] = _Recorder(**{name: settings[name] for name in names})
