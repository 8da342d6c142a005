"""Engines: what runs a routed call. ``create`` finds one by name; imports happen on first use."""

from __future__ import annotations

from rm_abstract.base.decline import Decline
from rm_abstract.base.entry_report import EntryReport
from rm_abstract.engines.base import Engine, Entry
from rm_abstract.engines.registry import create, load, names, register

__all__ = ["Decline", "Engine", "Entry", "EntryReport", "create", "load", "names", "register"]
