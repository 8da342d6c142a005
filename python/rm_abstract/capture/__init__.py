"""Turns a call of a module into the text form of the IR."""
