"""What every other package may use: errors, reasons, options, ``disabled()``, entry records."""
