"""The operator schemas, and the library that holds them.

Saved programs (`torch.export`) refer to these operators by name, so names, order and types of the arguments are
fixed; a new argument goes to the end, with a default.

Every public operator has a twin with a leading underscore (`swa_pass::_attend`, ...) and the same schema. The twin is
always the plain torch implementation. The C++ kernels hand everything to it that they were not written for: long
prefills, odd layouts, and every call that breaks a rule, so that each error message exists once, in Python.
"""

from __future__ import annotations

import torch

NAMESPACE = "swa_pass"

_EXTRAS = "float softcap=0.0, Tensor? sinks=None, Tensor? new_lengths=None, Tensor? block_table=None, {scales}"
_READ_SCALES = "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? valid=None"
_WRITE_SCALES = "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, Tensor(e!)? valid=None"

# name -> everything after the name. Mutated arguments are marked (a!), (b!), ...: functionalization and dead-code
# removal rely on it.
SCHEMAS: dict[str, str] = {
    "view": (
        "(Tensor store, Tensor new, Tensor lengths, int window, int layer=-1, Tensor? starts=None, "
        "Tensor? scale=None) -> Tensor"
    ),
    "append": (
        "(Tensor k_new, Tensor v_new, Tensor(a!) k_store, Tensor(b!) v_store, Tensor lengths, *, int window, "
        f"Tensor? new_lengths=None, Tensor? block_table=None, {_WRITE_SCALES}) -> ()"
    ),
    "attend": (
        "(Tensor q, Tensor k_new, Tensor v_new, Tensor k_store, Tensor v_store, Tensor lengths, "
        "Tensor? starts=None, *, int window, float scale, " + _EXTRAS.format(scales=_READ_SCALES) + ") -> Tensor"
    ),
    "attend_append": (
        "(Tensor q, Tensor k_new, Tensor v_new, Tensor(a!) k_store, Tensor(b!) v_store, Tensor lengths, "
        "Tensor? starts=None, *, int window, float scale, " + _EXTRAS.format(scales=_WRITE_SCALES) + ") -> Tensor"
    ),
}

library = torch.library.Library(NAMESPACE, "DEF")


def define() -> None:
    """Define all operators, public ones and twins. Called once, at import of `swa_pass.ops`."""
    for name, signature in SCHEMAS.items():
        for full_name in (name, "_" + name):
            library.define(full_name + signature, tags=(torch.Tag.pt2_compliant_tag,))
