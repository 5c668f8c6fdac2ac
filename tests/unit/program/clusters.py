"""A cluster of which only the number of devices, in all and in a machine, matters."""

from __future__ import annotations

from simtrain.scenario.hardware import Accelerator, AcceleratorKind, Cluster, Link, Precision

_LINK = Link("link", bandwidth=1e9, efficiency=1.0, latency=1e-6)
_DEVICE = Accelerator(
    name="device",
    vendor="",
    kind=AcceleratorKind.GPU,
    architecture="",
    matrix_peak={Precision.FP32: 1e12},
    vector_peak=1e12,
    memory_bytes=1e9,
    memory_bandwidth=1e11,
    units=1,
    array_dim=0,
    l2_bytes=1e6,
    host_bandwidth=1e9,
    power=0.0,
)


def cluster(devices: int, per_machine: int) -> Cluster:
    """``devices`` devices, ``per_machine`` to a machine."""
    return Cluster(
        accelerator=_DEVICE,
        devices=devices,
        devices_per_machine=per_machine,
        scale_up=_LINK,
        scale_out=_LINK,
        nics_per_machine=1,
    )
