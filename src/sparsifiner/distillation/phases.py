"""The two phases: which weights learn, and from which losses.

Phase 1 runs the dense model and fits the predictors to its attention, each layer by itself. Phase 2 runs the sparse
model and trains everything on the teacher's last tokens and predictions and on the labels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner.convert import config_of, conversion_of, dense_mode, reconfigure, sparse_layers
from sparsifiner.distillation import losses
from sparsifiner.distillation.data import KEEP, Batch, number_from
from sparsifiner.distillation.recipe import Recipe
from sparsifiner.distillation.straight import straight_through
from sparsifiner.distillation.teacher import Predict, Targets, own_predictions, watching
from sparsifiner.errors import ConfigError
from sparsifiner.inspect.flops import layer_tokens
from sparsifiner.inspect.observe import observing
from sparsifiner.nn.attention import Core, Observation, SparseAttention
from sparsifiner.nn.predictor import is_predictors
from sparsifiner.tokens.dynamicvit import ratio_loss

# What hosts call their tokens and position embeddings.
EMBEDDINGS = {
    *("pos_embed", "cls_token", "dist_token", "reg_token", "freqs"),  # timm
    *("position_embeddings", "position_embedding", "class_embedding", "distillation_token", "register_tokens"),
    *("detection_tokens", "mid_position_embeddings", "probe"),
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rates of a phase: up in a line, down along a cosine. A function of the step alone."""

    steps: int
    warmup: int
    highest: float
    final: float

    def at(self, step: int) -> float:
        """The learning rate of a step."""
        if step < self.warmup:
            return self.highest * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.final + (self.highest - self.final) * 0.5 * (1 + math.cos(math.pi * done))


def schedule(recipe: Recipe, phase: int, steps_per_epoch: int) -> Schedule:
    """What a recipe says of a phase."""

    def setting(name: str) -> float:
        return getattr(recipe, f"phase{phase}_{name}")

    steps = round(setting("epochs") * steps_per_epoch)
    warmup = min(round(setting("warmup_epochs") * steps_per_epoch), steps)
    return Schedule(steps, warmup, setting("learning_rate"), setting("final_learning_rate"))


def learning_layers(student: nn.Module) -> list[SparseAttention]:
    """Layers that have something to predict: those that are dense anyway, or open cells, do not."""
    return [layer for layer in sparse_layers(student) if layer.config.asks_predictor and not layer.is_dense()]


def predictor_names(student: nn.Module) -> set[str]:
    """Names of all predictors' weights."""
    return {name for name, _ in student.named_parameters() if is_predictors(name)}


def learns(student: nn.Module, recipe: Recipe, phase: int, trainable: set[str]) -> set[str]:
    """Names of the weights that get a gradient in a phase. All others are frozen, so none is ever missed.

    ``trainable`` are those that the model's owner has not frozen.
    """
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    layers = learning_layers(student)
    if phase == 1 and not layers:
        raise ConfigError(
            "every layer is dense at this keep rate: there is nothing to learn to predict, set phase1_epochs = 0"
        )
    if phase == 2 and recipe.token_method == "evit":  # a budget can cover all tokens that are left
        seen = dict(zip(sparse_layers(student), layer_tokens(student), strict=True))
        layers = [layer for layer in layers if not layer.is_dense(seen[layer].attention)]
    predictors = {names[id(p)] for layer in layers for p in layer.predictor.parameters()}
    if phase == 1:
        return predictors
    host = trainable - predictor_names(student) - conversion_of(student).host.unused(student)
    if recipe.freeze_host:
        host = {name for name in host if _scores(name)}
    # Which keys are kept is not differentiable: without one of these the predictors have no gradient.
    config = config_of(student)
    used = recipe.residual or config.pattern == "linformer"
    reached = used or recipe.straight_through or recipe.attention_weight > 0
    found = host | predictors if reached else host
    if not found and not config.asks_predictor:
        raise ConfigError(
            "freeze_host leaves nothing to learn: pattern='cells' adds no weights to the model, so train without it"
        )
    if not found:
        raise ConfigError(
            "freeze_host leaves phase 2 nothing to learn: in the paper's form predictors have no gradient. Use the "
            "residual, straight_through or attention_weight"
        )
    return found


