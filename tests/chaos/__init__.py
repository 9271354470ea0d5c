"""Jobs whose workers are killed, frozen and slowed at random, and the proof."""
