"""The common ground of every part: error classes, ClassAds, settings, clocks, log, durable steps, states."""
