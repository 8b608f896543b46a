"""Power losses on real files under a running broker."""
