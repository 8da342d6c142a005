"""Is it still the same forward, and does it only compute its outputs?"""
