"""Checking: an experiment looked at as a whole before anything is started, every fault with its place and its remedy."""

from __future__ import annotations
