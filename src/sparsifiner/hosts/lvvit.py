"""LV-ViT (Jiang et al., "All Tokens Matter", 2021), which timm does not have: registered with it when this is imported.

A timm `VisionTransformer` with three differences: convolutions before the patch projection, residual branches divided
by a constant, and a second head over the patch tokens whose largest logits are added to the class token's. So all that
is known of timm's models holds for it. Parameters have the names of the official checkpoints, so that these load as
they are: ``create_host("lvvit_s", "lvvit_s-26M-224-83.3.pth.tar")``.

In training it returns the same logits as in inference: distillation compares them with the dense model's. Training with
token labels, which needs the logits of every token, is not part of this project.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from timm.layers.format import Format, nchw_to
from timm.layers.helpers import to_2tuple
from timm.layers.patch_embed import PatchEmbed
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn
from torch.nn import functional

from sparsifiner.errors import ConfigError, DataError

# How much the patch tokens' largest logits count beside the class token's.
AUXILIARY_WEIGHT = 0.5


class ConvStem(PatchEmbed):
    """Patch embedding by four convolutions: the first halves the image, the last makes patches of the rest.

    Args:
        width: channels between the convolutions.
        patch_size: in pixels of the image; even.
        in_chans: channels of the image.
        embed_dim: channels of a token.
        **settings: as for timm's ``PatchEmbed``.
    """

    img_size: Any
    patch_size: Any

    def __init__(
        self, *, width: int, patch_size: int | tuple[int, int], in_chans: int, embed_dim: int, **settings: Any
    ) -> None:
        super().__init__(patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim, **settings)  # pyright: ignore[reportArgumentType]
        if any(side % 2 for side in self.patch_size):
            raise ConfigError(f"the first convolution halves the image: patch_size must be even, got {patch_size}")
        made = self.proj
        del self.proj  # made again below: the checkpoints' order has it last
        place: dict[str, Any] = {"device": made.weight.device, "dtype": made.weight.dtype}
        self.conv1 = nn.Conv2d(in_chans, width, 7, stride=2, padding=3, bias=False, **place)
        self.bn1 = nn.BatchNorm2d(width, **place)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False, **place)
        self.bn2 = nn.BatchNorm2d(width, **place)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1, bias=False, **place)
        self.bn3 = nn.BatchNorm2d(width, **place)
        half = (self.patch_size[0] // 2, self.patch_size[1] // 2)
        self.proj = nn.Conv2d(width, embed_dim, half, stride=half, bias=made.bias is not None, **place)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Takes images of another size from now on; the patch size cannot change."""
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            raise ConfigError(f"LV-ViT's stem is made for patches of {self.patch_size}: only img_size can change")
        super().set_input_size(img_size=img_size)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, channels, height, width]`` to tokens, in the shape timm's ``PatchEmbed`` would give them."""
        height, width = x.shape[-2:]
        down, right = -height % self.patch_size[0], -width % self.patch_size[1]
        if self.strict_img_size and self.img_size is not None and (height, width) != tuple(self.img_size):
            raise DataError(
                f"images are {height} x {width} but the model takes {self.img_size[0]} x {self.img_size[1]}"
            )
        if self.dynamic_img_pad:
            x = functional.pad(x, (0, right, 0, down))
        elif down or right:
            raise DataError(f"images are {height} x {width}, not a whole number of patches of {self.patch_size}")
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.relu(self.bn2(self.conv2(x)))
        x = functional.relu(self.bn3(self.conv3(x)))
        x = self.proj(x)
        if self.flatten:
            x = x.flatten(2).transpose(1, 2)
        elif self.output_fmt != Format.NCHW:
            x = nchw_to(x, self.output_fmt)
        return self.norm(x)


