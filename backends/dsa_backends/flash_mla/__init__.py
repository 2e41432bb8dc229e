"""FlashMLA's sparse forward, from whichever package on this machine provides a working one."""
