"""Rebellions' NPUs (ATOM, REBEL) through the vendor's compiler and runtime, the module `rebel`."""