def parameter_groups(student: nn.Module, recipe: Recipe, phase: int, names: set[str]) -> list[dict]:
    """AdamW's groups. Eq. 11: decay reaches matrices and ``w_up``, not norms, biases, embeddings and ``w_down``."""
    groups: dict[tuple[float, bool], dict] = {}
    for name, parameter in student.named_parameters():
        if name not in names:
            continue
        of_predictor = name in predictor_names(student)
        decays = name.endswith("w_up") if of_predictor else parameter.ndim >= 2 and not _embeds(name)
        rate = 1.0
        if phase == 2 and of_predictor:
            rate = recipe.predictor_learning_rate
        elif _scores(name):
            rate = recipe.scorer_learning_rate
        group = groups.setdefault(
            (rate, decays),
            {"params": [], "names": [], "weight_decay": recipe.weight_decay if decays else 0.0, "rate": rate},
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def _scores(name: str) -> bool:
    return ".scorer." in name


def _embeds(name: str) -> bool:
    return not EMBEDDINGS.isdisjoint(name.split("."))


def predictor_pass(student: nn.Module, recipe: Recipe, batch: Batch, share: float, exact: bool) -> dict[str, Tensor]:
    """Phase 1 on one batch: adds ``share`` times the gradients, and returns the losses.

    A layer's loss (Eq. 10) reaches its own predictor only. So it is differentiated as soon as the layer has run, and
    memory is that of dense inference and of one layer's loss.

    Args:
        student: a converted model, in evaluation mode.
        recipe: the settings.
        batch: images.
        share: of the batch in the step.
        exact: whether the value returned is the error itself; the gradient is the same.
    """
    layers = learning_layers(student)
    total = torch.zeros((), device=batch.images.device)

    def observe(seen: Observation) -> None:
        layer = seen.layer
        with torch.enable_grad():
            loss = losses.attention_loss(
                seen.q,
                seen.k,
                *layer.predictor.at(layer.grid.size),
                num_prefix=layer.grid.num_prefix,
                scale=layer.scale,
                tau=layer.config.tau,
                constant=exact,
            )
            penalty = recipe.l1 * layer.predictor.w_up.abs().sum(-1).mean() if recipe.l1 else 0.0
            ((loss + penalty) * share / len(layers)).backward()
        total.add_(loss.detach())

    with torch.no_grad(), dense_mode(student), observing(layers, observe):
        student(batch.images)
    mean = total / len(layers)
    return {"loss": mean, "attention": mean}


class Passed(NamedTuple):
    """What phase 2's forward gives; a tuple, which DistributedDataParallel can look into.

    Attributes:
        logits: ``[batch, classes, ...]``.
        tokens: of the last block, prefix and patches, ``[batch, n, D]``.
        cells: the patches' places on the grid, where tokens were dropped.
        presence: ``[batch, n]``, how much each token counts: where tokens were dropped by weight, or where a patch is a
            fused token.
        attention: the attention loss, if one is wanted.
        ratio: DynamicViT's loss for keeping more or fewer tokens than asked.
    """

    logits: Tensor
    tokens: Tensor
    cells: Tensor | None
    presence: Tensor | None
    attention: Tensor
    ratio: Tensor


class Joint(nn.Module):
    """Phase 2's forward: the sparse model's predictions and last tokens, and losses that arise on the way.

    A module of its own, because that is what DistributedDataParallel wraps.
    """

    def __init__(self, student: nn.Module, recipe: Recipe, predict: Predict = own_predictions) -> None:
        super().__init__()
        self.student = student
        self.recipe = recipe
        self.predict = [predict]  # in lists: no child twice, and a head is not the student's to train
        self.last_block = [conversion_of(student).host.last_block(student)]

    def forward(self, images: Tensor) -> Passed:
        """Of a batch of images."""
        layers = learning_layers(self.student)
        found: list[Tensor] = []

        def observe(seen: Observation) -> None:
            layer = seen.layer
            with torch.enable_grad():
                found.append(
                    losses.attention_loss(
                        seen.q.detach(),
                        seen.k.detach(),
                        *map(layer.grid.pick, layer.predictor.at(layer.grid.size)),
                        num_prefix=layer.grid.prefix,
                        scale=layer.scale,
                        tau=layer.config.tau,
                    )
                )

        watched = layers if self.recipe.attention_weight else []
        core = straight_through if self.recipe.straight_through else None
        replaced = layers if core else []  # a core that somebody else has set stays
        with observing(watched, observe), watching(self.last_block[0]) as tokens, _with_core(replaced, core):
            logits = self.predict[0](self.student, images)
        attention = torch.stack(found).mean() if found else logits.new_zeros(())
        record, last = conversion_of(self.student), tokens[-1]
        call, prefix = record.grid.latest, record.grid.num_prefix
        if call.num_fused:  # has no counterpart in the teacher
            last = torch.cat([last[:, :prefix], last[:, prefix + call.num_fused :]], dim=1)
        presence, merged = call.presence, call.merged()
        if merged is not None:  # nor has one that was kept as a patch
            presence = functional.pad((~merged).to(last.dtype), (prefix, 0), value=1.0)
        pruning = record.config.tokens
        ratio = ratio_loss(call.shares, pruning) if pruning and call.shares else logits.new_zeros(())
        return Passed(logits, last, call.cells, presence, attention, ratio)


def joint_losses(
    recipe: Recipe,
    batch: Batch,
    targets: Targets,
    passed: Passed,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Eq. 12 and its parts; parts without a weight are left out. ``loss`` is a task's own, for that of the labels."""
    mixed = batch.labels.ndim == 2
    parts: dict[str, tuple[float, Tensor]] = {}
    if recipe.label_weight and loss is not None:
        parts["label"] = recipe.label_weight, loss(passed.logits, batch.labels)
    elif recipe.label_weight:
        smoothing = 0.0 if mixed else recipe.label_smoothing  # mixup smooths by itself
        parts["label"] = recipe.label_weight, losses.label_loss(passed.logits, batch.labels, smoothing)
    if recipe.token_weight:
        wanted = targets.tokens
        if passed.cells is not None:
            prefix = passed.tokens.shape[1] - passed.cells.shape[1]
            wanted = losses.kept_tokens(wanted, passed.cells, prefix)
        parts["token"] = recipe.token_weight, losses.token_loss(passed.tokens, wanted, passed.presence)
    if recipe.prediction_weight:
        parts["prediction"] = recipe.prediction_weight, losses.prediction_loss(passed.logits, targets.logits)
    if recipe.attention_weight:
        parts["attention"] = recipe.attention_weight, passed.attention
    if recipe.token_keep is not None and recipe.token_method == "dynamicvit" and recipe.ratio_weight:
        parts["ratio"] = recipe.ratio_weight, passed.ratio
    if not parts:
        raise ConfigError("all weights of phase 2's losses are 0")
    total = torch.stack([weight * value for weight, value in parts.values()]).sum()
    return {"loss": total} | {name: value for name, (_, value) in parts.items()}


def draw_keep(student: nn.Module, recipe: Recipe, step: int) -> float | None:
    """Elastic keep: sets the rate of a step, drawn evenly on a logarithmic scale."""
    ends = recipe.elastic_range()
    if ends is None:
        return None
    share = number_from(recipe.seed, KEEP, step) / 2**32
    keep = math.exp(math.log(ends[0]) + share * (math.log(ends[1]) - math.log(ends[0])))
    reconfigure(student, keep=keep)
    return keep


@contextlib.contextmanager
def _with_core(layers: list[SparseAttention], core: Core | None) -> Iterator[None]:
    for layer in layers:
        layer.core = core
    try:
        yield
    finally:
        for layer in layers:
            layer.core = None
