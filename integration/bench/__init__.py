"""`make bench`: cachefs against raw staging, pyfuse3's own passthrough example and rclone, in interleaved rounds.

Figures are medians; ratios are taken round by round, so that a noisy machine hits all alike.
"""
