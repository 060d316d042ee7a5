"""What every part builds on: error classes, ClassAds, settings, clocks, log, durable steps, states."""
