"""Generation by an engine in a process of its own: process, wire, streams, weights."""
