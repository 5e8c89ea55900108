"""The data plane below the device: tiers that hold block images."""
