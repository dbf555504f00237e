"""Sparse, instance-dependent attention for Vision Transformers.

    import timm, sparsifiner as sp

    model = timm.create_model("deit_tiny_patch16_224", pretrained=True)
    student = sp.sparsify(model, sp.suggest_config(model, keep=0.25))

Names are imported when first used, so that ``import sparsifiner`` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sparsifiner.calibration import CalibrationReport as CalibrationReport
    from sparsifiner.calibration import calibrate as calibrate
    from sparsifiner.checkpoint import load as load
    from sparsifiner.checkpoint import save as save
    from sparsifiner.config import SparseConfig as SparseConfig
    from sparsifiner.config import TokenConfig as TokenConfig
    from sparsifiner.convert import config_of as config_of
    from sparsifiner.convert import dense_mode as dense_mode
    from sparsifiner.convert import reconfigure as reconfigure
    from sparsifiner.convert import restore as restore
    from sparsifiner.convert import sparsify as sparsify
    from sparsifiner.convert import suggest_config as suggest_config
    from sparsifiner.distillation.recipe import Recipe as Recipe
    from sparsifiner.distillation.run import distill as distill
    from sparsifiner.errors import SparsifinerError as SparsifinerError
    from sparsifiner.inspect.capture import capture as capture
    from sparsifiner.inspect.features import feature_map as feature_map
    from sparsifiner.inspect.flops import count_flops as count_flops
    from sparsifiner.inspect.tuning import TuningReport as TuningReport
    from sparsifiner.inspect.tuning import tune as tune
    from sparsifiner.ops.attention import predict as predict
    from sparsifiner.ops.attention import sparse_attention as sparse_attention
    from sparsifiner.ops.connectivity import Connectivity as Connectivity

_HOME = {
    "CalibrationReport": "calibration",
    "Connectivity": "ops.connectivity",
    "Recipe": "distillation.recipe",
    "SparseConfig": "config",
    "SparsifinerError": "errors",
    "TokenConfig": "config",
    "TuningReport": "inspect.tuning",
    "calibrate": "calibration",
    "capture": "inspect.capture",
    "config_of": "convert",
    "count_flops": "inspect.flops",
    "dense_mode": "convert",
    "distill": "distillation.run",
    "feature_map": "inspect.features",
    "load": "checkpoint",
    "predict": "ops.attention",
    "reconfigure": "convert",
    "restore": "convert",
    "save": "checkpoint",
    "sparse_attention": "ops.attention",
    "sparsify": "convert",
    "suggest_config": "convert",
    "tune": "inspect.tuning",
}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sparsifiner' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sparsifiner.{_HOME[name]}"), name)
    globals()[name] = value  # submodules of the same name must not shadow the function again
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
