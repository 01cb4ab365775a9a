"""The part of the plugin that optimum-habana 1.21.2 imports."""

from . import _ops, core, distributed, hpex, hpu, utils

__all__ = ["_ops", "core", "distributed", "hpex", "hpu", "utils"]
