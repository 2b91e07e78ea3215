"""The patches, in the order in which they are applied and listed."""

from __future__ import annotations

from ._patch import Patch
from ._patches import measured_totals

CATALOG: tuple[Patch, ...] = (measured_totals.PATCH,)
