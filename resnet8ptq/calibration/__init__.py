"""From calibration images to a range of each tensor."""
