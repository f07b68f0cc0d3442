"""From data flags to micro-batches on the device."""
