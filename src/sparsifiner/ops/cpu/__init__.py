"""The fused CPU kernels (csrc/) as a backend.

`fused` goes from queries, keys, values and packed predictor weights to the output in one call, for inference. `select`
and `attend` are the two halves with the lists between them, for training and for whoever looks at the lists.
`fused_cells` and `open_cells` are the same for attention at several resolutions.
"""

from sparsifiner.ops.cpu.cells import fused_cells, open_cells, open_flops
from sparsifiner.ops.cpu.inference import fused
from sparsifiner.ops.cpu.library import can_run, instruction_set, native, unavailable
from sparsifiner.ops.cpu.packing import Packed, pack
from sparsifiner.ops.cpu.training import attend, select

__all__ = [
    "Packed",
    "attend",
    "can_run",
    "fused",
    "fused_cells",
    "instruction_set",
    "native",
    "open_cells",
    "open_flops",
    "pack",
    "select",
    "unavailable",
]
