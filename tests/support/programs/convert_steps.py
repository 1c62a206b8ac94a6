"""Converts a checkpoint whose classes this process does not have: `convert_steps.py FROM TO`."""

from __future__ import annotations

import sys

import ckpt.sync
from tests.support.real_jobs import tell

source, target = sys.argv[1:3]
unknown = bool(ckpt.sync.metadata(source).unknown_classes)
ckpt.sync.convert(source, target)
tell({"unknown": unknown})
