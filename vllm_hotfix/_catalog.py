"""The patches, in the order in which they are applied and listed."""

from __future__ import annotations

from ._patch import Patch
from ._patches import keep_moe_kernel, keep_unloaded, measured_totals, pinned_staging, sleep_tensors, writable_scales

CATALOG: tuple[Patch, ...] = (
    pinned_staging.PATCH,
    measured_totals.PATCH,
    writable_scales.PATCH,
    keep_moe_kernel.PATCH,
    keep_unloaded.PATCH,
    sleep_tensors.PATCH,
)
