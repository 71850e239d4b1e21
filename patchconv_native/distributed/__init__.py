"""One image on several ranks, exactly: on torch.distributed (gloo on CPUs, NCCL on GPUs), launched by torchrun.

    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (4,))
    model = pc.distributed.spatial(model, mesh, dims="H")
    x = pc.distributed.scatter(image, mesh, dims="H")      # this rank's rows
    loss = model(x).mean()
    loss.backward()                                        # p.grad: the whole image's, the same on every rank

Imported by name (`import patchconv_native.distributed`) or on first use as `pc.distributed`.
"""

from ..spatial import NotServed, SpatialTensor
from .model import spatial, spatial_report
from .moving import from_dtensor, gather, halo_exchange, scatter, to_dtensor
from .traffic import Traffic

__all__ = [
    "NotServed",
    "SpatialTensor",
    "Traffic",
    "from_dtensor",
    "gather",
    "halo_exchange",
    "scatter",
    "spatial",
    "spatial_report",
    "to_dtensor",
]
