"""The hybrid KV cache: ring policy (integers), layers (tensors), the transformers adapter."""

from .hybrid import DEFAULT_SLACK, HybridCache, cache_bytes
from .ring import RingPolicy
from .snapshot import Snapshot, load_snapshot

__all__ = ["DEFAULT_SLACK", "HybridCache", "RingPolicy", "Snapshot", "cache_bytes", "load_snapshot"]
