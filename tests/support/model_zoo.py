"""The models that test_models.py sweeps over: small members of every family, from random weights, at small sizes.

A family is a module of torchvision.models or timm.models. Of timm's, the member with the fewest parameters is taken, by
the rule in smallest_timm_members(): `python tests/support/model_zoo.py` applies it to the timm that is installed (four
minutes). What it printed is stored below, so that a test keeps its name. A family of vision transformers whose only
convolution cuts the patches is here where a member has at most PATCH_EMBEDDING_ONLY parameters. Pictures have 64x64
pixels, the batch is 2, heads have 10 classes, unless a model needs something else: its line says what.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, CLASSES, SIZE = 2, 10, 64
PATCH_EMBEDDING_ONLY = 30_000_000

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    name: str
    """library/model, the name of the test."""
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    """Random numbers, from torch's global generator."""
    discrete: bool = False
    """Outputs jump where numbers come close to each other: sorted boxes, nearest code words."""
    no_double: str = ""
    """Why the model cannot compute in float64."""


def words(text: str) -> list[str]:
    return text.split()


def picture(size: int = SIZE, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


REPEATED = {"Inception3": words("Mixed_5d Mixed_6c Mixed_6d Mixed_6e Mixed_7c")}
"""Blocks outside of any Sequential whose outputs have their inputs' sizes, by the class of their model."""


def shorten(model: nn.Module) -> None:
    """Leaves two of the blocks of the same class and sizes that follow each other in a Sequential; none of REPEATED."""
    for name in REPEATED.get(type(model).__name__, []):
        setattr(model, name, nn.Identity())

    def kind(module: nn.Module) -> Any:
        return type(module), [p.shape for p in module.parameters()]

    for parent in list(model.modules()):
        if isinstance(parent, nn.Sequential):
            for _, run in itertools.groupby(list(parent.named_children()), lambda child: kind(child[1])):
                for name, module in list(run)[2:]:
                    if any(True for _ in module.parameters()):
                        del parent._modules[name]


# ----------------------------------------------------------------------------------------------------------------------
# torchvision


def torchvision_case(
    name: str, inputs: Callable[[], Inputs] | int = SIZE, change: Callable[[Any], None] = lambda model: None,
    discrete: bool = False, no_double: str = "", **options: Any,
) -> Case:  # fmt: skip
    def make() -> nn.Module:
        import torchvision

        classes = {} if name.startswith("raft") else {"num_classes": CLASSES}
        model = torchvision.models.get_model(name, weights=None, **classes | options)
        change(model)
        return model

    given = inputs if callable(inputs) else lambda: (picture(inputs),)
    return Case(f"torchvision/{name}", make, given, discrete, no_double)


def narrow_classifier(model: Any) -> None:
    """AlexNet's and VGG's numbers are in two dense layers, which say nothing here: 64 wide instead of 4096."""
    dense = [i for i, layer in enumerate(model.classifier) if isinstance(layer, nn.Linear)]
    widths = [model.classifier[dense[0]].in_features, 64, 64, CLASSES]
    for i, (before, after) in zip(dense, itertools.pairwise(widths), strict=True):
        model.classifier[i] = nn.Linear(before, after)


def small_average(model: Any) -> None:
    """S3D averages 7x7 places of 224x224 pixels."""
    model.avgpool = nn.AvgPool3d((2, 2, 2), stride=1)


def maxvit() -> nn.Module:
    """maxvit_t cuts 7x7 windows out of 224x224 pixels and has no option to do otherwise."""
    from torchvision.models.maxvit import MaxVit

    depths = {"stem_channels": 32, "block_channels": [32, 64, 128, 256], "block_layers": [1, 1, 1, 1]}
    return MaxVit((SIZE, SIZE), partition_size=2, head_dim=16, num_classes=CLASSES, stochastic_depth_prob=0, **depths)


def mvit() -> nn.Module:
    """mvit_v2_s in short: three blocks, at two sizes."""
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    shapes = ((1, 32, 1, 1), (1, 32, 2, 2), (2, 64, 1, 1))
    rest = [3, 3, 3], [3, 3, 3]
    blocks = [MSBlockConfig(h, c, c * wider, *rest, [1, step, step], [1, 2, 2]) for h, c, wider, step in shapes]
    options = dict.fromkeys(("residual_pool", "rel_pos_embed", "proj_after_attn"), True)
    sizes = {"spatial_size": (SIZE, SIZE), "temporal_size": 4, "num_classes": CLASSES}
    return MViT(block_setting=blocks, residual_with_cls_embed=False, **sizes, **options)


def small_densenet() -> nn.Module:
    from torchvision.models.densenet import DenseNet

    return DenseNet(16, (2, 2, 2, 2), 16, num_classes=CLASSES)


def small_resnet(block: str, **options: int) -> nn.Module:
    from torchvision.models import resnet

    return resnet.ResNet(getattr(resnet, block), [1, 1, 1, 1], num_classes=CLASSES, **options)


def small_video_resnet() -> nn.Module:
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    return VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=CLASSES)


