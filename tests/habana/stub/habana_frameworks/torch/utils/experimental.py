from enum import Enum

from .. import hpu

__all__ = ["hpu"]


class synDeviceType(Enum):
    synDeviceGaudi = 1
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type():
    return synDeviceType.synDeviceGaudi3