class Division(nn.Module):
    """Divides by a constant."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        return x / self.by

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"by={self.by:g}"


def scaled_block(*, skip_lam: float, **settings: Any) -> Block:
    """A block of timm with both residual branches divided by ``skip_lam``, as the official code calls it.

    The division stands where timm has layer scale. So the block is timm's own, and whoever knows that knows this one.
    """
    block = Block(**settings)
    if skip_lam != 1:
        block.ls1, block.ls2 = Division(skip_lam), Division(skip_lam)  # pyright: ignore[reportAttributeAccessIssue]
    return block


class Largest(nn.Module):
    """The largest logits of all tokens, class by class.

    A module of its own, which stays when the heads are replaced: whoever weighs tokens out can say which have a vote.
    """

    def forward(self, logits: Tensor) -> Tensor:
        """``[batch, tokens, classes]`` to ``[batch, classes]``."""
        return logits.amax(1)


class LVViT(VisionTransformer):
    """LV-ViT.

    Args:
        skip_lam: what the residual branches are divided by.
        stem_width: channels between the stem's convolutions.
        num_classes: of both heads; without classes the model gives features, as timm's do.
        global_pool: only the class token can be pooled where there are classes.
        **settings: as for timm's ``VisionTransformer``.
    """

    def __init__(
        self,
        *,
        skip_lam: float,
        stem_width: int = 64,
        num_classes: int = 1000,
        global_pool: str = "token",
        **settings: Any,
    ) -> None:
        _check_pool(num_classes, global_pool)
        # torch's LayerNorm: timm's own has another epsilon.
        usual = {"mlp_ratio": 3.0, "qkv_bias": False, "norm_layer": nn.LayerNorm}
        super().__init__(
            num_classes=num_classes,
            global_pool=global_pool,  # pyright: ignore[reportArgumentType]
            embed_layer=partial(ConvStem, width=stem_width),
            block_fn=partial(scaled_block, skip_lam=skip_lam),  # pyright: ignore[reportArgumentType]
            init_values=None,  # not a setting: layer scale would stand where the division does
            **(usual | settings),
        )
        self.aux_head = self._another_head()
        self.aux_pool = Largest()

    def _another_head(self) -> nn.Module:
        head = copy.deepcopy(self.head)  # the same shape, place and mode
        self._init_weights(head)
        return head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Makes both heads anew."""
        _check_pool(num_classes, self.global_pool if global_pool is None else global_pool)
        super().reset_classifier(num_classes, global_pool)
        self.aux_head = self._another_head()

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The class token's logits and half the largest of the patch tokens', class by class; in training too."""
        out = super().forward_head(x, pre_logits=pre_logits)
        if pre_logits or self.num_classes == 0:
            return out
        return out + AUXILIARY_WEIGHT * self.aux_pool(self.aux_head(x[:, self.num_prefix_tokens :]))


def _check_pool(num_classes: int, global_pool: str) -> None:
    if num_classes > 0 and global_pool != "token":
        raise ConfigError(
            f"LV-ViT's logits are of the class token and of all patch tokens: global_pool must be 'token', "
            f"got {global_pool!r}"
        )


VARIANTS: dict[str, dict[str, Any]] = {
    "lvvit_t": {"embed_dim": 240, "depth": 12, "num_heads": 4, "skip_lam": 1.0},
    "lvvit_s": {"embed_dim": 384, "depth": 16, "num_heads": 6, "skip_lam": 2.0},
    "lvvit_m": {"embed_dim": 512, "depth": 20, "num_heads": 8, "skip_lam": 2.0},
    "lvvit_l": {"embed_dim": 768, "depth": 24, "num_heads": 12, "skip_lam": 3.0, "stem_width": 128},
}


def _preprocessing(crop: float) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": True,
        "pool_size": None,
        "crop_pct": crop,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "patch_embed.conv1",
        "classifier": ("head", "aux_head"),
    }


# Where timm's register_model looks for what a model's images must be like.
default_cfgs = generate_default_cfgs(
    {
        "lvvit_t": _preprocessing(0.9),
        "lvvit_s": _preprocessing(0.9),
        "lvvit_m": _preprocessing(1.0),
        "lvvit_l": _preprocessing(1.0),
    }
)


def _create(name: str, pretrained: bool, arguments: dict[str, Any]) -> LVViT:
    return build_model_with_cfg(
        LVViT,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **(VARIANTS[name] | arguments),
    )


@register_model
def lvvit_t(pretrained: bool = False, **arguments: Any) -> LVViT:
    """LV-ViT-T: 8.5 M parameters."""
    return _create("lvvit_t", pretrained, arguments)


@register_model
def lvvit_s(pretrained: bool = False, **arguments: Any) -> LVViT:
    """LV-ViT-S: 26 M parameters; the one in the Sparsifiner paper."""
    return _create("lvvit_s", pretrained, arguments)


@register_model
def lvvit_m(pretrained: bool = False, **arguments: Any) -> LVViT:
    """LV-ViT-M: 56 M parameters."""
    return _create("lvvit_m", pretrained, arguments)


@register_model
def lvvit_l(pretrained: bool = False, **arguments: Any) -> LVViT:
    """LV-ViT-L: 150 M parameters."""
    return _create("lvvit_l", pretrained, arguments)