SMALL = {
    "torchvision/densenet121": small_densenet,
    "torchvision/resnet18": lambda: small_resnet("BasicBlock"),
    "torchvision/resnext50_32x4d": lambda: small_resnet("Bottleneck", groups=32, width_per_group=4),
    "torchvision/r3d_18": small_video_resnet,
}
"""In place of these in the quick run: the same blocks, fewer of them."""


def keep_every_box(model: Any) -> None:
    """Random weights are sure of nothing: no box would pass the thresholds. Fewer, that sorting leaves in place."""
    for part in (model, getattr(model, "roi_heads", None)):
        if hasattr(part, "score_thresh"):
            part.score_thresh = 0.0
            part.detections_per_img = 10


def photographs(size: int, keypoints: bool = False, count: int = BATCH) -> Callable[[], Inputs]:
    """Pictures with two objects each; the targets are ignored in eval mode."""

    def inputs() -> Inputs:
        pictures = [torch.rand(3, size, size) for _ in range(count)]
        boxes = torch.tensor([[0.1, 0.2, 0.6, 0.9], [0.4, 0.1, 0.8, 0.5]]) * size
        masks = torch.zeros(2, size, size, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.long().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
        target = {"boxes": boxes, "labels": torch.tensor([1, 1]), "masks": masks}
        if keypoints:
            middle = (boxes[:, :2] + boxes[:, 2:]) / 2
            target["keypoints"] = torch.cat([middle, torch.ones(2, 1)], dim=1)[:, None].repeat(1, 17, 1)
        return pictures, [{key: value.clone() for key, value in target.items()} for _ in range(count)]

    return inputs


def clip(frames: int, size: int) -> Callable[[], Inputs]:
    return lambda: (torch.randn(BATCH, 3, frames, size, size),)


def detector(name: str, size: int = 96, count: int = BATCH, no_double: str = "", **options: Any) -> Case:
    options = {"num_classes": 4, "weights_backbone": None} | options
    if not name.startswith("ssd"):
        options |= {"min_size": size, "max_size": size}
    if "rcnn" in name:
        options |= {"box_batch_size_per_image": 16, "rpn_post_nms_top_n_train": 50, "rpn_post_nms_top_n_test": 20}
    inputs = photographs(size, "keypoint" in name, count)
    return torchvision_case(name, inputs, keep_every_box, True, no_double, **options)


AS_THEY_ARE = words("""
    resnet18 resnet50 resnext50_32x4d wide_resnet50_2 squeezenet1_1 densenet121 shufflenet_v2_x0_5 mobilenet_v2
    mobilenet_v3_small mnasnet0_5 regnet_x_400mf regnet_y_400mf efficientnet_b0 efficientnet_v2_s convnext_tiny swin_t
    swin_v2_t
""")
TORCHVISION = [
    *(torchvision_case(name, SIZE, narrow_classifier) for name in words("alexnet vgg11 vgg11_bn")),
    *map(torchvision_case, AS_THEY_ARE),
    torchvision_case("inception_v3", 128, init_weights=True, aux_logits=False),  # the auxiliary head needs 299x299
    torchvision_case("googlenet", init_weights=True),
    torchvision_case("vit_b_32", image_size=SIZE),
    Case("torchvision/maxvit", maxvit, lambda: (picture(),)),
    torchvision_case("fcn_resnet50", weights_backbone=None, aux_loss=True),
    torchvision_case("deeplabv3_mobilenet_v3_large", weights_backbone=None, aux_loss=True),
    torchvision_case("lraspp_mobilenet_v3_large", weights_backbone=None),
    *(detector(f"{name}_fpn") for name in words("fasterrcnn_mobilenet_v3_large_320 maskrcnn_resnet50")),
    *(detector(f"{name}_resnet50_fpn") for name in words("retinanet fcos")),
    detector("keypointrcnn_resnet50_fpn", num_classes=2, no_double="insists on keypoints in float32"),
    detector("ssd300_vgg16", 300, 1),
    detector("ssdlite320_mobilenet_v3_large", 320),
    *(torchvision_case(name, clip(4, 32)) for name in words("r3d_18 mc3_18 r2plus1d_18")),
    torchvision_case("s3d", clip(16, SIZE), small_average),
    Case("torchvision/mvit", mvit, clip(4, SIZE)),
    torchvision_case("swin3d_t", clip(4, SIZE)),
    torchvision_case("raft_small", lambda: (picture(128), picture(128), 2), no_double="makes its grid in float32"),
]

TORCHVISION_LEFT_OUT = {"quantization": "integer arithmetic, without gradients; in floating point the models above"}


# ----------------------------------------------------------------------------------------------------------------------
# timm

_PAIRS = words("""
    byoanet:halonet_h1 byobnet:mobileone_s1 cait:cait_xxs24_224 coat:coat_tiny convit:convit_tiny
    convmixer:convmixer_768_32 convnext:convnext_zepto_rms cpubone:cpubone_nano crossvit:crossvit_tiny_240 csatv2:csatv2
    cspnet:cs3darknet_focus_s cspnext:cspnext_tiny davit:davit_tiny deit:deit_tiny_patch16_224 densenet:densenet121
    dla:dla46x_c dpn:dpn48b edgenext:edgenext_xx_small efficientformer:efficientformer_l1
    efficientformer_v2:efficientformerv2_s0 efficientnet:mobilenetv2_035 efficientvim:efficientvim_m1
    efficientvit_mit:efficientvit_b0 efficientvit_msra:efficientvit_m0 eva:vit_tiny_patch16_dinov3_qkvb
    fasternet:fasternet_t0 fastvit:fastvit_t8 focalnet:focalnet_tiny_srf gcvit:gcvit_xxtiny ghostnet:ghostnet_050
    hardcorenas:hardcorenas_b hgnet:hgnetv2_b0 hiera:hiera_tiny_224 hieradet_sam2:sam2_hiera_tiny hrnet:hrnet_w18_small
    iformer:iformer_t inception_next:inception_next_atto inception_resnet_v2:inception_resnet_v2
    inception_v3:inception_v3 inception_v4:inception_v4 lcnetv2:lcnetv2_small levit:levit_128s lowformer:lowformer_b0
    mambaout:mambaout_femto maxxvit:maxvit_pico_rw_256 metaformer:poolformerv2_s12 mlp_mixer:gmlp_ti16_224
    mobilenetv3:lcnet_035 mobilenetv5:mobilenetv5_base mobilevit:mobilevit_xxs mvitv2:mvitv2_tiny nasnet:nasnetalarge
    nest:nest_tiny nextvit:nextvit_small nfnet:nf_regnet_b0 pit:pit_ti_224 pnasnet:pnasnet5large pvt_v2:pvt_v2_b0
    rdnet:rdnet_tiny regnet:regnetx_002 repghost:repghostnet_050 repvit:repvit_m1 res2net:res2next50 resnest:resnest14d
    resnet:resnet10t resnetv2:resnetv2_18 rexnet:rexnet_100 selecsls:selecsls42 senet:legacy_seresnet18
    sequencer:sequencer2d_s shvit:shvit_s1 sknet:skresnet18 starnet:starnet_s050 swiftformer:swiftformer_xs
    swin_transformer:swin_tiny_patch4_window7_224 swin_transformer_v2:swinv2_tiny_window16_256
    swin_transformer_v2_cr:swinv2_cr_tiny_224 tiny_vit:tiny_vit_5m_224 tnt:tnt_s_legacy_patch16_224 tresnet:tresnet_m
    twins:twins_svt_small vgg:vgg11 visformer:visformer_tiny vision_transformer:vit_tiny_patch16_224
    vision_transformer_hybrid:vit_tiny_r_s16_p8_224 vision_transformer_relpos:vit_srelpos_small_patch16_224
    vitamin:vitamin_small_224 volo:volo_d1_224 vovnet:ese_vovnet19b_slim_dw xception:legacy_xception
    xception_aligned:xception41p xcit:xcit_nano_12_p8_224
""")
TIMM = dict(pair.split(":") for pair in _PAIRS)
"""Family to its smallest member."""

TIMM_LEFT_OUT = words("beit deepseek_vit gemma4_vit naflexvit qwen3_vit vision_transformer_sam")
"""Families whose only convolution, if any, cuts the patches, and whose smallest member is large."""

TIMM_MORE = words("""
    resnet18 seresnet18 resnetblur18 resnetaa34d ecaresnet26t resnext26ts repvgg_a0 gernet_s tf_efficientnet_b0
    mixnet_s tinynet_e mnasnet_050 spnasnet_100 fbnetc_100 mobilenetv1_100 efficientnetv2_rw_t tf_efficientnetv2_b0
    regnety_002 mobilenetv3_small_050 mobilenetv4_conv_small convnextv2_atto resnetv2_50 eca_nfnet_l0 nfnet_l0
    convformer_s18 maxxvit_rmlp_nano_rw_256 coatnet_nano_rw_224 levit_conv_128s darknet53 cs3darknet_s cspresnet50
    vovnet39a efficientnet_b0_gn efficientnet_b0_g16_evos resnet50_gn skresnext50_32x4d botnet26t_256 lambda_resnet26t
    eca_botnext26ts_256 bat_resnext26ts gcresnext26ts resnetrs50 visformer_small
""")
"""Other layers and other orders of them than in the smallest member of the family."""

TIMM_SIZES = {
    **dict.fromkeys(("inception_v3", "inception_v4", "inception_resnet_v2"), 128),
    "efficientformer_l1": 224, "halonet_h1": 256, "bat_resnext26ts": 256,
}  # fmt: skip
"""Larger than SIZE where a kernel would not fit, or where the size is built in."""

TIMM_IMG_SIZE = words("""
    nest_tiny cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224 efficientformerv2_s0 gcvit_xxtiny
    hiera_tiny_224 levit_128s maxvit_pico_rw_256 gmlp_ti16_224 pit_ti_224 swin_tiny_patch4_window7_224
    swinv2_tiny_window16_256 swinv2_cr_tiny_224 tnt_s_legacy_patch16_224 visformer_tiny vit_tiny_patch16_224
    vit_tiny_r_s16_p8_224 vit_srelpos_small_patch16_224 vitamin_small_224 volo_d1_224 maxxvit_rmlp_nano_rw_256
    coatnet_nano_rw_224 levit_conv_128s botnet26t_256 eca_botnext26ts_256 visformer_small
""")
"""Built for one size, which an option sets."""


def timm_case(name: str) -> Case:
    size = TIMM_SIZES.get(name, SIZE)
    options: dict[str, Any] = {"img_size": size} if name in TIMM_IMG_SIZE else {}
    if name.startswith("vgg"):
        options["mlp_ratio"] = 1 / 64  # 120 million numbers are in two layers that say nothing here

    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return Case(f"timm/{name}", make, lambda: (picture(size),))


def smallest_timm_members() -> dict[str, str]:
    """The rule: of every family the member with the fewest parameters, names that begin with test_ apart; if it has
    fewer than three convolutions, only up to PATCH_EMBEDDING_ONLY parameters.
    """
    import timm

    found = {}
    for family in timm.list_modules():
        sizes = {}
        for name in timm.list_models(module=family, exclude_filters="test_*"):
            with torch.device("meta"):
                model = timm.create_model(name, num_classes=CLASSES)
            convolutions = sum(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
            sizes[name] = (sum(p.numel() for p in model.parameters()), convolutions)
        name = min(sizes, key=lambda name: (sizes[name][0], name))
        if sizes[name][1] >= 3 or (sizes[name][1] and sizes[name][0] <= PATCH_EMBEDDING_ONLY):
            found[family] = name
    return found


# ----------------------------------------------------------------------------------------------------------------------
# diffusers

BLOCKS: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
DOWN_UP: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,
}  # fmt: skip
CODER: dict[str, Any] = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
TINY: dict[str, Any] = {
    **dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (8, 8)),
    **dict.fromkeys(("num_encoder_blocks", "num_decoder_blocks"), (1, 1)),
}
CROSS: dict[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 8, "attention_head_dim": 4,
}  # fmt: skip


def diffusers_case(name: str, inputs: Callable[[], Inputs], discrete=False, no_double="", **options: Any) -> Case:
    def make() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**options)

    return Case(f"diffusers/{name}", make, inputs, discrete, no_double)


DIFFUSERS = [
    diffusers_case("AutoencoderKL", lambda: (picture(32),), **BLOCKS | CODER),
    diffusers_case("VQModel", lambda: (picture(32),), True, **BLOCKS | CODER, num_vq_embeddings=16),
    diffusers_case("AutoencoderTiny", lambda: (picture(32),), True, "rounds to bytes, in float32", **TINY),
    diffusers_case("UNet2DModel", lambda: (picture(32), 7), **BLOCKS | DOWN_UP),
    diffusers_case("UNet2DConditionModel", lambda: (picture(32, 4), 7, torch.randn(BATCH, 5, 8)), **BLOCKS | CROSS),
    diffusers_case(
        "UNet1DModel", lambda: (torch.randn(BATCH, 2, 64), 7), block_out_channels=(32, 32, 64), extra_in_channels=64
    ),
]


if __name__ == "__main__":
    for family, smallest in smallest_timm_members().items():
        print(f"{family}:{smallest}", "" if TIMM.get(family) == smallest else "(not what is stored)")
