"""The data plane below the device: tiers that hold chunk images."""
