"""What `torch.func` needs to go through an operator: a derivative it can nest, and what to do with a mapped dimension.

`torch.library` registers derivatives that autograd can use and `torch.func.grad` cannot; an `autograd.Function` around
the operator serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsifiner.errors import BackendError

# For each input or output: which of its dimensions takes in the one that `torch.vmap` maps over; None if none can.
Dimensions = tuple[int | None, ...]


def mapped(operator: Callable[..., Any], inputs: Dimensions, outputs: Dimensions) -> Callable[..., Any]:
    """The rule for `torch.vmap` of an operator that treats some dimension of its inputs, heads say, element by element.

    Args:
        operator: called once, with the mapped dimension as a part of that dimension.
        inputs: where that dimension is in each input.
        outputs: and in each output.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        size, folded = info.batch_size, []
        for argument, given, at in zip(arguments, in_dims, inputs, strict=True):
            if isinstance(argument, Tensor) and given is not None and at is None:
                raise BackendError(
                    "torch.vmap cannot go over the weights or the query groups of a fused operator: map over its "
                    "inputs, or use backend='eager'"
                )
            if at is None or not isinstance(argument, Tensor):
                folded.append(argument)
                continue
            whole = argument[None].expand(size, *argument.shape) if given is None else argument.movedim(given, 0)
            folded.append(whole.movedim(0, at).flatten(at, at + 1))
        results = operator(*folded)
        several = isinstance(results, tuple)
        unfolded = tuple(
            result.unflatten(at, (size, result.shape[at] // size))
            for result, at in zip(results if several else (results,), outputs, strict=True)
        )
        return (unfolded, outputs) if several else (unfolded[0], outputs[0])

    return rule


def _refuse(*_: Any) -> None:
    raise BackendError(
        "second and forward-mode derivatives (torch.func.hessian, jvp, jacfwd, double backward) do not go through the "
        "sparse operators: use backend='reference', under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


def _nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def function(
    operator: Callable[..., Any],
    inputs: Dimensions,
    outputs: Dimensions,
    setup_context: Callable = _nothing,
    backward: Callable = _refuse,
) -> Callable[..., Any]:
    """The operator as autograd and `torch.func` can both go through it.

    Args:
        operator: from `torch.library.custom_op`.
        inputs: as in `mapped`.
        outputs: as in `mapped`.
        setup_context: what the backward needs is kept; as in `autograd.Function`.
        backward: of such functions or of torch's own, so that transforms nest; without, derivatives end here.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return mapped(apply, inputs, outputs)(info, in_dims, *arguments)

    members = {
        "forward": staticmethod(lambda *arguments: operator(*arguments)),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "jvp": staticmethod(_refuse),
        "vmap": staticmethod(rule),
    }
    apply = type("Function", (torch.autograd.Function,), members).apply
    # A compiler traces the operator itself, and its registered derivative.
    return lambda *arguments: (operator if torch.compiler.is_compiling() else apply)(*arguments)
