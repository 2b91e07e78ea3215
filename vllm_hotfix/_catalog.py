"""The patches, in the order in which they are applied and listed."""

from __future__ import annotations

from ._patch import Patch
from ._patches import (
    keep_moe_kernel,
    keep_unloaded,
    marlin_workspace,
    measured_totals,
    mla_in_place,
    pinned_staging,
    runai_buffers,
    runai_reload,
    sleep_state,
    sleep_tensors,
    writable_scales,
)

CATALOG: tuple[Patch, ...] = (
    # Both wrap one function, and what the outer one, pinned_staging, yields is none of the inner one's business.
    runai_buffers.PATCH,
    pinned_staging.PATCH,
    runai_reload.PATCH,
    measured_totals.PATCH,
    writable_scales.PATCH,
    keep_moe_kernel.PATCH,
    mla_in_place.PATCH,
    marlin_workspace.PATCH,
    keep_unloaded.PATCH,
    sleep_state.PATCH,
    sleep_tensors.PATCH,
)
