"""Names that users may have written down stay importable. Names are added to these lists, and never removed."""

from __future__ import annotations

import importlib
import inspect
import warnings

import pytest

import patchconv_native as pc

LAYERS = """
AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AlphaDropout
AvgPool1d AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d BatchNorm3d CELU CircularPad1d CircularPad2d CircularPad3d
ConstantPad1d ConstantPad2d ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Dropout
Dropout1d Dropout2d Dropout3d ELU FeatureAlphaDropout GELU GLU GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh
InstanceNorm1d InstanceNorm2d InstanceNorm3d LayerNorm LeakyReLU Linear LocalResponseNorm LogSigmoid MaxPool1d MaxPool2d
MaxPool3d Mish PReLU RMSNorm ReLU ReLU6 ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d
ReplicationPad2d ReplicationPad3d SELU SiLU Sigmoid Softplus Softshrink SyncBatchNorm Tanh Threshold Upsample
UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d
"""
LEAN_FUNCTIONS = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
add add_ add_relu alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm batch_norm_relu cat celu dropout dropout1d
dropout2d dropout3d elu feature_alpha_dropout gelu glu group_norm group_norm_silu hardshrink hardsigmoid hardswish
hardtanh instance_norm interpolate layer_norm leaky_relu linear local_response_norm logsigmoid max_pool1d max_pool2d
max_pool3d mish mul pad prelu relu relu6 rms_norm selu sigmoid silu softplus softshrink tanh threshold
"""
NAMES = {
    "patchconv_native": f"""
        {LAYERS}
        BudgetError BuildMismatchError CheckpointFunction ConvertReport Explanation Frontier NotBuiltError NotServed
        Plan TilePlan backend build_info checkpoint checkpoint_modules checkpoint_sequential convert convert_model
        convert_report explain functional last_path lean lean_functional max_batch max_size memory microbatch
        microbatch_modules plan recompute record_paths revert tile tile_modules tile_plan workspace_limit
    """,
    "patchconv_native.functional": f"""
        {LEAN_FUNCTIONS}
        conv conv1d conv2d conv2d_fused conv3d conv_transpose conv_transpose1d conv_transpose2d conv_transpose3d
        same_padding
    """,
    "patchconv_native.layers": "LAYERS NOTHING_TO_GAIN ReLU BatchNorm2d",
    "patchconv_native.modules": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d",
    "patchconv_native.memory": "Comparison Held MemoryReport ModuleFacts Peak Stretch Trace compare trace",
    "patchconv_native.planner": "BudgetError Frontier Plan Strategy max_batch max_size plan",
    "patchconv_native.distributed": """
        NotServed SpatialTensor Traffic from_dtensor gather halo_exchange scatter spatial spatial_report to_dtensor
    """,
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", ["patchconv_native", "patchconv_native.functional"])
def test_the_lists_are_whole(module: str) -> None:
    assert sorted(NAMES[module].split()) == sorted(importlib.import_module(module).__all__)


def test_functions_are_functions() -> None:
    """Not the files of the same name (conv, dropout)."""
    assert all(inspect.isfunction(getattr(pc.functional, name)) for name in pc.functional.__all__)
    assert all(getattr(pc.functional, name).__doc__ for name in pc.functional.__all__)


def test_deprecated_names_warn() -> None:
    for name in LEAN_FUNCTIONS.split():
        text = rf"^patchconv_native\.lean_functional\.{name} is deprecated: use patchconv_native\.functional\.{name}$"
        with pytest.warns(DeprecationWarning, match=text):
            assert getattr(pc.lean_functional, name) is getattr(pc.functional, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        pc.lean_functional.nothing  # noqa: B018


def test_a_star_import_of_the_deprecated_module() -> None:
    names: dict[str, object] = {}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        exec("from patchconv_native.lean_functional import *", names)
    assert names["relu"] is pc.functional.relu
    assert any("lean_functional.relu is deprecated" in str(one.message) for one in found)
