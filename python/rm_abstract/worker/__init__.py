"""Worker processes: a vendor's SDK, or anything that may crash, outside the user's process."""
