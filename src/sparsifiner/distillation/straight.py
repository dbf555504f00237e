"""A gradient for the choice of keys, straight through the choosing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparsifiner.nn.attention import SparseAttention
from sparsifiner.ops.attention import sparse_attention


def straight_through(layer: SparseAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sparse attention as always, in whose gradient the scores of kept keys stand beside their logits.

    Which keys are kept has no derivative. The estimate is: a kept key that should have had more weight should have had
    a higher score. So the logits become ``q·k + s - stop(s)`` with the scores ``s = ã·w̃``, whose value is ``q·k``. The
    product is made of features, and the kernels do the rest: ``(ã - stop ã)·stop w̃ + stop ã·(w̃ - stop w̃)`` is zero and
    has the gradient of ``ã·w̃``.
    """
    connectivity, residual = layer.predict(q, k)
    a_down, w_up = residual.a_down, residual.w_up
    kept = torch.where(a_down > layer.config.tau, a_down, 0).to(q.dtype)
    kept = functional.pad(kept, (0, 0, layer.grid.prefix, 0))  # [batch, heads, n, m]
    basis = torch.where(w_up > layer.basis_threshold, w_up, 0).to(q.dtype).mT.expand(len(q), -1, -1, -1)
    queries = torch.cat([q * layer.scale, kept - kept.detach(), kept.detach()], dim=-1)
    keys = torch.cat([k, basis.detach(), basis - basis.detach()], dim=-1)
    values = functional.pad(v, (0, 2 * kept.shape[-1]))
    out = sparse_attention(
        queries,
        keys,
        values,
        connectivity,
        residual=residual if layer.config.residual else None,
        scale=1.0,
        backend=layer.config.backend,
        presence=layer.grid.presence,
    )
    return out[..., : q.shape[-1]]
